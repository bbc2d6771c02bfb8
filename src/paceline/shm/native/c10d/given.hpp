// What a call is given: checks, and how it is planned.
#pragma once

#include <c10/util/Exception.h>

#include <optional>
#include <utility>

#include "group.hpp"

namespace paceline {

inline const at::Tensor& only(const Tensors& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "shared memory: one tensor a call, not ", tensors.size());
  return tensors[0];
}

inline const Tensors& only(const std::vector<Tensors>& lists) {
  TORCH_CHECK_VALUE(lists.size() == 1, "shared memory: one list of tensors a call, not ", lists.size());
  return lists[0];
}

inline void check_tensors(const Tensors& tensors, at::ScalarType dtype) {
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(
        tensor.device().is_cpu() && tensor.layout() == at::kStrided,
        "shared memory: tensors must be dense and on the CPU, not ", tensor.layout(), " on ", tensor.device());
    TORCH_CHECK_TYPE(
        tensor.scalar_type() == dtype,
        "shared memory: the tensors of one call must have one type, not ", dtype, " and ", tensor.scalar_type());
  }
}

inline uint64_t sum_of_bytes(const Tensors& tensors) {
  uint64_t sum = 0;
  for (const at::Tensor& tensor : tensors) {
    sum += tensor.nbytes();
  }
  return sum;
}

template <typename Given>
Group::Plan Group::plan(c10d::OpType type, Kind kind, const Given& options) const {
  return {type, kind, options.timeout == c10d::kUnsetTimeout ? timeout_ : options.timeout, options.asyncOp};
}

template <typename Given>
Group::Plan Group::plan(c10d::OpType type, Kind kind, Tensors inputs, Tensors outputs, const Given& options) const {
  Plan plan = this->plan(type, kind, options);
  const Tensors& given = outputs.empty() ? inputs : outputs;
  plan.dtype = given.empty() ? at::kByte : given[0].scalar_type();
  check_tensors(inputs, plan.dtype);
  check_tensors(outputs, plan.dtype);
  plan.inputs = std::move(inputs);
  plan.outputs = {std::move(outputs)};
  return plan;
}

static_assert(static_cast<uint8_t>(Reduction::PREMUL_SUM) == c10d::ReduceOp::PREMUL_SUM);
static_assert(static_cast<uint8_t>(Reduction::AVG) == c10d::ReduceOp::AVG);

// The reduction, and what tensors have to be multiplied with before it.
inline std::pair<Reduction, std::optional<at::Tensor>> parse(const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) {
    return {static_cast<Reduction>(op.op_), std::nullopt};
  }
  const auto* supplement = reinterpret_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
  if (supplement->tensor_factor.defined()) {
    return {Reduction::SUM, supplement->tensor_factor};
  }
  return {Reduction::SUM, at::scalar_tensor(supplement->double_factor, at::kDouble)};
}

}  // namespace paceline
