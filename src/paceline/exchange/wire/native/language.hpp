// What native code is told of Python, and what it asks of it.
#pragma once

#include <Python.h>
#include <pybind11/pybind11.h>
#include <structmember.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>

#include "head.hpp"
#include "socket.hpp"

namespace paceline::wire {

namespace py = pybind11;

// The attributes of a frame, in the order of `Field`.
constexpr std::array<const char*, 10> kFields = {
    "kind", "epoch", "request", "worker", "sequence", "clock", "weight", "numbers", "text", "tensors"};
enum Field : size_t { kKind, kEpoch, kRequest, kWorker, kSequence, kClock, kWeight, kNumbers, kText, kTensors };

// Where the attributes lie in a frame: its class has slots.
class Slots {
 public:
  explicit Slots(py::handle type) {
    for (size_t i = 0; i < kFields.size(); ++i) {
      const py::object found = type.attr(kFields[i]);
      const auto* member = reinterpret_cast<PyMemberDescrObject*>(found.ptr())->d_member;
      if (Py_TYPE(found.ptr()) != &PyMemberDescr_Type || member->type != T_OBJECT_EX) {
        throw py::type_error("a frame's attributes are no slots");
      }
      at_[i] = member->offset;
    }
  }
  // Borrowed; null where it was deleted.
  PyObject* get(PyObject* frame, Field which) const { return *place(frame, which); }
  // Takes a reference.
  void set(PyObject* frame, Field which, PyObject* value) const { Py_XSETREF(*place(frame, which), value); }

 private:
  PyObject** place(PyObject* frame, Field which) const {
    return reinterpret_cast<PyObject**>(reinterpret_cast<char*>(frame) + at_[which]);
  }
  std::array<Py_ssize_t, kFields.size()> at_{};
};

// What Python has for a frame. `head` and `announced` of `codec` raise where bytes are no frame, `fitting` of `memory`
// where places are not right, `full` where there is no memory; `lost` is raised where the peer is gone; `array` makes
// numbers of bytes and a type, and `no_numbers` are none.
struct Language {
  py::object frame, meta, head, announced, fitting, full, lost, array, number, no_numbers;
  py::tuple types;
  Slots slots;

  PyTypeObject* frame_type() const { return reinterpret_cast<PyTypeObject*>(frame.ptr()); }
};

// The bytes of a tensor, if it lies as frames have it; of no use once the tensor is gone.
inline bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.is_cpu() && !tensor.is_neg() && !tensor.is_conj() &&
      number_of(tensor.scalar_type()) >= 0 && tensor.dim() <= static_cast<int64_t>(kMaxRank) && tensor.is_contiguous();
}

}  // namespace paceline::wire
