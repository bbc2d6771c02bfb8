// Collectives in two levels, among the ranks of a host and between hosts, on tensors as parts take them.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "operand.hpp"

namespace paceline::hosts {

// Where a rank sits: the number of its host, and its number among the ranks there.
struct Seat {
  int64_t host = -1;
  int64_t index = -1;
};

// Which ranks share a host. The first rank of a host leads it.
struct Seating {
  Seating(int rank, int size, std::vector<std::vector<int64_t>> ranks_of_hosts);

  int64_t count(int64_t host) const {
    return static_cast<int64_t>(hosts[host].size());
  }
  int64_t host_count() const {
    return static_cast<int64_t>(hosts.size());
  }

  int rank;
  int size;
  std::vector<std::vector<int64_t>> hosts;
  std::vector<Seat> seats;  // of every rank
  bool even;                // all hosts have as many ranks
  bool sorted;              // ranks are numbered host by host
  int64_t widest;           // ranks of the fullest host
};

using Part = c10::intrusive_ptr<c10d::Backend>;

// The groups that a rank takes part in.
struct Parts {
  Part local;    // ranks of this host; null if it is alone
  Part between;  // where hosts are even: the ranks of one index; else leaders only, null for others
  Part flat;     // all ranks
};

enum class Level { kLocal, kBetween, kFlat };

// A part's error, and which part's.
struct PartError : std::runtime_error {
  PartError(Level where, const std::string& what) : std::runtime_error(what), level(where) {}
  Level level;
};

// One collective's use of the parts. Numbers that are equal on all ranks afterwards have the same bits: each is
// computed in one place, or by Gloo's all-reduce, which does the same.
class Levels {
 public:
  Levels(const Seating& seating, Parts parts, std::chrono::milliseconds timeout)
      : seating_(seating),
        seat_(seating.seats[seating.rank]),
        parts_(std::move(parts)),
        end_(std::chrono::steady_clock::now() + timeout) {}

  void all_reduce(const at::Tensor& numbers, Operator op);
  // `numbers` is overwritten on the root only.
  void reduce(const at::Tensor& numbers, Operator op, int64_t root);
  void broadcast(const at::Tensor& bytes, int64_t root);
  // bytes: [n]; returns [ranks, n] in the order of ranks, in `into` if that is given
  at::Tensor all_gather(const at::Tensor& bytes, at::Tensor into = {});
  // numbers: [ranks, n]; returns this rank's [n]
  at::Tensor reduce_scatter(const at::Tensor& numbers, Operator op);
  void barrier();
  // A call of the group of all ranks.
  void flat(const std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend&, std::chrono::milliseconds)>& call);

 private:
  bool leads() const {
    return seat_.index == 0;
  }
  bool alone() const {
    return seating_.count(seat_.host) == 1;
  }
  // What is left of the timeout. The wider the view of a wait, the later it gives up, so that the error of the rank
  // that knows most comes first.
  std::chrono::milliseconds left(std::chrono::milliseconds grace) const;

  template <typename Options, typename Call>
  void part(Level level, std::chrono::milliseconds grace, Options options, Call call);
  void local_reduce(const at::Tensor& numbers, Operator op, int64_t root);
  void local_broadcast(const at::Tensor& bytes, int64_t root);
  void local_send(const at::Tensor& bytes, int64_t from, int64_t to);
  void all_reduce_between(const at::Tensor& numbers, Operator op);
  at::Tensor all_gather_even(const at::Tensor& bytes, at::Tensor into);
  at::Tensor all_gather_uneven(const at::Tensor& bytes, at::Tensor into);
  at::Tensor reduce_scatter_even(const at::Tensor& numbers, Operator op);
  at::Tensor reduce_scatter_uneven(const at::Tensor& numbers, Operator op);
  at::Tensor host_order() const;

  const Seating& seating_;
  Seat seat_;
  Parts parts_;
  std::chrono::steady_clock::time_point end_;
};

}  // namespace paceline::hosts
