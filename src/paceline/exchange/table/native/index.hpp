// Where the row of a key is: open addressing with linear probing. Rows are numbered as they are added, and never go.
#pragma once

#include <cstddef>
#include <cstdint>

#include "keys.hpp"
#include "memory.hpp"

namespace paceline {

class Index {
 public:
  static constexpr int64_t kNone = -1;

  Index() { resize(kSmallest); }

  size_t size() const { return count_; }
  size_t bytes() const { return (mask_ + 1) * sizeof(Slot); }

  void prefetch(uint64_t hash) const { __builtin_prefetch(&slots()[hash & mask_]); }

  int64_t find(int64_t key, uint64_t hash) const {
    const Slot& slot = slots()[place(key, hash)];
    return slot.number - 1;
  }

  // Returns the row of a key; one that has none gets the next. There is room: see `reserve`.
  int64_t find_or_add(int64_t key, uint64_t hash, bool& added) {
    Slot& slot = slots()[place(key, hash)];
    added = slot.number == 0;
    if (added) {
      slot = {key, static_cast<int64_t>(++count_)};
    }
    return slot.number - 1;
  }

  // Makes room for so many more.
  void reserve(size_t more) {
    size_t size = mask_ + 1;
    while ((count_ + more) * 8 > size * 5) {
      size *= 2;
    }
    if (size != mask_ + 1) {
      resize(size);
    }
  }

 private:
  struct Slot {
    int64_t key;
    int64_t number;  // of the row, from 1; 0: free
  };
  static constexpr size_t kSmallest = 64;
  static constexpr size_t kAhead = 16;

  Slot* slots() const { return memory_.as<Slot>(); }

  size_t place(int64_t key, uint64_t hash) const {
    size_t at = hash & mask_;
    while (slots()[at].number != 0 && slots()[at].key != key) {
      at = (at + 1) & mask_;
    }
    return at;
  }

  void resize(size_t size) {
    const Memory before = std::move(memory_);
    const size_t old_size = mask_ + 1;
    memory_ = Memory(size * sizeof(Slot));
    mask_ = size - 1;
    const Slot* old = before.as<Slot>();
    for (size_t i = 0; old != nullptr && i < old_size; ++i) {
      if (i + kAhead < old_size) {
        prefetch(mixed(static_cast<uint64_t>(old[i + kAhead].key)));
      }
      if (old[i].number != 0) {
        slots()[place(old[i].key, mixed(static_cast<uint64_t>(old[i].key)))] = old[i];
      }
    }
  }

  Memory memory_;
  size_t mask_ = 0;
  size_t count_ = 0;
};

}  // namespace paceline
