#include "collectives.hpp"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

namespace paceline {

namespace {

constexpr size_t kLine = 64;
constexpr size_t kDirectBytes = 16 << 10;  // up to here every rank adds up everything itself: one step instead of two

size_t round_down(size_t bytes) {
  return bytes / kLine * kLine;
}

void copy(char* to, const char* from, size_t count) {
  if (to != from && count > 0) {
    std::memmove(to, from, count);
  }
}

bool agree(const Descriptor& a, const Descriptor& b) {
  return a.sequence == b.sequence && a.kind == b.kind && a.bytes == b.bytes && a.dtype == b.dtype &&
      a.reduction == b.reduction && a.root == b.root;
}

}  // namespace

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::kBarrier:
      return "barrier";
    case Kind::kBroadcast:
      return "broadcast";
    case Kind::kAllReduce:
      return "all_reduce";
    case Kind::kReduce:
      return "reduce";
    case Kind::kAllGather:
      return "all_gather";
    case Kind::kGather:
      return "gather";
    case Kind::kScatter:
      return "scatter";
    case Kind::kReduceScatter:
      return "reduce_scatter";
    case Kind::kAllToAll:
      return "all_to_all";
  }
  return "an unknown call";
}

std::string Collectives::title(const Descriptor& descriptor) const {
  const auto kind = static_cast<Kind>(descriptor.kind);
  std::string text = c10::str(name_of(kind), " #", descriptor.sequence);
  if (descriptor.bytes > 0) {
    const auto dtype = static_cast<c10::ScalarType>(descriptor.dtype);
    text += c10::str(" of ", descriptor.bytes / c10::elementSize(dtype), " ", c10::toString(dtype));
  }
  const auto reduction = static_cast<Reduction>(descriptor.reduction);
  if (reduction != Reduction::UNUSED) {
    text += c10::str(" by ", name_of(reduction));
  }
  if (descriptor.root >= 0) {
    text += c10::str(" with root ", descriptor.root);
  }
  return text;
}

Descriptor Collectives::describe(const Call& call) const {
  Descriptor descriptor{};
  descriptor.sequence = sequence_;
  descriptor.bytes = call.bytes;
  descriptor.kind = static_cast<int32_t>(call.kind);
  descriptor.dtype = static_cast<int32_t>(call.dtype);
  descriptor.reduction = static_cast<int32_t>(call.reduction);
  descriptor.root = call.root;
  return descriptor;
}

// Lay down the descriptor of the next step, and wait until all ranks have laid down theirs.
//
// What a rank lays down for a step stays until the step after the next: whoever is at step t + 2 has seen everybody at
// step t + 1, and therefore done with step t. Hence two buffers of everything.
void Collectives::arrive(const Call& call, const Descriptor& descriptor) {
  const uint32_t step = step_ + 1;
  Front& own = members_.own().front();
  own.descriptors[step & 1] = descriptor;
  step_ = step;
  own.step.raise(step);
  const Deadline deadline = Clock::now() + call.timeout;
  for (int rank = 0; rank < members_.size(); ++rank) {
    if (rank == members_.rank()) {
      continue;
    }
    Signal& signal = members_.window(rank).front().step;
    wait(
        signal,
        call.patience,
        [step](uint32_t value) { return static_cast<int32_t>(value - step) >= 0; },
        [&] {
          members_.check_usable();
          const auto owes = [&](int other) {
            const uint32_t value = members_.window(other).front().step.value.load();
            return static_cast<int32_t>(value - step) < 0;
          };
          members_.check(owes, title(descriptor));
          if (Clock::now() > deadline) {
            members_.throw_late(rank, title(descriptor), call.timeout);
          }
        });
  }
  check_agreement(call);
}

void Collectives::check_agreement(const Call& call) const {
  const Descriptor& own = members_.own().front().descriptors[step_ & 1];
  for (int rank = 0; rank < members_.size(); ++rank) {
    const Descriptor& other = members_.window(rank).front().descriptors[step_ & 1];
    if (!agree(own, other)) {
      C10_THROW_ERROR(
          DistBackendError,
          c10::str(
              "shared memory: the ranks of this group do not make the same calls: ", members_.name(members_.rank()),
              " calls ", title(own), ", ", members_.name(rank), " calls ", title(other)));
    }
  }
}

