// Tensors as plain bytes: what is not contiguous passes through a copy that is.
//
// Backends write tensors below autograd (`at::AutoDispatchBelowADInplaceOrView`): no graph, no version counters, and also
// what was made in inference mode. Whoever calls this sees to it.
#pragma once

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <vector>

#include "../core/collectives.hpp"

namespace paceline {

// A tensor in shared memory.
inline at::Tensor empty(Arena& arena, at::IntArrayRef shape, at::ScalarType dtype) {
  const auto memory = arena.allocate(c10::multiply_integers(shape) * c10::elementSize(dtype));
  return at::from_blob(memory.get(), shape, [memory](void*) {}, at::TensorOptions().dtype(dtype));
}

inline bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

inline at::Tensor plain(const at::Tensor& tensor) {
  return tensor.resolve_conj().resolve_neg().contiguous();
}

inline Bytes bytes_of(const at::Tensor& tensor) {
  return {static_cast<char*>(tensor.data_ptr()), tensor.nbytes()};
}

inline std::vector<Bytes> bytes_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Bytes> pieces;
  pieces.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    pieces.push_back(bytes_of(tensor));
  }
  return pieces;
}

// Equal rows of a contiguous tensor.
inline std::vector<Bytes> rows_of(const at::Tensor& tensor, int count) {
  const Bytes whole = bytes_of(tensor);
  std::vector<Bytes> rows;
  for (const auto row : c10::irange(count)) {
    rows.push_back({whole.data + whole.count / count * row, whole.count / count});
  }
  return rows;
}

// Rows of a contiguous tensor along its first dimension; `sizes` empty: equal ones.
inline std::vector<Bytes> rows_of(const at::Tensor& tensor, const std::vector<int64_t>& sizes, int count) {
  if (sizes.empty()) {
    return rows_of(tensor, count);
  }
  const size_t row = tensor.size(0) > 0 ? tensor.nbytes() / tensor.size(0) : 0;
  char* at = bytes_of(tensor).data;
  std::vector<Bytes> rows;
  for (const int64_t size : sizes) {
    rows.push_back({at, size * row});
    at += size * row;
  }
  return rows;
}

// Where a result arrives: in the tensor itself, or in a copy that `settle` puts there.
class Landing {
 public:
  explicit Landing(const at::Tensor& target, bool filled = false) : target_(target), flat_(target) {
    if (!is_plain(target)) {
      flat_ = filled ? plain(target).clone() : at::empty(target.sizes(), target.options());
    }
  }
  const at::Tensor& flat() const {
    return flat_;
  }
  void settle() const {
    if (!flat_.is_same(target_)) {
      target_.copy_(flat_);
    }
  }

 private:
  at::Tensor target_;
  at::Tensor flat_;
};

inline std::vector<Landing> landings(const std::vector<at::Tensor>& targets) {
  return {targets.begin(), targets.end()};
}

inline std::vector<Bytes> bytes_of(const std::vector<Landing>& landings) {
  std::vector<Bytes> pieces;
  for (const Landing& landing : landings) {
    pieces.push_back(bytes_of(landing.flat()));
  }
  return pieces;
}

inline void settle(const std::vector<Landing>& landings) {
  for (const Landing& landing : landings) {
    landing.settle();
  }
}

}  // namespace paceline
