// Collectives of the ranks of one host. All rest on one exchange: everybody lays out what it gives, everybody waits
// for everybody, everybody takes what it needs out of the others' memory, copying or adding up.
//
// One thread at a time; all ranks make the same calls in the same order.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "members.hpp"
#include "reduce.hpp"

namespace paceline {

enum class Kind : int32_t {
  kBarrier,
  kBroadcast,
  kAllReduce,
  kReduce,
  kAllGather,
  kGather,
  kScatter,
  kReduceScatter,
  kAllToAll,
};

struct Bytes {
  char* data;
  size_t count;
};

// What all ranks must agree on, and how long to wait for them.
struct Call {
  Kind kind;
  c10::ScalarType dtype = c10::kByte;
  Reduction reduction = Reduction::UNUSED;
  int root = -1;
  uint64_t bytes = 0;  // of a piece, where all pieces have the same size
  std::chrono::milliseconds timeout{0};
  Patience patience;
};

class Collectives {
 public:
  explicit Collectives(Members& members) : members_(members) {}

  // Ranks are counted within the group. Each fills what `out` names; where it says so, `in` and `out` may be the same.
  void barrier(Call call);
  void broadcast(Call call, Bytes data);
  void all_reduce(Call call, Bytes data);
  void reduce(Call call, Bytes data);  // other ranks' data stays as it is
  void all_gather(Call call, Bytes in, const std::vector<Bytes>& out);
  void gather(Call call, Bytes in, const std::vector<Bytes>& out);     // `out`: on the root
  void scatter(Call call, const std::vector<Bytes>& in, Bytes out);    // `in`: on the root
  void reduce_scatter(Call call, const std::vector<Bytes>& in, Bytes out);
  void all_to_all(Call call, const std::vector<Bytes>& in, const std::vector<Bytes>& out);

  uint64_t sequence() const {
    return sequence_;
  }

 private:
  // Bytes of one piece that are there to be taken: [data, data + count).
  struct View {
    const char* data;
    size_t count;
  };
  // Called for each stretch, [begin, begin + count) of every piece; views: of each rank's piece for this rank.
  using Take = std::function<void(size_t begin, const std::vector<View>& views)>;

  // How pieces are given: the one for everybody, or one for each rank; `kCopy`: for everybody, and overwritten while
  // others read it, so that it has to pass through the stage even if it lies in the arena.
  enum class Give { kAll, kCopy, kEach };

  void exchange(const Call& call, const std::vector<Bytes>& pieces, Give give, const Take& take);
  void add_up(const Call& call, const std::vector<Bytes>& pieces, Give give, Bytes out);
  // Throw unless the piece that a rank gives this one has as many bytes as there is room for.
  void check_fits(int rank, Give give, size_t room) const;
  void all_reduce_in_turns(const Call& call, Bytes data);
  bool all_reduce_in_place(const Call& call, Bytes data);
  std::vector<Bytes> split(const Call& call, Bytes data) const;

  Descriptor describe(const Call& call) const;
  void arrive(const Call& call, const Descriptor& descriptor);
  void check_agreement(const Call& call) const;
  std::string title(const Descriptor& descriptor) const;

  Members& members_;
  uint64_t sequence_ = 0;
  uint32_t step_ = 0;
};

const char* name_of(Kind kind);

}  // namespace paceline
