// Exchanges that are started early and finished late, by the thread that computes: for placed programs.
//
// To start one is to say where its input lies in the arena; no other thread does anything. Whoever then waits for it
// finds the others' inputs in place, and takes what it needs. So ranks that reach the wait at the same time never
// wait at all, and no thread competes with computation. All ranks start and wait for the same exchanges in the same
// order, which placed programs guarantee.
#pragma once

#include <list>
#include <memory>
#include <optional>
#include <string>

#include "collectives.hpp"
#include "members.hpp"

namespace paceline {

// Memory in the arena that is kept as long as anybody may read it.
struct Held {
  std::shared_ptr<void> memory;
  size_t bytes = 0;

  char* data() const {
    return static_cast<char*>(memory.get());
  }
};

class Exchange {
 public:
  Exchange(Members& members, Patience patience) : members_(members), patience_(patience) {}

  // Start one; return its number. `input` lies in the arena. `rows`: of a reduce-scatter, bytes of a row of each of the
  // tensors that follow each other in the input.
  uint32_t start(
      Kind kind, c10::ScalarType dtype, Held input, std::vector<size_t> rows, std::chrono::milliseconds timeout);

  // Finish it, and fill `out`: of an all-reduce as much as the input (and may be it), of an all-gather as many times
  // that as there are ranks, of a reduce-scatter a part of it, of an all-to-all as much. Sums.
  void finish(uint32_t number, Bytes out);

  // Wait until all ranks are here.
  void fence(std::chrono::milliseconds timeout);

 private:
  struct Started {
    uint32_t number;
    Kind kind;
    c10::ScalarType dtype;
    Held input;
    std::vector<size_t> rows;
    std::chrono::milliseconds timeout;
    std::optional<uint32_t> place;  // among those that were finished, in the order that all ranks share
  };

  void all_reduce(const Started& started, Bytes out);
  void all_reduce_in_place(const Started& started);
  void all_gather(const Started& started, Bytes out);
  void reduce_scatter(const Started& started, Bytes out);
  void all_to_all(const Started& started, Bytes out);

  // Another rank's input of an exchange.
  char* input_of(int rank, const Started& started);
  void await(Signal Front::* signal, uint32_t count, const std::string& what, std::chrono::milliseconds timeout);
  void check_agreement(const Started& started) const;
  void release();
  static std::string title(const Started& started);

  Members& members_;
  Patience patience_;
  uint32_t started_ = 0;
  uint32_t finished_ = 0;
  std::list<Started> held_;  // started, and perhaps still read by others
};

}  // namespace paceline
