// What Python sees of frames in native code.
#include "wire.hpp"

#include <pybind11/stl.h>

namespace py = pybind11;

namespace {

using paceline::wire::Language;
using paceline::wire::Raised;
using paceline::wire::Slots;
using paceline::wire::Users;
using paceline::wire::Wire;

// Sets the error of the interpreter that an exception stands for.
void set_error() {
  try {
    throw;
  } catch (const Raised&) {
    // It is set already.
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

constexpr const char* kCapsule = "paceline.wire";
using Owned = std::shared_ptr<Wire>;

Wire& wire_of(PyObject* self) {
  return **static_cast<Owned*>(PyCapsule_GetPointer(self, kCapsule));
}

PyObject* send(PyObject* self, PyObject* frame) {
  try {
    return py::bool_(wire_of(self).send(frame)).release().ptr();
  } catch (...) {
    set_error();
    return nullptr;
  }
}

PyObject* receive(PyObject* self, PyObject* place) {
  try {
    return wire_of(self).receive(place).release().ptr();
  } catch (...) {
    set_error();
    return nullptr;
  }
}

PyMethodDef kSend = {"send", send, METH_O, "Send a frame."};
PyMethodDef kReceive = {"receive", receive, METH_O, "Wait for a frame."};

// A function of the interpreter that keeps the wire: called at every message, with as little between as can be.
py::object function(PyMethodDef& method, const Owned& wire) {
  const py::capsule self(new Owned(wire), kCapsule, [](PyObject* capsule) {
    delete static_cast<Owned*>(PyCapsule_GetPointer(capsule, kCapsule));
  });
  return py::reinterpret_steal<py::object>(PyCFunction_NewEx(&method, self.ptr(), nullptr));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::class_<Language>(m, "Language")
      .def(
          py::init([](py::object frame,
                      py::object meta,
                      py::object head,
                      py::object announced,
                      py::object fitting,
                      py::object full,
                      py::object lost,
                      py::object array,
                      py::object number,
                      py::object no_numbers,
                      py::tuple types) {
            if (types.size() != paceline::wire::kTypeCount) {
              throw py::value_error("there are more or fewer types");
            }
            return Language{
                frame, meta, head, announced, fitting, full, lost, array, number, no_numbers, types, Slots(frame)};
          }),
          py::kw_only(),
          py::arg("frame"),
          py::arg("meta"),
          py::arg("head"),
          py::arg("announced"),
          py::arg("fitting"),
          py::arg("full"),
          py::arg("lost"),
          py::arg("array"),
          py::arg("number"),
          py::arg("no_numbers"),
          py::arg("types"));
  py::class_<Users, std::shared_ptr<Users>>(m, "Users")
      .def(py::init<>())
      .def("enter", &Users::enter)
      .def("leave", &Users::leave)
      .def("end", &Users::end);
  py::class_<Wire, Owned>(m, "Wire")
      .def(py::init<const Language&, std::shared_ptr<Users>, py::object, py::str, py::object, size_t, uint64_t>())
      .def_property_readonly("send", [](const Owned& wire) { return function(kSend, wire); })
      .def_property_readonly("receive", [](const Owned& wire) { return function(kReceive, wire); })
      .def_property_readonly("sent_bytes", &Wire::sent_bytes)
      .def_property_readonly("received_bytes", &Wire::received_bytes)
      .def("files", &Wire::files);
}
