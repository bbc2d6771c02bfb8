// A frame is made of Python's and sent, in one call of the system where it is small.
#pragma once

#include <Python.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <cstring>
#include <tuple>
#include <vector>

#include "head.hpp"
#include "language.hpp"
#include "socket.hpp"

namespace paceline::wire {

class Outgoing {
 public:
  // most_bytes: of tensors that simply follow their head.
  Outgoing(const Language& language, int file, uint64_t most_bytes)
      : language_(language), file_(file), most_bytes_(most_bytes) {}

  // Sends a frame; returns false where Python must look at it; nothing was sent then. One thread at a time.
  bool send(PyObject* frame) {
    if (Py_TYPE(frame) != language_.frame_type()) {
      return false;
    }
    std::array<long long, 6> fields{};
    for (size_t i = 0; i < fields.size(); ++i) {
      PyObject* value = language_.slots.get(frame, static_cast<Field>(i));
      if (value == nullptr) {
        return false;
      }
      fields[i] = PyLong_AsLongLong(value);
      if (fields[i] == -1 && PyErr_Occurred() != nullptr) {
        PyErr_Clear();
        return false;
      }
    }
    if (fields[0] < 0 || fields[0] > 0xffff) {
      return false;
    }
    const auto weighed = held(frame, kWeight);
    const auto numbers = held(frame, kNumbers);
    const auto text = held(frame, kText);
    const auto given = held(frame, kTensors);
    if (!weighed || !numbers || !text || !given || !PyUnicode_Check(text.ptr())) {
      return false;
    }
    const double weight = PyFloat_AsDouble(weighed.ptr());
    if (weight == -1 && PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      return false;
    }
    const auto tensors = py::reinterpret_steal<py::object>(PySequence_Fast(given.ptr(), "tensors are a list"));
    Py_ssize_t text_bytes = 0;
    const char* said = PyUnicode_AsUTF8AndSize(text.ptr(), &text_bytes);
    const Borrowed whole(numbers.ptr());
    if (!tensors || said == nullptr || !whole.taken()) {
      PyErr_Clear();
      return false;
    }
    const size_t count = static_cast<size_t>(PySequence_Fast_GET_SIZE(tensors.ptr()));
    std::vector<at::Tensor> kept;  // whatever becomes of the list meanwhile
    kept.reserve(count);
    shapes_.clear();
    pieces_.clear();
    pieces_.add(nullptr, 1);  // the place of the first
    uint64_t bytes = 0;
    for (size_t i = 0; i < count; ++i) {
      PyObject* item = PySequence_Fast_GET_ITEM(tensors.ptr(), i);
      if (!THPVariable_Check(item)) {
        return false;
      }
      const at::Tensor& tensor = kept.emplace_back(THPVariable_Unpack(item));
      if (!is_plain(tensor)) {
        return false;
      }
      add_shape(tensor);
      bytes += tensor.nbytes();
      pieces_.add(tensor.nbytes() > 0 ? const_cast<void*>(tensor.const_data_ptr()) : nullptr, tensor.nbytes());
    }
    Head head{};
    std::memcpy(head.magic, kMagic, sizeof kMagic);
    head.kind = static_cast<uint16_t>(fields[0]);
    head.tensors = static_cast<uint32_t>(count);
    head.numbers = static_cast<uint32_t>(whole.bytes() / 8);
    head.shapes_bytes = static_cast<uint32_t>(shapes_.size());
    head.text_bytes = static_cast<uint32_t>(text_bytes);
    std::tie(head.epoch, head.request, head.worker, head.sequence, head.clock) =
        std::tie(fields[1], fields[2], fields[3], fields[4], fields[5]);
    head.weight = weight;
    const uint64_t rest = whole.bytes() + shapes_.size() + static_cast<uint64_t>(text_bytes);
    if (bytes > std::min(most_bytes_, kMaxTensorBytes) || rest > kMaxRestBytes) {
      return false;
    }
    first_.resize(sizeof head + rest);
    char* to = first_.data();
    to = copied(to, &head, sizeof head);
    to = copied(to, whole.data(), whole.bytes());
    to = copied(to, shapes_.data(), shapes_.size());
    copied(to, said, static_cast<size_t>(text_bytes));
    pieces_.first(first_.data(), first_.size());
    send_all(file_, pieces_);
    bytes_ += static_cast<int64_t>(first_.size() + bytes);
    if (first_.size() > kLarge) {
      first_ = {};
    }
    return true;
  }

  int64_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kLarge = 1 << 20;

  py::object held(PyObject* frame, Field which) const {
    return py::reinterpret_borrow<py::object>(language_.slots.get(frame, which));
  }

  // Memory of an array of whole numbers of 64 bits.
  class Borrowed {
   public:
    explicit Borrowed(PyObject* object) {
      taken_ = PyObject_GetBuffer(object, &view_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) == 0;
    }
    ~Borrowed() {
      if (taken_) {
        PyBuffer_Release(&view_);
      }
    }
    Borrowed(const Borrowed&) = delete;
    bool taken() const {
      return taken_ && view_.itemsize == 8 && view_.ndim == 1 && view_.format != nullptr &&
          (view_.format[0] == 'l' || view_.format[0] == 'q');
    }
    const void* data() const { return view_.buf; }
    size_t bytes() const { return static_cast<size_t>(view_.len); }

   private:
    Py_buffer view_{};
    bool taken_;
  };

  static char* copied(char* to, const void* from, size_t bytes) {
    if (bytes > 0) {
      std::memcpy(to, from, bytes);
    }
    return to + bytes;
  }

  void add_shape(const at::Tensor& tensor) {
    const auto sizes = tensor.sizes();
    const size_t at = shapes_.size();
    shapes_.resize(at + 2 + 8 * sizes.size());
    shapes_[at] = static_cast<char>(number_of(tensor.scalar_type()));
    shapes_[at + 1] = static_cast<char>(sizes.size());
    copied(shapes_.data() + at + 2, sizes.data(), 8 * sizes.size());
  }

  const Language& language_;
  int file_;
  uint64_t most_bytes_;
  int64_t bytes_ = 0;
  std::vector<char> first_;
  std::vector<char> shapes_;
  Pieces pieces_;
};

}  // namespace paceline::wire
