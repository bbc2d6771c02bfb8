// Users' tensors as what every part of a group can take: contiguous bytes to move, or plain numbers to reduce.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <string>
#include <vector>

#include "layout.hpp"

namespace paceline::hosts {

using Operator = c10d::ReduceOp::RedOpType;

inline void check_plain(const at::Tensor& tensor, const char* title) {
  TORCH_CHECK(
      tensor.layout() == at::kStrided && tensor.device().is_cpu(),
      title,
      " takes dense CPU tensors, and this one is ",
      tensor.layout(),
      " on ",
      tensor.device());
}

// In one dimension; a tensor of one element counts as contiguous whatever its strides say.
inline at::Tensor flattened(const at::Tensor& contiguous) {
  return contiguous.as_strided({contiguous.numel()}, {1});
}

inline at::Tensor as_bytes(const at::Tensor& contiguous) {
  return flattened(contiguous).view(at::kByte);
}

// The bytes of tensors, one after the other.
inline at::Tensor packed(const std::vector<at::Tensor>& tensors) {
  if (tensors.size() == 1) {
    return as_bytes(plain(tensors.front()));
  }
  std::vector<at::Tensor> pieces;
  for (const auto& tensor : tensors) {
    pieces.push_back(as_bytes(plain(tensor)));
  }
  return at::cat(pieces);
}

inline void unpack(const at::Tensor& bytes, const std::vector<at::Tensor>& tensors) {
  int64_t offset = 0;
  for (const auto& tensor : tensors) {
    const Landing landing(tensor);
    const auto into = as_bytes(landing.flat());
    into.copy_(bytes.narrow(0, offset, into.numel()));
    offset += into.numel();
    landing.settle();
  }
}

// How numbers of one type are reduced by parts that know sums, products, extremes and bitwise operations of the usual
// types only: averages are divided sums, booleans are bytes of 0 and 1, complex numbers are pairs, and types that Gloo
// cannot add are widened.
class Combining {
 public:
  Combining(const c10d::ReduceOp& given, at::ScalarType type, int64_t ranks) : type_(type), ranks_(ranks) {
    const bool bitwise = given == Operator::BAND || given == Operator::BOR || given == Operator::BXOR;
    TORCH_CHECK(
        !(given == Operator::PREMUL_SUM),
        "PREMUL_SUM is not for CPU tensors: multiply the tensor and reduce it with SUM");
    TORCH_CHECK(
        at::isIntegralType(type, true) || !bitwise,
        "bitwise operations take integers and booleans, and this tensor is of ",
        type);
    TORCH_CHECK(
        !(given == Operator::AVG) || !at::isIntegralType(type, true),
        "AVG takes floating-point and complex tensors, and this one is of ",
        type,
        ": reduce it with SUM and divide");
    TORCH_CHECK(
        !at::isComplexType(type) || c10d::isComplexViewAsRealAllowed(given),
        "complex tensors are reduced with SUM or AVG, and this operation is another");
    TORCH_CHECK(type != at::kUInt64, "reductions take no uint64: view the tensor as int64");
    average_ = given == Operator::AVG;
    operator_ = average_ ? Operator::SUM : given.op_;
    if (type == at::kBool && operator_ != Operator::BXOR) {
      const bool any = given == Operator::SUM || given == Operator::MAX || given == Operator::BOR;
      operator_ = any ? Operator::MAX : Operator::MIN;
    }
  }

  Operator part_operator() const {
    return operator_;
  }

  // The numbers of a tensor in one dimension: in its own memory, or in a copy if they have to be changed for the parts.
  at::Tensor numbers(const at::Tensor& tensor) const {
    auto flat = flattened(plain(tensor));
    if (type_ == at::kBool) {
      return flat.view(at::kByte);
    }
    if (at::isComplexType(type_)) {
      return flattened(at::view_as_real(flat));
    }
    return wide() == type_ ? flat : flat.to(wide());
  }

  void average(const at::Tensor& numbers) const {
    if (average_) {
      numbers.div_(ranks_);
    }
  }

  // Put reduced numbers where the user wants them, unless they are there.
  void deliver(const at::Tensor& numbers, const at::Tensor& tensor) const {
    if (numbers.numel() == 0 || (tensor.is_contiguous() && numbers.data_ptr() == tensor.data_ptr())) {
      return;
    }
    at::Tensor typed = numbers;
    if (type_ == at::kBool) {
      typed = numbers.view(at::kBool);
    } else if (at::isComplexType(type_)) {
      typed = at::view_as_complex(numbers.view({-1, 2}));
    }
    tensor.detach().copy_(typed.view(tensor.sizes()));
  }

 private:
  at::ScalarType wide() const {
    switch (type_) {
      case at::kShort:
      case at::kUInt16:
        return at::kInt;
      case at::kUInt32:
        return at::kLong;
      default:
        return at::isFloat8Type(type_) ? at::kFloat : type_;
    }
  }

  at::ScalarType type_;
  int64_t ranks_;
  Operator operator_ = Operator::SUM;
  bool average_ = false;
};

}  // namespace paceline::hosts
