// Frames of one connection: as `codec.py`, `sockets.py` and `memory.py` have them, in one call for each frame.
//
// Whatever is not usual is left to them: a tensor that must be copied first, a frame that is damaged, shared memory.
#pragma once

#include <Python.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <unistd.h>

#include <array>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#include "head.hpp"
#include "language.hpp"
#include "memory.hpp"
#include "socket.hpp"

namespace paceline::wire {

class Wire {
 public:
  // ahead: bytes that may be read before they are needed.
  Wire(const Language& language, size_t ahead) : language_(language), ahead_(ahead), buffer_(kSmallest) {}
  ~Wire() { close_files(); }

  // Sends a frame whose tensors have at most so many bytes. Returns its bytes, or -1 where `codec` must look at it;
  // nothing was sent then. One thread at a time.
  int64_t send(int socket, PyObject* frame, uint64_t most_bytes) {
    std::array<long long, 6> fields{};
    for (size_t i = 0; i < fields.size(); ++i) {
      const py::object value = attribute(frame, i);
      fields[i] = PyLong_AsLongLong(value.ptr());
      if (fields[i] == -1 && PyErr_Occurred() != nullptr) {
        PyErr_Clear();
        return -1;
      }
    }
    if (fields[0] < 0 || fields[0] > 0xffff) {
      return -1;
    }
    const double weight = PyFloat_AsDouble(attribute(frame, 6).ptr());
    if (weight == -1 && PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      return -1;
    }
    const py::object numbers = attribute(frame, 7);
    const py::object text = attribute(frame, 8);
    const py::object tensors =
        py::reinterpret_steal<py::object>(PySequence_Fast(attribute(frame, 9).ptr(), "tensors of a frame are a list"));
    Py_ssize_t text_bytes = 0;
    const char* said = PyUnicode_AsUTF8AndSize(text.ptr(), &text_bytes);
    Borrowed whole(numbers.ptr());
    if (!tensors || said == nullptr || !whole.taken()) {
      PyErr_Clear();
      return -1;
    }
    const size_t count = static_cast<size_t>(PySequence_Fast_GET_SIZE(tensors.ptr()));
    std::vector<at::Tensor> held;  // whatever becomes of the list meanwhile
    held.reserve(count);
    shapes_.clear();
    pieces_.clear();
    pieces_.add(nullptr, 1);  // the place of the first
    uint64_t bytes = 0;
    for (size_t i = 0; i < count; ++i) {
      PyObject* item = PySequence_Fast_GET_ITEM(tensors.ptr(), i);
      if (!THPVariable_Check(item)) {
        return -1;
      }
      const at::Tensor& tensor = held.emplace_back(THPVariable_Unpack(item));
      if (!is_plain(tensor)) {
        return -1;
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
    if (bytes > std::min(most_bytes, kMaxTensorBytes) || rest > kMaxRestBytes) {
      return -1;
    }
    first_.resize(sizeof head + rest);
    char* to = first_.data();
    to = copied(to, &head, sizeof head);
    to = copied(to, whole.data(), whole.bytes());
    to = copied(to, shapes_.data(), shapes_.size());
    copied(to, said, static_cast<size_t>(text_bytes));
    pieces_.first(first_.data(), first_.size());
    send_all(socket, pieces_);
    const auto sent = static_cast<int64_t>(first_.size() + bytes);
    if (first_.size() > kLarge) {
      first_ = {};
    }
    return sent;
  }

  // Waits for a frame. Returns it, its bytes and its segment; and metas where the caller has to fetch the tensors: from
  // a segment, or because they have more than so many bytes. None: the peer has closed the connection.
  py::object receive(int socket, PyObject* place, uint64_t most_bytes) {
    if (!ensure(socket, sizeof(Head))) {
      if (filled_ == begin_) {
        return py::none();
      }
      lost();
    }
    Head head;
    std::memcpy(&head, buffer_.data() + begin_, sizeof head);
    if (!is_head(head)) {
      language_.head(py::bytes(buffer_.data() + begin_, sizeof head));
      throw py::value_error("a head is none, and `codec` says that it is one");
    }
    const auto rest = static_cast<size_t>(head.rest_bytes());
    if (!ensure(socket, sizeof head + rest)) {
      lost();
    }
    const char* at = buffer_.data() + begin_ + sizeof head;
    if (!read_metas(head, reinterpret_cast<const unsigned char*>(at) + 8 * size_t{head.numbers}, metas_)) {
      damaged(at, rest);
    }
    py::object frame = made(head, at, rest);
    begin_ += sizeof head + rest;
    uint64_t bytes = sizeof head + rest;
    for (const Meta& meta : metas_) {
      bytes += meta.bytes;
    }
    if (head.segment != 0 || bytes - sizeof head - rest > most_bytes) {
      return py::make_tuple(frame, bytes, head.segment, described());
    }
    if (metas_.empty()) {
      return py::make_tuple(frame, bytes, 0, py::none());
    }
    py::object wanted = py::none();
    if (place != Py_None) {
      wanted = py::reinterpret_steal<py::object>(
          PyObject_CallFunctionObjArgs(place, frame.ptr(), described().ptr(), nullptr));
      if (!wanted) {
        throw py::error_already_set();
      }
    }
    pieces_in_.clear();
    py::list tensors = wanted.is_none() ? own() : theirs(wanted);
    fill(socket);
    PyObject_SetAttr(frame.ptr(), attributes()[9].object, tensors.ptr());
    return py::make_tuple(frame, bytes, 0, py::none());
  }

  // Descriptors that came since they were taken last; they belong to the caller.
  std::vector<int> files() { return std::exchange(files_, {}); }

 private:
  static constexpr size_t kSmallest = 8 << 10;
  static constexpr size_t kLarge = 1 << 20;

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

  [[noreturn]] void lost() {
    PyErr_SetString(language_.lost.ptr(), "the peer went away in the middle of a frame.");
    throw Raised();
  }

  [[noreturn]] void damaged(const char* rest, size_t bytes) {
    const py::object read = language_.head(py::bytes(buffer_.data() + begin_, sizeof(Head)));
    language_.announced(read, py::reinterpret_steal<py::object>(PyByteArray_FromStringAndSize(rest, bytes)));
    throw py::value_error("shapes cannot be, and `codec` says that they can");
  }

  // Has so many bytes in the buffer; false where the peer is gone before.
  bool ensure(int socket, size_t wanted) {
    if (filled_ - begin_ >= wanted) {
      return true;
    }
    std::memmove(buffer_.data(), buffer_.data() + begin_, filled_ - begin_);
    filled_ -= begin_;
    begin_ = 0;
    if (buffer_.size() < wanted) {
      buffer_.resize(wanted);
    } else if (buffer_.size() > kLarge && wanted < kSmallest && filled_ < kSmallest) {
      buffer_.resize(kSmallest);
      buffer_.shrink_to_fit();
    }
    while (filled_ < wanted) {
      const size_t most = std::max(wanted, std::min(filled_ + ahead_, buffer_.size()));
      const size_t count = heard(socket, buffer_.data() + filled_, most - filled_);
      if (count == 0) {
        return false;
      }
      filled_ += count;
    }
    return true;
  }

  size_t heard(int socket, char* to, size_t room) {
    iovec piece{to, room};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(8 * sizeof(int))> notes;
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    const auto call = [&](int flags) {
      message.msg_control = notes.data();
      message.msg_controllen = notes.size();
      return recvmsg(socket, &message, flags | MSG_CMSG_CLOEXEC);
    };
    const size_t count = insisted(call, true);
    for (cmsghdr* note = CMSG_FIRSTHDR(&message); note != nullptr; note = CMSG_NXTHDR(&message, note)) {
      if (note->cmsg_level != SOL_SOCKET || note->cmsg_type != SCM_RIGHTS) {
        continue;
      }
      for (size_t at = 0; CMSG_LEN(at + sizeof(int)) <= note->cmsg_len; at += sizeof(int)) {
        int file = -1;
        std::memcpy(&file, CMSG_DATA(note) + at, sizeof file);
        files_.push_back(file);
      }
    }
    return count;
  }

  py::object made(const Head& head, const char* rest, size_t bytes) {
    py::object numbers = language_.numbers(py::reinterpret_steal<py::object>(
        PyByteArray_FromStringAndSize(rest, static_cast<Py_ssize_t>(8 * size_t{head.numbers}))));
    const size_t text_at = 8 * size_t{head.numbers} + head.shapes_bytes;
    PyObject* text = PyUnicode_DecodeUTF8(rest + text_at, head.text_bytes, nullptr);
    if (text == nullptr) {
      PyErr_Clear();
      damaged(rest, bytes);
    }
    const auto said = py::reinterpret_steal<py::object>(text);
    return language_.frame(
        head.kind, head.epoch, head.request, head.worker, head.sequence, head.clock, head.weight, numbers, said);
  }

  py::list described() const {
    py::list all;
    for (const Meta& meta : metas_) {
      py::tuple shape(meta.shape.size());
      for (size_t i = 0; i < meta.shape.size(); ++i) {
        shape[i] = meta.shape[i];
      }
      all.append(language_.meta(language_.types[number_of(meta.type)], shape));
    }
    return all;
  }

  std::vector<at::Tensor> kept() {
    try {
      return memory_.tensors(metas_);
    } catch (const c10::Error&) {
      uint64_t bytes = 0;
      for (const Meta& meta : metas_) {
        bytes += meta.bytes;
      }
      language_.full(bytes);
      throw;
    }
  }

  py::list own() {
    py::list all;
    for (const at::Tensor& tensor : kept()) {
      pieces_in_.add(tensor.nbytes() > 0 ? tensor.mutable_data_ptr() : nullptr, tensor.nbytes());
      all.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)));
    }
    return all;
  }

