#include "hierarchy.hpp"

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <future>
#include <optional>
#include <thread>

#include "flat_message.hpp"

namespace paceline {

using hosts::Level;
using hosts::Levels;

namespace {

using namespace std::chrono_literals;
using c10d::OpType;

constexpr auto kCause = "cause";
// A rank that sees another host break off waits this long for word of why; hosts notice a death of their own in 100 ms.
constexpr auto kWordOfCause = 400ms;
constexpr auto kStorePatience = 700ms;

}  // namespace

Hierarchy::Hierarchy(
    hosts::Seating seating,
    hosts::Parts parts,
    c10::intrusive_ptr<c10d::Store> store,
    std::vector<int64_t> global_ranks,
    std::chrono::milliseconds timeout)
    : Backend(seating.rank, seating.size),
      seating_(std::move(seating)),
      store_(store ? store->clone() : nullptr),  // its own connection: another thread may be waiting on the caller's
      global_ranks_(std::move(global_ranks)),
      timeout_(timeout),
      parts_(std::move(parts)) {
  const auto seat = seating_.seats[rank_];
  const auto check = [](const hosts::Part& part, const char* name, int64_t rank, int64_t size) {
    TORCH_CHECK(part, "the group's part '", name, "' is missing");
    TORCH_CHECK(
        part->getRank() == rank && part->getSize() == size,
        "the group's part '",
        name,
        "' should have this rank as ",
        rank,
        " of ",
        size,
        ", and has it as ",
        part->getRank(),
        " of ",
        part->getSize());
  };
  check(parts_.flat, "flat", rank_, size_);
  if (seating_.count(seat.host) > 1) {
    check(parts_.local, "local", seat.index, seating_.count(seat.host));
  }
  if (seating_.even || seat.index == 0) {
    check(parts_.between, "between", seat.host, seating_.host_count());
  }
  TORCH_CHECK(
      global_ranks_.size() == static_cast<size_t>(size_), size_, " ranks have ", global_ranks_.size(), " global ranks");
}

Hierarchy::~Hierarchy() {
  // What still runs may need the interpreter for its callbacks.
  std::optional<pybind11::gil_scoped_release> released;
  if (PyGILState_Check()) {
    released.emplace();
  }
  queue_.stop();
  parts_ = {};
}

c10::intrusive_ptr<c10d::Backend::Options> Hierarchy::getBackendOptions() {
  return c10::make_intrusive<Options>("shm", timeout_);
}

void Hierarchy::setTimeout(std::chrono::milliseconds timeout) {
  timeout_ = timeout;
  const auto now = parts("setTimeout");
  for (const auto& part : {now.local, now.between, now.flat}) {
    if (part) {
      part->setTimeout(timeout);
    }
  }
}

std::string Hierarchy::names(const std::vector<int64_t>& ranks) const {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += (i ? ", " : "") + std::to_string(global_ranks_[ranks[i]]);
  }
  return text;
}

// Whom a level talks to, in words.
std::string Hierarchy::place(Level level) const {
  const auto home = seating_.seats[rank_].host;
  if (level == Level::kLocal) {
    return c10::str("among ", names(seating_.hosts[home]), " of its host");
  }
  std::vector<int64_t> others;
  for (int64_t other = 0; other < size_; ++other) {
    if (seating_.seats[other].host != home) {
      others.push_back(other);
    }
  }
  return level == Level::kBetween ? c10::str("between its host and those of ", names(others)) : "among all ranks";
}

hosts::Parts Hierarchy::parts(const char* title) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!ended_.empty()) {
    C10_THROW_ERROR(DistBackendError, c10::str(title, ": the group has ended, since ", ended_));
  }
  return parts_;
}

void Hierarchy::end(const std::string& reason) {
  hosts::Parts ending;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (ended_.empty()) {
      ended_ = reason;
    }
    std::swap(ending, parts_);
  }
  for (const auto& part : {ending.local, ending.between, ending.flat}) {
    if (part) {
      part->abort();
    }
  }
}

// What happened first according to the store, or that this did. Never waits longer than kStorePatience, because the
// store may be out of reach.
std::string Hierarchy::explain(const std::string& own, bool remote) {
  if (!store_) {
    return "";
  }
  auto answer = std::make_shared<std::promise<std::string>>();
  auto told = answer->get_future();
  std::thread([answer, store = store_, own, remote] {
    try {
      const auto until = std::chrono::steady_clock::now() + kWordOfCause;
      while (remote && !store->check({kCause}) && std::chrono::steady_clock::now() < until) {
        std::this_thread::sleep_for(10ms);
      }
      answer->set_value(store->compareSet(kCause, "", own));
    } catch (...) {
      answer->set_value("");
    }
  }).detach();
  return told.wait_for(kStorePatience) == std::future_status::ready ? told.get() : "";
}

