// Records of one size that are never moved: each slab has twice as many as the one before.
#pragma once

#include <bit>
#include <cstddef>
#include <vector>

#include "memory.hpp"

namespace paceline {

template <typename T>
class Slabs {
 public:
  // size: elements of a record.
  explicit Slabs(size_t size) : size_(size) {}

  T* operator[](size_t record) const {
    const size_t shifted = record + kFirst;
    const size_t slab = std::bit_width(shifted) - std::bit_width(kFirst);
    return slabs_[slab].template as<T>() + (shifted - (kFirst << slab)) * size_;
  }

  // Makes room for records below `count`.
  void reserve(size_t count) {
    while (kFirst * ((size_t{1} << slabs_.size()) - 1) < count) {
      slabs_.emplace_back((kFirst << slabs_.size()) * size_ * sizeof(T));
    }
  }

 private:
  static constexpr size_t kFirst = 1024;

  size_t size_;
  std::vector<Memory> slabs_;
};

}  // namespace paceline