  // Places of the receiver, if they are right.
  py::list theirs(const py::object& given) {
    const auto places = py::reinterpret_steal<py::object>(PySequence_List(given.ptr()));
    if (!places) {
      throw py::error_already_set();
    }
    bool fits = py::len(places) == metas_.size();
    for (size_t i = 0; fits && i < metas_.size(); ++i) {
      PyObject* item = PyList_GET_ITEM(places.ptr(), i);
      fits = THPVariable_Check(item);
      if (fits) {
        const at::Tensor& tensor = THPVariable_Unpack(item);
        fits = is_plain(tensor) && tensor.scalar_type() == metas_[i].type && tensor.nbytes() == metas_[i].bytes;
        if (fits) {
          pieces_in_.add(metas_[i].bytes > 0 ? tensor.data_ptr() : nullptr, metas_[i].bytes);
        }
      }
    }
    if (!fits) {
      language_.fitting(given, described());
      throw py::value_error("places are not right, and `memory` says that they are");
    }
    return py::reinterpret_borrow<py::list>(places);
  }

  void fill(int socket) {
    while (pieces_in_.left() > 0 && filled_ > begin_) {
      const iovec piece = *pieces_in_.begin();
      const size_t part = std::min(piece.iov_len, filled_ - begin_);
      std::memcpy(piece.iov_base, buffer_.data() + begin_, part);
      begin_ += part;
      pieces_in_.done(part);
    }
    if (!receive_all(socket, pieces_in_)) {
      lost();
    }
  }

  void close_files() {
    for (const int file : files_) {
      ::close(file);
    }
  }

  Language language_;
  size_t ahead_;
  std::vector<char> buffer_;
  size_t begin_ = 0;
  size_t filled_ = 0;
  std::vector<Meta> metas_;
  Memory memory_;
  Pieces pieces_in_;
  std::vector<int> files_;
  // Of the thread that sends.
  std::vector<char> first_;
  std::vector<char> shapes_;
  Pieces pieces_;
};

}  // namespace paceline::wire
