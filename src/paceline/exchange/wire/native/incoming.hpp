// A frame is received and made one of Python's. One that is like the last one is read in one call of the system: its
// tensors are received where they shall lie before it is known what they are.
#pragma once

#include <Python.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "head.hpp"
#include "language.hpp"
#include "memory.hpp"
#include "socket.hpp"

namespace paceline::wire {

class Incoming {
 public:
  // ahead: bytes that may be read before they are needed. most_bytes: of tensors that simply follow their head.
  Incoming(const Language& language, int file, size_t ahead, uint64_t most_bytes)
      : language_(language), file_(file), ahead_(ahead), most_bytes_(most_bytes), buffer_(kSmallest) {}
  ~Incoming() { close_files(); }
  Incoming(const Incoming&) = delete;

  // See `Wire::receive`. One thread at a time.
  py::object receive(PyObject* place) {
    if (!ensure(sizeof(Head))) {
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
    if (!ensure(sizeof head + rest)) {
      lost();
    }
    const char* at = buffer_.data() + begin_ + sizeof head;
    if (!read_metas(head, reinterpret_cast<const unsigned char*>(at) + 8 * size_t{head.numbers}, metas_)) {
      damaged(at, rest);
    }
    py::object frame = made(head, at, rest);
    begin_ += sizeof head + rest;
    uint64_t bytes = 0;
    for (const Meta& meta : metas_) {
      bytes += meta.bytes;
    }
    const auto whole = static_cast<int64_t>(sizeof head + rest + bytes);
    if (begin_ < filled_ || head.segment != 0 || bytes > most_bytes_ || !memory_.keeps(metas_)) {
      unspill();
    }
    guess_ = std::min(sizeof head + rest, buffer_.size());
    if (head.segment != 0 || bytes > most_bytes_) {
      bytes_ += whole;
      return py::make_tuple(frame, head.segment, described());
    }
    if (!metas_.empty()) {
      take(frame, place);
    }
    bytes_ += whole;
    return frame;
  }

  // Descriptors that came since they were taken last; they belong to the caller.
  std::vector<int> files() { return std::exchange(files_, {}); }

  int64_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kSmallest = 8 << 10;
  static constexpr size_t kLarge = 1 << 20;

  // Receives the tensors of a frame.
  void take(const py::object& frame, PyObject* place) {
    py::object wanted = py::none();
    if (place != Py_None) {
      const py::list metas = described();
      wanted = py::reinterpret_steal<py::object>(
          PyObject_CallFunctionObjArgs(place, frame.ptr(), metas.ptr(), nullptr));
      if (!wanted) {
        throw py::error_already_set();
      }
    }
    pieces_in_.clear();
    const std::vector<size_t> there = spilled_of_each();
    py::object tensors = wanted.is_none() ? own(there) : theirs(wanted, there);
    fill();
    language_.slots.set(frame.ptr(), kTensors, tensors.release().ptr());
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
  bool ensure(size_t wanted) {
    if (filled_ - begin_ < wanted && spilled_ > 0) {
      unspill();
    }
    if (filled_ - begin_ >= wanted) {
      return true;
    }
    if (filled_ == begin_ && ahead_ > 0 && memory_.size() > 0 && buffer_.size() >= guess_) {
      begin_ = filled_ = 0;
      const size_t count = heard(guess_, std::min(memory_.size(), kAtOnceBytes));
      if (count == 0) {
        return false;
      }
      filled_ = std::min(count, guess_);
      spilled_ = count - filled_;
      return ensure(wanted);
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
      const size_t count = heard(most - filled_, 0);
      if (count == 0) {
        return false;
      }
      filled_ += count;
    }
    return true;
  }

  // Puts what was received beside the buffer into it: it is not what was expected there.
  void unspill() {
    if (spilled_ == 0) {
      return;
    }
    buffer_.resize(std::max(buffer_.size(), filled_ + spilled_));
    std::memcpy(buffer_.data() + filled_, memory_.begin(), spilled_);
    filled_ += spilled_;
    spilled_ = 0;
  }

  // Returns how many bytes of each tensor lie beside the buffer, one after the other; what is of the next frame is put
  // into the buffer.
  std::vector<size_t> spilled_of_each() {
    std::vector<size_t> there(metas_.size(), 0);
    size_t left = std::exchange(spilled_, 0);
    size_t at = 0;
    for (size_t i = 0; i < metas_.size(); ++i) {
      there[i] = std::min(left, static_cast<size_t>(metas_[i].bytes));
      left -= there[i];
      at += there[i];
    }
    if (left > 0) {
      buffer_.resize(std::max(buffer_.size(), left));
      std::memcpy(buffer_.data(), memory_.begin() + at, left);
      begin_ = 0;
      filled_ = left;
    }
    return there;
  }

  // Receives into the buffer, and so many bytes more into the memory for tensors: where those of the next frame begin
  // if it is like the last one.
  size_t heard(size_t room, size_t spill) {
    std::array<iovec, 2> pieces{{{buffer_.data() + filled_, room}, {memory_.begin(), spill}}};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(8 * sizeof(int))> notes;
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = spill > 0 ? 2 : 1;
    const auto call = [&](int flags) {
      message.msg_control = notes.data();
      message.msg_controllen = notes.size();
      return recvmsg(file_, &message, flags | MSG_CMSG_CLOEXEC);
    };
    const size_t count = filled_ == begin_ ? insisted(call, true, &patience_, &habit_) : insisted(call, true, &parts_);
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
    const size_t text_at = 8 * size_t{head.numbers} + head.shapes_bytes;
    PyObject* text = PyUnicode_DecodeUTF8(rest + text_at, head.text_bytes, nullptr);
    if (text == nullptr) {
      PyErr_Clear();
      damaged(rest, bytes);
    }
    const auto said = py::reinterpret_steal<py::object>(text);
    py::object numbers = numbers_of(rest, head.numbers);
    auto frame = py::reinterpret_steal<py::object>(PyType_GenericAlloc(language_.frame_type(), 0));
    if (!frame) {
      throw py::error_already_set();
    }
    const auto set = [&](Field which, PyObject* value) { language_.slots.set(frame.ptr(), which, value); };
    set(kKind, PyLong_FromLong(head.kind));
    set(kEpoch, PyLong_FromLongLong(head.epoch));
    set(kRequest, PyLong_FromLongLong(head.request));
    set(kWorker, PyLong_FromLongLong(head.worker));
    set(kSequence, PyLong_FromLongLong(head.sequence));
    set(kClock, PyLong_FromLongLong(head.clock));
    set(kWeight, PyFloat_FromDouble(head.weight));
    set(kNumbers, numbers.release().ptr());
    set(kText, py::object(said).release().ptr());
    set(kTensors, PyTuple_New(0));
    return frame;
  }

  py::object numbers_of(const char* bytes, size_t count) const {
    if (count == 0) {
      return language_.no_numbers;
    }
    const auto kept = py::reinterpret_steal<py::object>(
        PyByteArray_FromStringAndSize(bytes, static_cast<Py_ssize_t>(8 * count)));
    if (!kept) {
      throw py::error_already_set();
    }
    PyObject* arguments[] = {kept.ptr(), language_.number.ptr()};
    auto made = py::reinterpret_steal<py::object>(
        PyObject_Vectorcall(language_.array.ptr(), static_cast<PyObject**>(arguments), 2, nullptr));
    if (!made) {
      throw py::error_already_set();
    }
    return made;
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

  // there: of each tensor the bytes that lie at the beginning of this memory, one after the other.
  py::object own(const std::vector<size_t>& there) {
    const std::vector<at::Tensor> tensors = kept();
    size_t from = std::accumulate(there.begin(), there.end(), size_t{0});
    for (size_t i = tensors.size(); i-- > 0;) {  // from behind: nothing is written over that is still to be moved
      from -= there[i];
      if (there[i] > 0 && tensors[i].mutable_data_ptr() != memory_.begin() + from) {
        std::memmove(tensors[i].mutable_data_ptr(), memory_.begin() + from, there[i]);
      }
    }
    py::list all(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      pieces_in_.add_rest(metas_[i].bytes > 0 ? tensors[i].mutable_data_ptr() : nullptr, metas_[i].bytes, there[i]);
      PyList_SET_ITEM(all.ptr(), static_cast<Py_ssize_t>(i), THPVariable_Wrap(tensors[i]));
    }
    return all;
  }

  // Places of the receiver, if they are right. there: see `own`.
  py::object theirs(const py::object& given, const std::vector<size_t>& there) {
    const auto places = py::reinterpret_steal<py::object>(PySequence_List(given.ptr()));
    if (!places) {
      throw py::error_already_set();
    }
    bool fits = py::len(places) == metas_.size();
    size_t from = 0;
    for (size_t i = 0; fits && i < metas_.size(); ++i) {
      PyObject* item = PyList_GET_ITEM(places.ptr(), i);
      fits = THPVariable_Check(item);
      if (fits) {
        const at::Tensor& tensor = THPVariable_Unpack(item);
        fits = is_plain(tensor) && tensor.scalar_type() == metas_[i].type && tensor.nbytes() == metas_[i].bytes;
        if (fits) {
          if (there[i] > 0) {
            std::memcpy(tensor.data_ptr(), memory_.begin() + from, there[i]);
            from += there[i];
          }
          pieces_in_.add_rest(metas_[i].bytes > 0 ? tensor.data_ptr() : nullptr, metas_[i].bytes, there[i]);
        }
      }
    }
    if (!fits) {
      language_.fitting(given, described());
      throw py::value_error("places are not right, and `memory` says that they are");
    }
    return places;
  }

  void fill() {
    while (pieces_in_.left() > 0 && filled_ > begin_) {
      const iovec piece = *pieces_in_.begin();
      const size_t part = std::min(piece.iov_len, filled_ - begin_);
      std::memcpy(piece.iov_base, buffer_.data() + begin_, part);
      begin_ += part;
      pieces_in_.done(part);
    }
    if (!receive_all(file_, pieces_in_, parts_)) {
      lost();
    }
  }

  void close_files() {
    for (const int file : files_) {
      ::close(file);
    }
  }

  const Language& language_;
  int file_;
  size_t ahead_;
  uint64_t most_bytes_;
  int64_t bytes_ = 0;
  std::vector<char> buffer_;
  size_t begin_ = 0;
  size_t filled_ = 0;
  size_t guess_ = sizeof(Head);  // bytes of a frame before its tensors
  size_t spilled_ = 0;  // bytes in the memory for tensors that follow those in the buffer
  std::vector<Meta> metas_;
  Memory memory_;
  Pieces pieces_in_;
  Habit habit_;
  Patience patience_;  // for the next frame
  Patience parts_;  // for the rest of one
  std::vector<int> files_;
};

}  // namespace paceline::wire
