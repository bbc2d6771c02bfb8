// What native code is told of Python, and what it asks of it.
#pragma once

#include <Python.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>

#include "head.hpp"
#include "socket.hpp"

namespace paceline::wire {

namespace py = pybind11;

// What Python has for a frame. `head` and `announced` of `codec` raise where bytes are no frame, `fitting` of `memory`
// where places are not right, `full` where there is no memory; `lost` is raised where the peer is gone.
struct Language {
  py::object frame, meta, head, announced, fitting, full, lost, numbers;
  py::tuple types;
};

namespace names {
struct Name {
  explicit Name(const char* text) : object(PyUnicode_InternFromString(text)) {}
  PyObject* object;
};
}  // namespace names

// The attributes of a frame, in the order in which its class takes them.
inline const std::array<names::Name, 10>& attributes() {
  static const std::array<names::Name, 10> all = {
      names::Name("kind"),
      names::Name("epoch"),
      names::Name("request"),
      names::Name("worker"),
      names::Name("sequence"),
      names::Name("clock"),
      names::Name("weight"),
      names::Name("numbers"),
      names::Name("text"),
      names::Name("tensors")};
  return all;
}

inline py::object attribute(PyObject* frame, size_t which) {
  PyObject* found = PyObject_GetAttr(frame, attributes()[which].object);
  if (found == nullptr) {
    throw Raised();
  }
  return py::reinterpret_steal<py::object>(found);
}

// The bytes of a tensor, if it lies as frames have it; of no use once the tensor is gone.
inline bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.is_cpu() && !tensor.is_neg() && !tensor.is_conj() &&
      number_of(tensor.scalar_type()) >= 0 && tensor.dim() <= static_cast<int64_t>(kMaxRank) && tensor.is_contiguous();
}

}  // namespace paceline::wire
