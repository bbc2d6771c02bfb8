#include "group.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "given.hpp"
#include "layout.hpp"

namespace paceline {

using c10d::OpType;

Group::Group(
    int rank,
    std::vector<Peer> peers,
    std::shared_ptr<Arena> arena,
    std::chrono::milliseconds timeout)
    : Backend(rank, static_cast<int>(peers.size())),
      members_(rank, std::move(peers), std::move(arena)),
      collectives_(members_),
      messages_(members_, Patience::for_ranks(members_.size())),
      exchange_(members_, Patience::for_ranks(members_.size())),
      queue_(Patience::for_ranks(members_.size())),
      timeout_(timeout) {}

Group::~Group() {
  shutdown();
}

c10::intrusive_ptr<c10d::Backend::Options> Group::getBackendOptions() {
  return c10::make_intrusive<Options>("shm", timeout_);
}

void Group::abort() {
  shutdown();
}

void Group::shutdown() {
  members_.leave();
  // What ends here may call back into Python.
  const auto end = [this] {
    queue_.stop();
    messages_.stop();
  };
  if (Py_IsInitialized() && PyGILState_Check()) {
    pybind11::gil_scoped_release release;
    end();
  } else {
    end();
  }
}

at::Tensor Group::allocateTensor(long size, at::TensorOptions options) {
  return empty(members_.arena(), {size}, c10::typeMetaToScalarType(options.dtype()));
}

WorkPointer Group::start(const Plan& plan, Calls calls) {
  members_.check_usable();
  Call call{plan.kind};
  call.timeout = plan.timeout;
  call.reduction = plan.reduction;
  call.root = plan.root;
  TORCH_CHECK_VALUE(
      plan.root < size_, "shared memory: rank ", plan.root, " as root; the group has ", size_, " ranks");
  call.dtype = plan.dtype;
  if (call.reduction != Reduction::UNUSED) {
    check_reduction(call.reduction, call.dtype);
  }
  const std::string title = std::string("shm:") + name_of(plan.kind);
  auto work = c10::make_intrusive<SharedWork>(rank_, plan.type, title.c_str(), plan.inputs, plan.outputs, ++sequence_);
  work->help_by([this, work = work.get()] { queue_.help([work] { return work->isCompleted(); }); });
  const Queue::Task task = [this, work, call, calls = std::move(calls)](const Patience& patience) -> std::function<void()> {
    Call mine = call;
    mine.patience = patience;
    std::exception_ptr error;
    try {
      const at::AutoDispatchBelowADInplaceOrView below;
      members_.check_usable();
      calls(collectives_, mine);
    } catch (const std::exception& exception) {
      members_.fail(reason_of(exception));
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

void Group::check_room(const at::Tensor& parts, const at::Tensor& part, const char* what) const {
  TORCH_CHECK_VALUE(
      parts.numel() == part.numel() * size_,
      "shared memory: ", what, " among ", size_, " ranks: ", parts.numel(), " elements are not ", size_, " times ",
      part.numel());
}

WorkPointer Group::start_message(bool sending, Tensors& tensors, int peer, int tag, OpType type) {
  const at::Tensor tensor = only(tensors);
  check_tensors({tensor}, tensor.scalar_type());
  TORCH_CHECK_VALUE(
      peer == kAnySource || (peer >= 0 && peer < size_ && peer != rank_),
      "shared memory: rank ", rank_, " of ", size_, " exchanges messages with another rank of the group, not with ", peer);
  const auto flat = sending ? plain(tensor) : Landing(tensor).flat();
  const auto work = c10::make_intrusive<SharedWork>(
      rank_, type, sending ? "shm:send" : "shm:recv", Tensors{tensor}, 
      std::vector<Tensors>{sending ? Tensors{} : Tensors{tensor}}, ++sequence_);
  const auto message = std::make_shared<Message>();
  message->peer = peer;
  message->tag = tag;
  message->data = bytes_of(flat).data;
  message->bytes = flat.nbytes();
  message->timeout = timeout_;
  message->finish = [work, tensor, flat, from = message.get()](std::exception_ptr error) {
    if (!error && !flat.is_same(tensor)) {
      const at::AutoDispatchBelowADInplaceOrView below;
      tensor.copy_(flat);
    }
    work->set_source(from->peer);
    work->complete(std::move(error));
  };
  work->help_by([this, waited = std::weak_ptr<Message>(message)] {
    if (const auto message = waited.lock()) {
      messages_.wait(message);
    }
  });
  if (sending) {
    messages_.send(message);
  } else {
    messages_.receive(message);
  }
  return work;
}

WorkPointer Group::send(Tensors& tensors, int to, int tag) {
  return start_message(true, tensors, to, tag, OpType::SEND);
}

WorkPointer Group::recv(Tensors& tensors, int from, int tag) {
  return start_message(false, tensors, from, tag, OpType::RECV);
}

WorkPointer Group::recvAnysource(Tensors& tensors, int tag) {
  return start_message(false, tensors, kAnySource, tag, OpType::RECVANYSOURCE);
}

}  // namespace paceline
