// What Python sees of frames in native code.
#include "wire.hpp"

namespace py = pybind11;

namespace {

using paceline::wire::Language;
using paceline::wire::Raised;
using paceline::wire::Wire;

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) {
        std::rethrow_exception(error);
      }
    } catch (const Raised&) {
      // It is set already.
    }
  });
  py::class_<Language>(m, "Language")
      .def(
          py::init([](py::object frame,
                      py::object meta,
                      py::object head,
                      py::object announced,
                      py::object fitting,
                      py::object full,
                      py::object lost,
                      py::object numbers,
                      py::tuple types) {
            if (types.size() != paceline::wire::kTypeCount) {
              throw py::value_error("there are more or fewer types");
            }
            return Language{frame, meta, head, announced, fitting, full, lost, numbers, types};
          }),
          py::kw_only(),
          py::arg("frame"),
          py::arg("meta"),
          py::arg("head"),
          py::arg("announced"),
          py::arg("fitting"),
          py::arg("full"),
          py::arg("lost"),
          py::arg("numbers"),
          py::arg("types"));
  py::class_<Wire>(m, "Wire")
      .def(py::init<const Language&, size_t>())
      .def(
          "send",
          [](Wire& wire, int socket, py::handle frame, uint64_t most) { return wire.send(socket, frame.ptr(), most); })
      .def(
          "receive",
          [](Wire& wire, int socket, py::handle place, uint64_t most) {
            return wire.receive(socket, place.ptr(), most);
          })
      .def("files", &Wire::files);
}
