// Frames of one connection: as `codec.py`, `sockets.py` and `memory.py` have them, in one call for each frame.
//
// Whatever is not usual is left to them: a tensor that must be copied first, a frame that is damaged, shared memory.
#pragma once

#include <Python.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <utility>
#include <vector>

#include "incoming.hpp"
#include "language.hpp"
#include "outgoing.hpp"
#include "socket.hpp"
#include "users.hpp"

namespace paceline::wire {

class Wire {
 public:
  // users, sock, name: see `guarded.Guarded`. sending: a lock of Python, held by who sends. ahead: bytes that may be
  // read before they are needed. most_bytes: of tensors that simply follow their head.
  Wire(
      const Language& language,
      std::shared_ptr<Users> users,
      const py::object& sock,
      const py::str& name,
      const py::object& sending,
      size_t ahead,
      uint64_t most_bytes)
      : language_(language),
        users_(std::move(users)),
        close_(sock.attr("close")),
        name_(name),
        acquire_(sending.attr("acquire")),
        release_(sending.attr("release")),
        incoming_(language_, sock.attr("fileno")().cast<int>(), ahead, most_bytes),
        outgoing_(language_, sock.attr("fileno")().cast<int>(), most_bytes) {}
  Wire(const Wire&) = delete;

  // Sends a frame; returns false where Python must look at it; nothing was sent then.
  bool send(PyObject* frame) {
    const Locked locked(*this);
    const Use use(*this);
    return outgoing_.send(frame);
  }

  // Waits for a frame. Returns it; or with it its segment, and metas, where the caller has to fetch the tensors: from a
  // segment, or because they have too many bytes. None: the peer has closed the connection.
  py::object receive(PyObject* place) {
    const Use use(*this);
    return incoming_.receive(place);
  }

  // Descriptors that came since they were taken last; they belong to the caller.
  std::vector<int> files() { return incoming_.files(); }

  int64_t sent_bytes() const { return outgoing_.bytes(); }
  int64_t received_bytes() const { return incoming_.bytes(); }

 private:
  // Calls without arguments at the end of a block, whatever error is set.
  static void call_at_last(const py::object& what) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Py_XDECREF(PyObject_CallNoArgs(what.ptr()));
    PyErr_Restore(type, value, trace);
  }

  class Locked {
   public:
    explicit Locked(const Wire& wire) : wire_(wire) {
      PyObject* taken = PyObject_CallNoArgs(wire_.acquire_.ptr());
      if (taken == nullptr) {
        throw Raised();
      }
      Py_DECREF(taken);
    }
    ~Locked() { call_at_last(wire_.release_); }
    Locked(const Locked&) = delete;

   private:
    const Wire& wire_;
  };

  class Use {
   public:
    explicit Use(Wire& wire) : wire_(wire) {
      if (!wire_.users_->enter()) {
        PyErr_Format(wire_.language_.lost.ptr(), "the connection to %U is closed.", wire_.name_.ptr());
        throw Raised();
      }
    }
    ~Use() {
      if (wire_.users_->leave()) {
        call_at_last(wire_.close_);
      }
    }
    Use(const Use&) = delete;

   private:
    Wire& wire_;
  };

  Language language_;
  std::shared_ptr<Users> users_;
  py::object close_;
  py::str name_;
  py::object acquire_, release_;
  Incoming incoming_;
  Outgoing outgoing_;
};

}  // namespace paceline::wire
