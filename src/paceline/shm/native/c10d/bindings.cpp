// What Python sees of the shared memory of one host.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "group.hpp"
#include "hierarchy.hpp"
#include "layout.hpp"
#include "../core/memory.hpp"
#include "started.hpp"

namespace py = pybind11;

namespace {

using paceline::Arena;
using paceline::Group;
using paceline::Peer;

// (window, arena, pidfd, pid, global rank), of which the first three are file descriptors that the group closes.
using PeerTuple = std::tuple<int, int, int, pid_t, int64_t>;

c10::intrusive_ptr<c10d::Backend> create_group(
    int rank,
    const std::vector<PeerTuple>& tuples,
    std::shared_ptr<Arena> arena,
    const std::chrono::milliseconds& timeout) {
  std::vector<Peer> peers;
  for (const auto& [window, arena_fd, process, pid, global_rank] : tuples) {
    peers.push_back({window, arena_fd, process, pid, global_rank});
  }
  return c10::make_intrusive<Group>(rank, std::move(peers), std::move(arena), timeout);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::class_<Arena, std::shared_ptr<Arena>>(m, "Arena")
      .def(py::init<int, size_t>(), py::arg("fd"), py::arg("bytes"));
  m.def("window_bytes", &paceline::Window::bytes, py::arg("size"));
  m.def(
      "create_group",
      &create_group,
      py::arg("rank"),
      py::arg("peers"),
      py::arg("arena"),
      py::arg("timeout"));
  m.def(
      "barrier",
      [](const c10::intrusive_ptr<c10d::Backend>& group) {
        c10d::BarrierOptions options;
        options.asyncOp = false;
        group->barrier(options)->wait();
      },
      py::arg("group"),
      py::call_guard<py::gil_scoped_release>());
  paceline::bind_hierarchy(m);
  paceline::bind_started(m);
}
