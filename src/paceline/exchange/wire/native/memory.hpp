// Memory for the tensors of one frame at a time: `memory.Memory`, with tensors that cost little to make.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "head.hpp"

namespace paceline::wire {

class Memory {
 public:
  // Where the first tensor will lie, and how many bytes may be put there before it is known what they are.
  char* begin() const { return size_ > 0 ? static_cast<char*>(held_.mutable_data_ptr()) : nullptr; }
  uint64_t size() const { return size_; }

  // Returns whether the next call of `tensors` leaves the bytes where they are.
  bool keeps(const std::vector<Meta>& metas) const {
    return size_ > 0 && needed(metas) <= size_ && frames_ + 1 < kPatience;
  }

  // Returns tensors to receive into; those of the call before are not valid any more. Throws where there is no memory.
  std::vector<at::Tensor> tensors(const std::vector<Meta>& metas) {
    make_room(needed(metas));
    std::vector<at::Tensor> made;
    made.reserve(metas.size());
    uint64_t at = 0;
    for (const Meta& meta : metas) {
      made.push_back(tensor(meta, at));
      at += rounded(meta.bytes);
    }
    return made;
  }

 private:
  static constexpr uint64_t kAlignment = 64;
  static constexpr uint64_t kSmallest = 64 << 10;
  static constexpr int kPatience = 64;  // frames, see `memory.py`

  static uint64_t rounded(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

  static uint64_t needed(const std::vector<Meta>& metas) {
    uint64_t total = 0;
    for (const Meta& meta : metas) {
      total += rounded(meta.bytes);
    }
    return total;
  }

  void make_room(uint64_t total) {
    most_ = std::max(most_, total);
    if (++frames_ == kPatience) {
      if (2 * most_ < size_ && size_ > kSmallest) {
        release();
      }
      most_ = total;
      frames_ = 0;
    }
    if (total > size_ || size_ == 0) {
      release();  // the old one goes first
      const uint64_t size = std::max(total, kSmallest);
      held_ = at::empty({static_cast<int64_t>(size)}, at::TensorOptions(at::kByte));
      size_ = size;
    }
  }

  void release() {
    held_ = at::Tensor();
    size_ = 0;
  }

  at::Tensor tensor(const Meta& meta, uint64_t at) const {
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(held_.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(meta.type));
    auto* parts = made.unsafeGetTensorImpl();
    parts->set_sizes_contiguous(meta.shape);
    parts->set_storage_offset(static_cast<int64_t>(at / c10::elementSize(meta.type)));
    return made;
  }

  at::Tensor held_;
  uint64_t size_ = 0;
  uint64_t most_ = 0;
  int frames_ = 0;
};

}  // namespace paceline::wire