void Collectives::exchange(const Call& call, const std::vector<Bytes>& pieces, Give give, const Take& take) {
  const bool each = give == Give::kEach;
  const int size = members_.size();
  const int me = members_.rank();
  const size_t width = round_down(kStageBytes / (each ? size : 1));

  Descriptor descriptor = describe(call);
  descriptor.gives = !pieces.empty();
  descriptor.shared = !pieces.empty() && give != Give::kCopy;
  std::vector<Entry> entries(pieces.size());
  for (size_t index = 0; index < pieces.size(); ++index) {
    entries[index].bytes = pieces[index].count;
    descriptor.longest = std::max<uint64_t>(descriptor.longest, pieces[index].count);
    const bool others_read = !each || static_cast<int>(index) != me;
    if (others_read && pieces[index].count > 0) {
      const auto offset = members_.arena().offset(pieces[index].data, pieces[index].count);
      descriptor.shared = descriptor.shared && offset.has_value();
      entries[index].offset = offset.value_or(0);
    }
  }

  const auto lay_down = [&](size_t begin) {
    const uint32_t step = step_ + 1;
    std::copy(entries.begin(), entries.end(), members_.own().entries(step));
    if (!descriptor.shared) {
      for (size_t index = 0; index < pieces.size(); ++index) {
        if ((!each || static_cast<int>(index) != me) && begin < pieces[index].count) {
          const size_t count = std::min(width, pieces[index].count - begin);
          copy(members_.own().stage(step) + (each ? index * width : 0), pieces[index].data + begin, count);
        }
      }
    }
    arrive(call, descriptor);
  };

  lay_down(0);
  size_t longest = 0;
  bool staged = false;
  bool shared = false;
  for (int rank = 0; rank < size; ++rank) {
    const Descriptor& other = members_.window(rank).front().descriptors[step_ & 1];
    longest = std::max<size_t>(longest, other.longest);
    staged = staged || (other.gives && !other.shared);
    shared = shared || other.shared;
  }
  const size_t stride = staged ? width : std::max<size_t>(longest, 1);

  std::vector<View> views(size);
  for (size_t begin = 0; begin == 0 || begin < longest; begin += stride) {
    if (begin > 0) {
      lay_down(begin);
    }
    for (int rank = 0; rank < size; ++rank) {
      const Descriptor& other = members_.window(rank).front().descriptors[step_ & 1];
      views[rank] = {nullptr, 0};
      if (!other.gives) {
        continue;
      }
      const Entry& entry = members_.window(rank).entries(step_)[each ? me : 0];
      const size_t count = begin < entry.bytes ? std::min<size_t>(stride, entry.bytes - begin) : 0;
      if (rank == me) {
        views[rank] = {pieces[each ? me : 0].data + begin, count};
      } else if (other.shared) {
        views[rank] = {members_.arena_of(rank) + entry.offset + begin, count};
      } else {
        views[rank] = {members_.window(rank).stage(step_) + (each ? me * width : 0), count};
      }
    }
    take(begin, views);
  }
  if (shared) {
    arrive(call, descriptor);  // before anybody changes what others may still be reading
  }
}

void Collectives::add_up(const Call& call, const std::vector<Bytes>& pieces, Give give, Bytes out) {
  std::vector<const char*> sources(members_.size());
  exchange(call, pieces, give, [&](size_t begin, const std::vector<View>& views) {
    for (int rank = 0; rank < members_.size(); ++rank) {
      check_fits(rank, give, out.count);
      sources[rank] = views[rank].data;
    }
    paceline::reduce(call.reduction, call.dtype, out.data + begin, sources, views[members_.rank()].count);
  });
}

void Collectives::check_fits(int rank, Give give, size_t room) const {
  const Entry& entry = members_.window(rank).entries(step_)[give == Give::kEach ? members_.rank() : 0];
  if (entry.bytes != room) {
    C10_THROW_ERROR(
        DistBackendError,
        c10::str(
            "shared memory: in ", title(members_.own().front().descriptors[step_ & 1]), " ", members_.name(rank),
            " gives ", entry.bytes, " bytes to ", members_.name(members_.rank()), ", which expects ", room));
  }
}

std::vector<Bytes> Collectives::split(const Call& call, Bytes data) const {
  const size_t element = c10::elementSize(call.dtype);
  const size_t unit = std::max(kLine, element);
  const size_t lines = (data.count + unit - 1) / unit;
  std::vector<Bytes> parts;
  for (int rank = 0; rank < members_.size(); ++rank) {
    const size_t begin = std::min(lines * rank / members_.size() * unit, data.count);
    const size_t end = std::min(lines * (rank + 1) / members_.size() * unit, data.count);
    parts.push_back({data.data + begin, end - begin});
  }
  return parts;
}

void Collectives::barrier(Call call) {
  ++sequence_;
  arrive(call, describe(call));
}

void Collectives::broadcast(Call call, Bytes data) {
  ++sequence_;
  const bool root = members_.rank() == call.root;
  const std::vector<Bytes> pieces = root ? std::vector<Bytes>{data} : std::vector<Bytes>{};
  exchange(call, pieces, Give::kAll, [&](size_t begin, const std::vector<View>& views) {
    copy(data.data + begin, views[call.root].data, views[call.root].count);
  });
}

void Collectives::all_reduce(Call call, Bytes data) {
  ++sequence_;
  if (data.count <= kDirectBytes) {
    // Peers read the stage, never the tensor, which is overwritten meanwhile.
    return all_reduce_in_turns(call, data);
  }
  if (!all_reduce_in_place(call, data)) {
    all_reduce_in_turns(call, data);
  }
}

