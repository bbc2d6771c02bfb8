// What calls of a group that spans hosts are given, checked before any rank waits for another.
#pragma once

#include <torch/csrc/distributed/c10d/Utils.hpp>

#include <vector>

#include "operand.hpp"

namespace paceline::hosts {

inline const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* title) {
  TORCH_CHECK(tensors.size() == 1, title, " takes one tensor, and got ", tensors.size());
  check_plain(tensors.front(), title);
  return tensors.front();
}

inline void check_alike(const at::Tensor& a, const at::Tensor& b, const char* title) {
  check_plain(b, title);
  TORCH_CHECK(
      a.numel() == b.numel() && a.scalar_type() == b.scalar_type(),
      title,
      " takes tensors that are alike, and got ",
      a.sizes(),
      " of ",
      a.scalar_type(),
      " and ",
      b.sizes(),
      " of ",
      b.scalar_type());
}

// One tensor for each rank, alike.
inline void check_rows(const std::vector<at::Tensor>& rows, const at::Tensor& row, int size, const char* title) {
  TORCH_CHECK(
      rows.size() == static_cast<size_t>(size),
      title,
      " takes a tensor for each of ",
      size,
      " ranks, and got ",
      rows.size());
  for (const auto& other : rows) {
    check_alike(row, other, title);
  }
}

inline void check_whole(const at::Tensor& whole, const at::Tensor& part, int size, const char* title) {
  check_plain(whole, title);
  TORCH_CHECK(
      whole.numel() == part.numel() * size && whole.scalar_type() == part.scalar_type(),
      title,
      " takes one tensor that is ",
      size,
      " times the other, and got ",
      whole.sizes(),
      " of ",
      whole.scalar_type(),
      " and ",
      part.sizes(),
      " of ",
      part.scalar_type());
}

// Sizes of the pieces in bytes.
inline std::vector<int64_t> byte_sizes(const std::vector<int64_t>& sizes, const at::Tensor& tensor, int ranks) {
  c10d::checkSplitSizes(sizes, tensor, ranks);
  const int64_t rows = tensor.size(0);
  const int64_t row_bytes = rows == 0 ? 0 : static_cast<int64_t>(tensor.nbytes()) / rows;
  std::vector<int64_t> bytes(ranks, rows / ranks * row_bytes);
  for (size_t i = 0; i < sizes.size(); ++i) {
    bytes[i] = sizes[i] * row_bytes;
  }
  return bytes;
}

inline std::vector<int64_t> byte_sizes(const std::vector<at::Tensor>& tensors) {
  std::vector<int64_t> bytes;
  for (const auto& tensor : tensors) {
    bytes.push_back(static_cast<int64_t>(tensor.nbytes()));
  }
  return bytes;
}

}  // namespace paceline::hosts
