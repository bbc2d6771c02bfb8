// Exchanges of placed programs, on tensors.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "group.hpp"

namespace paceline {

// An exchange under way.
class Started {
 public:
  // `x` is copied into the arena unless it lies there.
  Started(
      c10::intrusive_ptr<Group> group, Kind kind, const at::Tensor& x, bool in_place, const std::vector<int64_t>& rows);

  // The result; large ones lie in the arena themselves, whose memory is at hand.
  at::Tensor wait();

 private:
  c10::intrusive_ptr<Group> group_;
  Kind kind_;
  at::Tensor input_;
  bool in_place_;
  int64_t row_ = 0;
  uint32_t number_;
};

void bind_started(pybind11::module& module);

}  // namespace paceline