// Through the stages. Two ranks each add up everything; more ranks each add up a part, and collect the other parts.
void Collectives::all_reduce_in_turns(const Call& call, Bytes data) {
  if (members_.size() == 2 || data.count <= kDirectBytes) {
    return add_up(call, {data}, Give::kCopy, data);
  }
  const std::vector<Bytes> parts = split(call, data);
  const Bytes mine = parts[members_.rank()];
  add_up(call, parts, Give::kEach, mine);
  exchange(call, {mine}, Give::kAll, [&](size_t begin, const std::vector<View>& views) {
    for (int rank = 0; rank < members_.size(); ++rank) {
      copy(parts[rank].data + begin, views[rank].data, views[rank].count);
    }
  });
}

// Where all tensors lie in arenas, each rank adds up its part of them and writes the sum into all of them: every byte
// is read once and written once, by one rank.
bool Collectives::all_reduce_in_place(const Call& call, Bytes data) {
  const auto offset = members_.arena().offset(data.data, data.count);
  Descriptor descriptor = describe(call);
  descriptor.shared = offset.has_value();
  members_.own().entries(step_ + 1)[0] = {offset.value_or(0), data.count};
  arrive(call, descriptor);
  std::vector<char*> tensors;
  for (int rank = 0; rank < members_.size(); ++rank) {
    if (!members_.window(rank).front().descriptors[step_ & 1].shared) {
      return false;
    }
    const uint64_t where = members_.window(rank).entries(step_)[0].offset;
    tensors.push_back(rank == members_.rank() ? data.data : members_.arena_of(rank) + where);
  }
  const Bytes mine = split(call, data)[members_.rank()];
  const size_t first = mine.data - data.data;
  constexpr size_t block = 16 << 10;  // still in the nearest cache when it is copied
  std::vector<const char*> sources(tensors.size());
  for (size_t begin = first; begin < first + mine.count; begin += block) {
    const size_t count = std::min(block, first + mine.count - begin);
    for (size_t rank = 0; rank < tensors.size(); ++rank) {
      sources[rank] = tensors[rank] + begin;
    }
    paceline::reduce(call.reduction, call.dtype, data.data + begin, sources, count);
    for (char* tensor : tensors) {
      copy(tensor + begin, data.data + begin, count);
    }
  }
  arrive(call, descriptor);
  return true;
}

void Collectives::reduce(Call call, Bytes data) {
  ++sequence_;
  const bool root = members_.rank() == call.root;
  std::vector<const char*> sources(members_.size());
  exchange(call, {data}, Give::kAll, [&](size_t begin, const std::vector<View>& views) {
    if (root) {
      for (size_t rank = 0; rank < views.size(); ++rank) {
        sources[rank] = views[rank].data;
      }
      paceline::reduce(call.reduction, call.dtype, data.data + begin, sources, views[call.root].count);
    }
  });
}

void Collectives::all_gather(Call call, Bytes in, const std::vector<Bytes>& out) {
  ++sequence_;
  exchange(call, {in}, Give::kAll, [&](size_t begin, const std::vector<View>& views) {
    for (int turn = 0; turn < members_.size(); ++turn) {
      const int rank = (members_.rank() + turn) % members_.size();
      check_fits(rank, Give::kAll, out[rank].count);
      copy(out[rank].data + begin, views[rank].data, views[rank].count);
    }
  });
}

void Collectives::gather(Call call, Bytes in, const std::vector<Bytes>& out) {
  ++sequence_;
  exchange(call, {in}, Give::kAll, [&](size_t begin, const std::vector<View>& views) {
    for (int rank = 0; rank < static_cast<int>(out.size()); ++rank) {
      check_fits(rank, Give::kAll, out[rank].count);
      copy(out[rank].data + begin, views[rank].data, views[rank].count);
    }
  });
}

void Collectives::scatter(Call call, const std::vector<Bytes>& in, Bytes out) {
  ++sequence_;
  exchange(call, in, Give::kEach, [&](size_t begin, const std::vector<View>& views) {
    copy(out.data + begin, views[call.root].data, views[call.root].count);
  });
}

void Collectives::reduce_scatter(Call call, const std::vector<Bytes>& in, Bytes out) {
  ++sequence_;
  add_up(call, in, Give::kEach, out);
}

void Collectives::all_to_all(Call call, const std::vector<Bytes>& in, const std::vector<Bytes>& out) {
  ++sequence_;
  exchange(call, in, Give::kEach, [&](size_t begin, const std::vector<View>& views) {
    for (int turn = 0; turn < members_.size(); ++turn) {
      const int rank = (members_.rank() + turn) % members_.size();
      check_fits(rank, Give::kEach, out[rank].count);
      copy(out[rank].data + begin, views[rank].data, views[rank].count);
    }
  });
}

}  // namespace paceline
