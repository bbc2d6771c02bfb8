#include "exchange.hpp"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

namespace paceline {

namespace {

constexpr size_t kDirectBytes = 32 << 10;  // up to here every rank adds up everything itself
constexpr size_t kBlock = 16 << 10;        // still in the nearest cache when it is copied
constexpr size_t kLine = 64;

bool reached(uint32_t value, uint32_t count) {
  return static_cast<int32_t>(value - count) >= 0;
}

}  // namespace

std::string Exchange::title(const Started& started) {
  return c10::str(
      name_of(started.kind), " #", started.number, " of the program, of ",
      started.input.bytes / c10::elementSize(started.dtype), " ", c10::toString(started.dtype));
}

uint32_t Exchange::start(
    Kind kind, c10::ScalarType dtype, Held input, std::vector<size_t> rows, std::chrono::milliseconds timeout) {
  members_.check_usable();
  release();
  const Started started{started_, kind, dtype, std::move(input), std::move(rows), timeout, std::nullopt};
  if (!held_.empty() && started_ - held_.front().number >= kNotices) {  // others have to read the notice first
    const auto place = held_.front().place;
    TORCH_CHECK(place, "shared memory: more than ", kNotices, " exchanges are started and not waited for");
    await(&Front::finished, *place + 1, title(started), timeout);
    release();
  }
  Front& own = members_.own().front();
  const auto offset = members_.arena().offset(started.input.data(), started.input.bytes);
  TORCH_INTERNAL_ASSERT(offset.has_value() || started.input.bytes == 0);
  own.notices[started_ % kNotices] = {
      offset.value_or(0), started.input.bytes, static_cast<int32_t>(kind), static_cast<int32_t>(dtype)};
  held_.push_back(started);
  own.started.raise(++started_);
  return started.number;
}

void Exchange::finish(uint32_t number, Bytes out) {
  const auto found =
      std::find_if(held_.begin(), held_.end(), [number](const Started& each) { return each.number == number; });
  TORCH_CHECK(found != held_.end() && !found->place, "shared memory: an exchange is waited for once");
  const Started started = *found;
  await(&Front::started, number + 1, title(started), started.timeout);
  check_agreement(started);
  switch (started.kind) {
    case Kind::kBarrier:
      break;
    case Kind::kAllReduce:
      all_reduce(started, out);
      break;
    case Kind::kAllGather:
      all_gather(started, out);
      break;
    case Kind::kReduceScatter:
      reduce_scatter(started, out);
      break;
    default:
      all_to_all(started, out);
  }
  found->place = finished_++;
  members_.own().front().finished.raise(finished_);
  if (started.kind == Kind::kAllReduce && started.input.bytes > 0 && out.data == started.input.data()) {
    await(&Front::finished, finished_, title(started), started.timeout);  // others write a part of it
  }
}

void Exchange::fence(std::chrono::milliseconds timeout) {
  finish(start(Kind::kBarrier, c10::kByte, {}, {}, timeout), {nullptr, 0});
}

void Exchange::release() {
  held_.remove_if([this](const Started& started) {
    if (!started.place) {
      return false;
    }
    for (int rank = 0; rank < members_.size(); ++rank) {
      const uint32_t finished = members_.window(rank).front().finished.value.load(std::memory_order_acquire);
      if (!reached(finished, *started.place + 1)) {
        return false;
      }
    }
    return true;
  });
}

void Exchange::await(
    Signal Front::* signal, uint32_t count, const std::string& what, std::chrono::milliseconds timeout) {
  const Deadline deadline = Clock::now() + timeout;
  for (int rank = 0; rank < members_.size(); ++rank) {
    if (rank == members_.rank()) {
      continue;
    }
    wait(
        members_.window(rank).front().*signal,
        patience_,
        [count](uint32_t value) { return reached(value, count); },
        [&] {
          members_.check_usable();
          members_.check(
              [&](int other) { return !reached((members_.window(other).front().*signal).value.load(), count); }, what);
          if (Clock::now() > deadline) {
            members_.throw_late(rank, what, timeout);
          }
        });
  }
}

void Exchange::check_agreement(const Started& started) const {
  const auto notice = [&](int rank) -> const Notice& {
    return members_.window(rank).front().notices[started.number % kNotices];
  };
  const Notice& own = notice(members_.rank());
  for (int rank = 0; rank < members_.size(); ++rank) {
    const Notice& other = notice(rank);
    if (own.kind != other.kind || own.dtype != other.dtype || own.bytes != other.bytes) {
      C10_THROW_ERROR(
          DistBackendError,
          c10::str(
              "shared memory: the ranks run different programs: at ", title(started), " ", members_.name(rank),
              " starts ", name_of(static_cast<Kind>(other.kind)), " of ", other.bytes, " bytes"));
    }
  }
}

char* Exchange::input_of(int rank, const Started& started) {
  if (rank == members_.rank()) {
    return started.input.data();
  }
  return members_.arena_of(rank) + members_.window(rank).front().notices[started.number % kNotices].offset;
}

void Exchange::all_reduce(const Started& started, Bytes out) {
  if (out.data == started.input.data()) {
    return all_reduce_in_place(started);
  }
  std::vector<const char*> sources;
  for (int rank = 0; rank < members_.size(); ++rank) {
    sources.push_back(input_of(rank, started));
  }
  reduce(Reduction::SUM, started.dtype, out.data, sources, out.count);
}

// Each rank adds up its part and writes the sum into every rank's input.
void Exchange::all_reduce_in_place(const Started& started) {
  const size_t unit = std::max(kLine, c10::elementSize(started.dtype));
  const size_t lines = (started.input.bytes + unit - 1) / unit;
  const auto edge = [&](int rank) { return std::min(lines * rank / members_.size() * unit, started.input.bytes); };
  const size_t end = edge(members_.rank() + 1);
  std::vector<const char*> sources(members_.size());
  for (size_t begin = edge(members_.rank()); begin < end; begin += kBlock) {
    const size_t count = std::min(kBlock, end - begin);
    for (int rank = 0; rank < members_.size(); ++rank) {
      sources[rank] = input_of(rank, started) + begin;
    }
    char* sum = started.input.data() + begin;
    reduce(Reduction::SUM, started.dtype, sum, sources, count);
    for (int rank = 0; rank < members_.size(); ++rank) {
      if (rank != members_.rank()) {
        std::memcpy(input_of(rank, started) + begin, sum, count);
      }
    }
  }
}

void Exchange::all_gather(const Started& started, Bytes out) {
  for (int turn = 0; turn < members_.size(); ++turn) {
    const int rank = (members_.rank() + turn) % members_.size();
    std::memcpy(out.data + rank * started.input.bytes, input_of(rank, started), started.input.bytes);
  }
}

void Exchange::reduce_scatter(const Started& started, Bytes out) {
  std::vector<const char*> sources(members_.size());
  size_t tensor = 0;
  for (const size_t row : started.rows) {
    for (int rank = 0; rank < members_.size(); ++rank) {
      sources[rank] = input_of(rank, started) + tensor + members_.rank() * row;
    }
    reduce(Reduction::SUM, started.dtype, out.data, sources, row);
    out.data += row;
    tensor += members_.size() * row;
  }
}

void Exchange::all_to_all(const Started& started, Bytes out) {
  const size_t row = started.input.bytes / members_.size();
  for (int turn = 0; turn < members_.size(); ++turn) {
    const int rank = (members_.rank() + turn) % members_.size();
    std::memcpy(out.data + rank * row, input_of(rank, started) + members_.rank() * row, row);
  }
}

}  // namespace paceline
