// The ranks of a group that share this host: their windows and arenas, and whether they still live.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "memory.hpp"

namespace paceline {

// How another rank is reached. The file descriptors are this process's own, and become the object's.
struct Peer {
  int window;
  int arena;
  int process;  // a pidfd
  pid_t pid;
  int64_t global_rank;
};

// What an error says, without where in our code it was raised.
std::string reason_of(const std::exception& error);

using Deadline = Clock::time_point;

class Members {
 public:
  // `peers`: of every rank, this one's too. `arena`: of this process.
  Members(int rank, std::vector<Peer> peers, std::shared_ptr<Arena> arena);
  ~Members();
  Members(const Members&) = delete;
  Members& operator=(const Members&) = delete;

  int rank() const {
    return rank_;
  }
  int size() const {
    return static_cast<int>(peers_.size());
  }
  const Window& window(int rank) const {
    return *windows_[rank];
  }
  const Window& own() const {
    return *windows_[rank_];
  }
  Arena& arena() const {
    return *arena_;
  }
  // Where a rank's arena is mapped here.
  char* arena_of(int rank) const {
    return arenas_[rank]->data();
  }
  // The same memory, for as long as what is returned lasts.
  std::shared_ptr<Mapping> hold_arena_of(int rank) const {
    return arenas_[rank];
  }
  // "rank 3 (process 1234)"; the rank is the one in the whole job.
  std::string name(int rank) const;

  bool is_alive(int rank) const;
  Presence presence(int rank) const;

  // Throw if a rank that has something left to do for us cannot: it is dead, has left or has failed.
  // `owes(rank)`: whether something is left. `what`: what we are waiting for.
  template <typename Owes>
  void check(Owes owes, const std::string& what) const {
    for (int rank = 0; rank < size(); ++rank) {
      if (rank != rank_ && owes(rank)) {
        // The last word counts: a rank may do its part, and leave, between two looks of ours.
        const bool gone = !is_alive(rank) || presence(rank) != Presence::kHere;
        if (gone && owes(rank)) {
          throw_gone(rank, what);
        }
      }
    }
  }

  // Throw if the group is broken or shut down.
  void check_usable() const;

  // End the group for everyone on this host, with the reason; the first one stands.
  void fail(const std::string& reason);

  // Leave in order. Whoever waits in this process gives up.
  void leave();

  [[noreturn]] void throw_late(int rank, const std::string& what, std::chrono::milliseconds timeout) const;

 private:
  [[noreturn]] void throw_gone(int rank, const std::string& what) const;
  void announce(Presence presence);

  int rank_;
  std::vector<Peer> peers_;
  std::shared_ptr<Arena> arena_;
  std::vector<std::unique_ptr<Window>> windows_;
  std::vector<std::shared_ptr<Mapping>> arenas_;
  mutable std::mutex mutex_;
  std::string failure_;
  std::atomic<bool> usable_{true};
};

}  // namespace paceline
