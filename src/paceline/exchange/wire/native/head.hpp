// The bytes of a frame before its tensors: see `codec.py`, which says the same in Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

namespace paceline::wire {

struct Head {
  char magic[4];
  uint16_t kind, segment;
  uint32_t tensors, numbers, shapes_bytes, text_bytes;
  int64_t epoch, request, worker, sequence, clock;
  double weight;

  uint64_t rest_bytes() const { return 8 * uint64_t{numbers} + shapes_bytes + text_bytes; }
};
static_assert(sizeof(Head) == 72, "there is no padding");

constexpr char kMagic[4] = {'P', 'L', 'X', '1'};
constexpr uint64_t kMaxRestBytes = uint64_t{256} << 20;
constexpr uint64_t kMaxTensorBytes = uint64_t{64} << 30;
constexpr size_t kMaxRank = 64;

constexpr c10::ScalarType kTypes[] = {
    c10::kByte,
    c10::kChar,
    c10::kShort,
    c10::kInt,
    c10::kLong,
    c10::kBool,
    c10::kHalf,
    c10::kBFloat16,
    c10::kFloat,
    c10::kDouble};
constexpr size_t kTypeCount = sizeof(kTypes) / sizeof(kTypes[0]);

// Returns the number of a type in frames; -1: it cannot be sent.
inline int number_of(c10::ScalarType type) {
  for (size_t number = 0; number < kTypeCount; ++number) {
    if (kTypes[number] == type) {
      return static_cast<int>(number);
    }
  }
  return -1;
}

// What a frame says of a tensor.
struct Meta {
  c10::ScalarType type;
  c10::SmallVector<int64_t, 4> shape;
  uint64_t bytes;
};

inline bool is_head(const Head& head) {
  return std::memcmp(head.magic, kMagic, sizeof kMagic) == 0 && head.rest_bytes() <= kMaxRestBytes &&
      2 * uint64_t{head.tensors} <= head.shapes_bytes;
}

// Reads types and shapes; returns false where they cannot be. shapes: `head.shapes_bytes` bytes.
inline bool read_metas(const Head& head, const unsigned char* shapes, std::vector<Meta>& metas) {
  uint64_t at = 0;
  uint64_t total = 0;
  metas.clear();
  for (uint32_t i = 0; i < head.tensors; ++i) {
    if (at + 2 > head.shapes_bytes) {
      return false;
    }
    const size_t number = shapes[at];
    const size_t rank = shapes[at + 1];
    if (at + 2 + 8 * rank > head.shapes_bytes || number >= kTypeCount || rank > kMaxRank) {
      return false;
    }
    Meta meta{kTypes[number], c10::SmallVector<int64_t, 4>(rank), c10::elementSize(kTypes[number])};
    std::memcpy(meta.shape.data(), shapes + at + 2, 8 * rank);
    at += 2 + 8 * rank;
    uint64_t counted = meta.bytes;  // an extent of 0 counts as 1: the others must be possible too
    for (const int64_t extent : meta.shape) {
      const uint64_t factor = extent == 0 ? 1 : static_cast<uint64_t>(extent);
      if (counted > kMaxTensorBytes / factor) {
        return false;
      }
      counted *= factor;
      meta.bytes *= static_cast<uint64_t>(extent);
    }
    total += counted;
    if (total > kMaxTensorBytes) {
      return false;
    }
    metas.push_back(std::move(meta));
  }
  return at == head.shapes_bytes;
}

}  // namespace paceline::wire
