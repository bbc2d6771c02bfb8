// Keys by shard, and keys that come several times made one: see `portable/route.py`.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "keys.hpp"

namespace paceline {

inline void route(const int64_t* keys, size_t count, size_t shards, int64_t* order, int64_t* offsets) {
  std::vector<uint32_t> of(count);
  std::vector<int64_t> next(shards + 1, 0);
  for (size_t i = 0; i < count; ++i) {
    of[i] = static_cast<uint32_t>(shard_of(keys[i], shards));
    ++next[of[i] + 1];
  }
  for (size_t shard = 0; shard < shards; ++shard) {
    next[shard + 1] += next[shard];
  }
  std::copy(next.begin(), next.end(), offsets);
  for (size_t i = 0; i < count; ++i) {
    order[next[of[i]]++] = static_cast<int64_t>(i);
  }
}

// Returns the place of the first key that is of another shard; -1: all are of this one.
inline int64_t stray(const int64_t* keys, size_t count, uint64_t shard, uint64_t shards) {
  for (size_t i = 0; i < count; ++i) {
    if (shard_of(keys[i], shards) != shard) {
      return static_cast<int64_t>(i);
    }
  }
  return -1;
}

// Returns keys once, in the order in which they came, and writes the place of each.
inline std::vector<int64_t> unique(const int64_t* keys, size_t count, int64_t* places) {
  constexpr size_t kAhead = 16;
  const size_t size = std::bit_ceil(std::max<size_t>(16, 2 * count));
  std::vector<int64_t> slots(size, -1);
  std::vector<int64_t> found;
  found.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      __builtin_prefetch(&slots[mixed(static_cast<uint64_t>(keys[i + kAhead])) & (size - 1)], 1);
    }
    size_t at = mixed(static_cast<uint64_t>(keys[i])) & (size - 1);
    while (slots[at] >= 0 && found[slots[at]] != keys[i]) {
      at = (at + 1) & (size - 1);
    }
    if (slots[at] < 0) {
      slots[at] = static_cast<int64_t>(found.size());
      found.push_back(keys[i]);
    }
    places[i] = slots[at];
  }
  return found;
}

// Adds up the rows of each place, in order; places rise as they first come.
template <typename T>
void sum_rows(const T* rows, const int64_t* places, size_t count, size_t width, T* sums) {
  int64_t seen = 0;
  for (size_t i = 0; i < count; ++i) {
    const T* row = rows + i * width;
    T* sum = sums + places[i] * width;
    if (places[i] == seen) {
      std::copy_n(row, width, sum);
      ++seen;
      continue;
    }
    for (size_t j = 0; j < width; ++j) {
      sum[j] += row[j];
    }
  }
}

}  // namespace paceline
