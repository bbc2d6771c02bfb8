// The memory that ranks of one host share: a window of each rank for each group, and an arena of each process.
//
// Both are memfds: files without a name, which the kernel frees with the last process that maps them.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "waiting.hpp"

namespace paceline {

constexpr size_t kStageBytes = 512 << 10;  // one of the two buffers through which ordinary tensors pass
constexpr size_t kRingBytes = 256 << 10;   // of each channel for messages
constexpr uint64_t kEnvelopes = 16;
constexpr size_t kTextBytes = 1000;

// What a rank says of a step of a collective. All ranks must say the same, but for where their data lies.
struct Descriptor {
  uint64_t sequence;
  uint64_t bytes;
  int32_t kind;
  int32_t dtype;
  int32_t reduction;
  int32_t root;
  uint64_t longest;  // bytes of the longest piece that this rank gives through its stage
  uint32_t shared;   // its pieces are read where they lie, in its arena
  uint32_t gives;
};

// A piece of what a rank gives: where in its arena, if it is shared, and how long.
struct Entry {
  uint64_t offset;
  uint64_t bytes;
};

struct Envelope {
  int64_t tag;
  uint64_t bytes;
  uint64_t offset;  // in the sender's arena, if shared
  uint32_t shared;
};

// Messages from one rank to another: the sender fills, the receiver empties.
struct Channel {
  alignas(64) std::atomic<uint64_t> posted;
  std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> taken;
  std::atomic<uint64_t> read;
  Envelope envelopes[kEnvelopes];
};

// What a rank says of an exchange that it has started (exchange.hpp): all ranks must say the same, but for the offset.
struct Notice {
  uint64_t offset;  // in its arena
  uint64_t bytes;
  int32_t kind;
  int32_t dtype;
};
constexpr uint32_t kNotices = 64;  // exchanges that a rank may be ahead of another

enum class Presence : uint32_t { kHere = 0, kLeft = 1, kFailed = 2 };

// The fixed part of a window.
struct Front {
  uint64_t token;
  alignas(64) Signal step;      // collectives: raised by the owner
  alignas(64) Signal doorbell;  // messages: rung by peers
  alignas(64) std::atomic<uint32_t> presence;
  char failure[kTextBytes];
  alignas(64) Descriptor descriptors[2];
  alignas(64) Signal started;   // exchanges: counted by the owner
  alignas(64) Signal finished;  // of those, that it needs nothing any more of
  alignas(64) Notice notices[kNotices];
};

// A mapped memfd.
class Mapping {
 public:
  Mapping(int fd, size_t bytes, bool reserve);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  char* data() const {
    return data_;
  }
  size_t bytes() const {
    return bytes_;
  }
  bool contains(const void* pointer, size_t bytes) const {
    const char* first = static_cast<const char*>(pointer);
    return first >= data_ && first + bytes <= data_ + bytes_;
  }

 private:
  char* data_;
  size_t bytes_;
};

// One rank's window in a group of `size`: front, entries, two stages, channels to every rank.
class Window {
 public:
  static size_t bytes(int size);

  Window(int fd, int size) : mapping_(fd, bytes(size), true), size_(size) {}

  Front& front() const {
    return *reinterpret_cast<Front*>(mapping_.data());
  }
  Entry* entries(uint32_t step) const;
  char* stage(uint32_t step) const;
  Channel& channel(int to) const;
  char* ring(int to) const;

 private:
  Mapping mapping_;
  int size_;
};

// Memory of this process that peers can read: tensors in it are exchanged where they lie.
//
// Freed blocks are kept for the next of their size or smaller, as other caching allocators do.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  // `fd`: an empty memfd, kept; `bytes` are reserved as addresses only, and become memory as they are used.
  Arena(int fd, size_t bytes);

  // Memory for `bytes`, which lasts as long as what is returned.
  std::shared_ptr<void> allocate(size_t bytes);
  // Memory that several processes use, this one among them: free again when `users` have let go of it.
  std::shared_ptr<void> allocate_for_all(size_t bytes, uint32_t users);
  bool is_for_all(const void* data) const;
  std::optional<uint64_t> offset(const void* data, size_t bytes) const;
  size_t bytes_in_use();

 private:
  size_t take(size_t bytes);
  void sweep();
  void reach(size_t end);
  void give_back(size_t offset);

  Mapping mapping_;
  int fd_;
  pid_t owner_;
  mutable std::mutex mutex_;
  size_t reached_ = 0;  // memory exists up to here
  std::map<size_t, size_t> free_;                // by offset: bytes
  std::unordered_map<size_t, size_t> in_use_;    // by offset: bytes
  std::vector<size_t> used_by_all_;              // offsets of blocks that begin with a `Tally`
};

// Stands before memory that several processes use.
struct alignas(64) Tally {
  std::atomic<uint32_t> users;
};

// Let go of memory behind a tally.
inline void let_go(void* data) {
  (static_cast<Tally*>(data) - 1)->users.fetch_sub(1);
}

}  // namespace paceline