// Run a body, and end the group if it fails.
void Hierarchy::run(const char* title, std::chrono::milliseconds timeout, const Body& body) {
  auto now = parts(title);
  std::string error;
  std::optional<Level> level;
  try {
    Levels levels(seating_, std::move(now), timeout);
    return body(levels);
  } catch (const hosts::PartError& failed) {
    error = failed.what();
    level = failed.level;
  } catch (const std::exception& failed) {
    error = reason_of(failed);
  }
  const auto own =
      c10::str(title, " failed on ", names({rank_}), level ? " " + place(*level) : std::string(), ": ", error);
  const auto first = explain(own, level && *level != Level::kLocal);
  const auto whole = first.empty() || first == own ? own : c10::str(own, "\nThe first error: ", first);
  end(whole);
  C10_THROW_ERROR(DistBackendError, whole);
}

Hierarchy::WorkPointer Hierarchy::start(Plan plan, Body body) {
  const auto timeout = plan.timeout == c10d::kUnsetTimeout ? timeout_ : plan.timeout;
  const auto* title = plan.title;
  const auto work =
      c10::make_intrusive<SharedWork>(rank_, plan.kind, title, plan.inputs, std::move(plan.outputs), ++sequence_);
  const Queue::Task task = [this, work, title, timeout, inputs = plan.inputs, body = std::move(body)](const Patience&) {
    std::exception_ptr error;
    try {
      const at::AutoDispatchBelowADInplaceOrView below;
      run(title, timeout, body);
    } catch (...) {
      error = std::current_exception();
    }
    return [work, error] { work->complete(error); };
  };
  if (plan.asynchronous) {
    queue_.push(task);
  } else {
    queue_.run(task);
  }
  return work;
}

Hierarchy::WorkPointer Hierarchy::start_message(
    OpType kind, const char* title, Tensors& tensors, int peer, int tag) {
  TORCH_CHECK(peer >= -1 && peer < size_, title, " ", peer, ": the group has ranks 0 to ", size_ - 1);
  const auto what = c10::str(title, " ", peer < 0 ? "any rank" : names({peer}), " on ", names({rank_}));
  TORCH_CHECK(tensors.size() == 1, what, " takes one tensor, and got ", tensors.size());
  hosts::check_plain(tensors.front(), title);
  const auto flat = parts(what.c_str()).flat;
  const at::AutoDispatchBelowADInplaceOrView below;
  auto message = c10::make_intrusive<hosts::FlatMessage>(rank_, kind, what, tensors.front());
  try {
    if (kind == OpType::SEND) {
      Tensors bytes{hosts::packed(tensors)};
      message->start(flat->send(bytes, peer, tag), std::nullopt);
    } else {
      const Landing landing(tensors.front());
      Tensors bytes{hosts::as_bytes(landing.flat())};
      message->start(peer < 0 ? flat->recvAnysource(bytes, tag) : flat->recv(bytes, peer, tag), landing);
    }
  } catch (const std::exception& error) {
    C10_THROW_ERROR(DistBackendError, c10::str(what, " failed: ", reason_of(error)));
  }
  return message;
}

Hierarchy::WorkPointer Hierarchy::send(Tensors& tensors, int to, int tag) {
  return start_message(OpType::SEND, "send to", tensors, to, tag);
}

Hierarchy::WorkPointer Hierarchy::recv(Tensors& tensors, int from, int tag) {
  return start_message(OpType::RECV, "recv from", tensors, from, tag);
}

Hierarchy::WorkPointer Hierarchy::recvAnysource(Tensors& tensors, int tag) {
  return start_message(OpType::RECVANYSOURCE, "recv from", tensors, -1, tag);
}

at::Tensor Hierarchy::allocateTensor(long size, at::TensorOptions options) {
  const auto local = parts("allocateTensor").local;
  TORCH_CHECK(local, "the only rank of a host shares memory with nobody");
  return local->allocateTensor(size, options);
}

bool Hierarchy::supportsTensorAlloc(c10::DeviceIndex device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return parts_.local && parts_.local->supportsTensorAlloc(device);
}

void Hierarchy::abort() {
  end("it was aborted");
}

void Hierarchy::shutdown() {
  queue_.stop();
  end("it was shut down");
}

void bind_hierarchy(pybind11::module& module) {
  namespace py = pybind11;
  module.def(
      "hierarchy",
      [](int rank,
         std::vector<std::vector<int64_t>> hosts_of_group,
         hosts::Part local,
         hosts::Part between,
         hosts::Part flat,
         c10::intrusive_ptr<c10d::Store> store,
         std::vector<int64_t> global_ranks,
         std::chrono::milliseconds timeout) -> c10::intrusive_ptr<c10d::Backend> {
        const int size = static_cast<int>(global_ranks.size());
        return c10::make_intrusive<Hierarchy>(
            hosts::Seating(rank, size, std::move(hosts_of_group)),
            hosts::Parts{std::move(local), std::move(between), std::move(flat)},
            std::move(store),
            std::move(global_ranks),
            timeout);
      },
      py::arg("rank"),
      py::kw_only(),
      py::arg("hosts"),
      py::arg("local"),
      py::arg("between"),
      py::arg("flat"),
      py::arg("store"),
      py::arg("global_ranks"),
      py::arg("timeout"),
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace paceline
