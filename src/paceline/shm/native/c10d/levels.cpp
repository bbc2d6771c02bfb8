#include "levels.hpp"

#include <algorithm>

namespace paceline::hosts {

namespace {

using namespace std::chrono_literals;

// Below this an all-reduce goes through leaders: one exchange between hosts instead of one per rank.
constexpr size_t kRails = 64 * 1024;

constexpr auto kBetweenGrace = 500ms;
constexpr auto kAfterGrace = 1500ms;

}  // namespace

Seating::Seating(int rank, int size, std::vector<std::vector<int64_t>> ranks_of_hosts)
    : rank(rank), size(size), hosts(std::move(ranks_of_hosts)), seats(size), even(true), sorted(true), widest(0) {
  int64_t total = 0;
  for (int64_t host = 0; host < host_count(); ++host) {
    TORCH_CHECK(count(host) > 0, "host ", host, " of the group has no rank");
    for (int64_t index = 0; index < count(host); ++index) {
      const int64_t member = hosts[host][index];
      TORCH_CHECK(
          member >= 0 && member < size && seats[member].host < 0,
          "the hosts ",
          hosts,
          " do not hold each of the ranks 0 to ",
          size - 1,
          " once");
      seats[member] = {host, index};
      sorted = sorted && member == total;
      ++total;
    }
    even = even && count(host) == count(0);
    widest = std::max(widest, count(host));
  }
  TORCH_CHECK(total == size, "the hosts ", hosts, " hold ", total, " of ", size, " ranks");
  TORCH_CHECK(rank >= 0 && rank < size, "rank ", rank, " is not one of ", size);
}

std::chrono::milliseconds Levels::left(std::chrono::milliseconds grace) const {
  const auto rest = std::chrono::duration_cast<std::chrono::milliseconds>(end_ - std::chrono::steady_clock::now());
  return std::max<std::chrono::milliseconds>(rest + grace, 1ms);
}

// Call a part on this thread and wait for it.
template <typename Options, typename Call>
void Levels::part(Level level, std::chrono::milliseconds grace, Options options, Call call) {
  options.timeout = left(grace);
  options.asyncOp = false;
  try {
    auto& backend = level == Level::kLocal ? parts_.local : level == Level::kBetween ? parts_.between : parts_.flat;
    const auto work = call(*backend, options);
    if (work) {
      work->wait();
    }
  } catch (const std::exception& error) {
    throw PartError(level, reason_of(error));
  }
}

void Levels::local_reduce(const at::Tensor& numbers, Operator op, int64_t root) {
  if (alone()) {
    return;
  }
  c10d::ReduceOptions options;
  options.reduceOp = op;
  options.rootRank = root;
  std::vector<at::Tensor> tensors{numbers};
  part(Level::kLocal, 0ms, options, [&](auto& local, auto& given) { return local.reduce(tensors, given); });
}

void Levels::local_broadcast(const at::Tensor& bytes, int64_t root) {
  if (alone()) {
    return;
  }
  c10d::BroadcastOptions options;
  options.rootRank = root;
  std::vector<at::Tensor> tensors{bytes};
  part(Level::kLocal, kAfterGrace, options, [&](auto& local, auto& given) { return local.broadcast(tensors, given); });
}

void Levels::local_send(const at::Tensor& bytes, int64_t from, int64_t to) {
  std::vector<at::Tensor> tensors{bytes};
  const auto transfer = [&](auto& local, auto&) -> c10::intrusive_ptr<c10d::Work> {
    if (seat_.index == from) {
      return local.send(tensors, static_cast<int>(to), 0);
    }
    return seat_.index == to ? local.recv(tensors, static_cast<int>(from), 0) : nullptr;
  };
  part(Level::kLocal, kAfterGrace, c10d::BarrierOptions(), transfer);
}

void Levels::all_reduce_between(const at::Tensor& numbers, Operator op) {
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  std::vector<at::Tensor> tensors{numbers};
  part(Level::kBetween, kBetweenGrace, options, [&](auto& hosts, auto& given) {
    return hosts.allreduce(tensors, given);
  });
}

void Levels::all_reduce(const at::Tensor& numbers, Operator op) {
  if (numbers.numel() == 0) {
    return;
  }
  if (!seating_.even || seating_.widest == 1 || numbers.nbytes() < kRails) {
    local_reduce(numbers, op, 0);
    if (leads()) {
      all_reduce_between(numbers, op);
    }
    local_broadcast(as_bytes(numbers), 0);
    return;
  }
  // Every rank of the host reduces a piece between hosts; what does not divide is small and goes through leaders.
  const int64_t piece = numbers.numel() / seating_.widest;
  auto whole = numbers.narrow(0, 0, piece * seating_.widest);
  auto mine = at::empty({piece}, numbers.options());
  c10d::ReduceScatterOptions scatter;
  scatter.reduceOp = op;
  part(Level::kLocal, 0ms, scatter, [&](auto& local, auto& given) {
    return local._reduce_scatter_base(mine, whole, given);
  });
  all_reduce_between(mine, op);
  part(Level::kLocal, kAfterGrace, c10d::AllgatherOptions(), [&](auto& local, auto& given) {
    return local._allgather_base(whole, mine, given);
  });
  all_reduce(numbers.narrow(0, whole.numel(), numbers.numel() - whole.numel()), op);
}

void Levels::reduce(const at::Tensor& numbers, Operator op, int64_t root) {
  if (numbers.numel() == 0) {
    return;
  }
  const Seat to = seating_.seats[root];
  const int64_t acting = seating_.even ? to.index : 0;  // who speaks for a host
  auto sums = seat_.index == acting && seating_.rank != root ? numbers.clone() : numbers;
  local_reduce(sums, op, acting);
  if (seat_.index == acting) {
    c10d::ReduceOptions options;
    options.reduceOp = op;
    options.rootRank = to.host;
    std::vector<at::Tensor> tensors{sums};
    part(Level::kBetween, kBetweenGrace, options, [&](auto& hosts, auto& given) {
      return hosts.reduce(tensors, given);
    });
  }
  if (seat_.host == to.host && acting != to.index) {
    local_send(as_bytes(sums), acting, to.index);
  }
}

void Levels::broadcast(const at::Tensor& bytes, int64_t root) {
  if (bytes.numel() == 0) {
    return;
  }
  const Seat from = seating_.seats[root];
  const int64_t acting = seating_.even ? from.index : 0;
  const bool at_home = seat_.host == from.host;
  if (at_home && acting != from.index) {
    local_broadcast(bytes, from.index);  // the leader gets it with the others
  }
  if (seat_.index == acting) {
    c10d::BroadcastOptions options;
    options.rootRank = from.host;
    std::vector<at::Tensor> tensors{bytes};
    part(Level::kBetween, kBetweenGrace, options, [&](auto& hosts, auto& given) {
      return hosts.broadcast(tensors, given);
    });
  }
  if (!at_home || acting == from.index) {
    local_broadcast(bytes, acting);
  }
}

// The ranks, host by host.
at::Tensor Levels::host_order() const {
  std::vector<int64_t> ranks;
  for (const auto& members : seating_.hosts) {
    ranks.insert(ranks.end(), members.begin(), members.end());
  }
  return at::tensor(ranks, at::kLong);
}

at::Tensor Levels::all_gather(const at::Tensor& bytes, at::Tensor into) {
  if (!into.defined()) {
    into = at::empty({seating_.size, bytes.numel()}, bytes.options());
  }
  if (bytes.numel() == 0) {
    return into;
  }
  return seating_.even ? all_gather_even(bytes, into) : all_gather_uneven(bytes, into);
}

at::Tensor Levels::all_gather_even(const at::Tensor& bytes, at::Tensor into) {
  const int64_t n = bytes.numel();
  const int64_t seats = seating_.widest;
  auto input = bytes;
  auto gathered = seating_.sorted ? into : at::empty_like(into);
  const auto rails = alone() ? gathered : at::empty({seating_.host_count(), n}, bytes.options());  // my index of each
  auto all = flattened(rails);
  part(Level::kBetween, kBetweenGrace, c10d::AllgatherOptions(), [&](auto& hosts, auto& given) {
    return hosts._allgather_base(all, input, given);
  });
  for (int64_t host = 0; host < seating_.host_count() && !alone(); ++host) {
    auto block = flattened(gathered.narrow(0, host * seats, seats));
    auto mine = rails[host];
    part(Level::kLocal, kAfterGrace, c10d::AllgatherOptions(), [&](auto& local, auto& given) {
      return local._allgather_base(block, mine, given);
    });
  }
  if (!seating_.sorted) {
    into.index_copy_(0, host_order(), gathered);
  }
  return into;
}

at::Tensor Levels::all_gather_uneven(const at::Tensor& bytes, at::Tensor into) {
  const int64_t n = bytes.numel();
  std::vector<at::Tensor> inputs{bytes};
  at::Tensor block;  // what this host has, as long as the longest: Gloo gathers equal parts
  std::vector<std::vector<at::Tensor>> rows;
  if (leads()) {
    block = at::empty({seating_.widest, n}, bytes.options());
    rows = {block.narrow(0, 0, seating_.count(seat_.host)).unbind()};
  }
  if (alone()) {
    block[0].copy_(bytes);
  } else {
    part(Level::kLocal, 0ms, c10d::GatherOptions(), [&](auto& local, auto& given) {
      return local.gather(rows, inputs, given);
    });
  }
  if (leads()) {
    const auto blocks = at::empty({seating_.host_count(), seating_.widest, n}, bytes.options());
    auto all = flattened(blocks);
    auto mine = flattened(block);
    part(Level::kBetween, kBetweenGrace, c10d::AllgatherOptions(), [&](auto& hosts, auto& given) {
      return hosts._allgather_base(all, mine, given);
    });
    for (int64_t rank = 0; rank < seating_.size; ++rank) {
      into[rank].copy_(blocks[seating_.seats[rank].host][seating_.seats[rank].index]);
    }
  }
  local_broadcast(flattened(into), 0);
  return into;
}

at::Tensor Levels::reduce_scatter(const at::Tensor& numbers, Operator op) {
  if (numbers.numel() == 0) {
    return at::empty({0}, numbers.options());
  }
  return seating_.even ? reduce_scatter_even(numbers, op) : reduce_scatter_uneven(numbers, op);
}

at::Tensor Levels::reduce_scatter_even(const at::Tensor& numbers, Operator op) {
  const int64_t n = numbers.size(1);
  const int64_t seats = seating_.widest;
  const auto arranged = seating_.sorted ? numbers : numbers.index_select(0, host_order());
  c10d::ReduceScatterOptions options;
  options.reduceOp = op;
  const auto rails = alone() ? arranged : at::empty({seating_.host_count(), n}, numbers.options());
  for (int64_t host = 0; host < seating_.host_count() && !alone(); ++host) {
    auto block = flattened(arranged.narrow(0, host * seats, seats));
    auto mine = rails[host];
    part(Level::kLocal, 0ms, options, [&](auto& local, auto& given) {
      return local._reduce_scatter_base(mine, block, given);
    });
  }
  auto output = at::empty({n}, numbers.options());
  auto all = flattened(rails);
  part(Level::kBetween, kBetweenGrace, options, [&](auto& hosts, auto& given) {
    return hosts._reduce_scatter_base(output, all, given);
  });
  return output;
}

at::Tensor Levels::reduce_scatter_uneven(const at::Tensor& numbers, Operator op) {
  auto sums = leads() ? numbers.clone() : numbers;
  local_reduce(sums, op, 0);
  if (leads()) {
    all_reduce_between(sums, op);
  }
  if (alone()) {
    return sums[seating_.rank].clone();
  }
  std::vector<at::Tensor> outputs{at::empty({numbers.size(1)}, numbers.options())};
  std::vector<std::vector<at::Tensor>> rows;
  if (leads()) {
    rows.emplace_back();
    for (const int64_t rank : seating_.hosts[seat_.host]) {
      rows.front().push_back(sums[rank]);
    }
  }
  part(Level::kLocal, kAfterGrace, c10d::ScatterOptions(), [&](auto& local, auto& given) {
    return local.scatter(outputs, rows, given);
  });
  return outputs.front();
}

void Levels::barrier() {
  const auto local_barrier = [&](std::chrono::milliseconds grace) {
    if (!alone()) {
      part(Level::kLocal, grace, c10d::BarrierOptions(), [](auto& local, auto& given) { return local.barrier(given); });
    }
  };
  local_barrier(0ms);
  if (leads()) {
    part(Level::kBetween, kBetweenGrace, c10d::BarrierOptions(), [](auto& hosts, auto& given) {
      return hosts.barrier(given);
    });
  }
  local_barrier(kAfterGrace);
}

void Levels::flat(
    const std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend&, std::chrono::milliseconds)>& call) {
  part(Level::kFlat, 0ms, c10d::BarrierOptions(), [&](auto& all, auto& given) { return call(all, given.timeout); });
}

}  // namespace paceline::hosts
