// Well mixed bits of a key, and its shard, as `exchange/layout.py` has them.
#pragma once

#include <cstdint>

namespace paceline {

inline uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

inline uint64_t shard_of(int64_t key, uint64_t shards) {
  return (mixed(static_cast<uint64_t>(key)) >> 32) * shards >> 32;
}

}  // namespace paceline
