#include "started.hpp"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "layout.hpp"

namespace paceline {

namespace {

constexpr size_t kArenaBytes = 64 << 10;  // smaller results come from the usual allocator

at::Tensor make(Arena& arena, at::IntArrayRef shape, const at::Tensor& like) {
  const size_t bytes = c10::multiply_integers(shape) * like.element_size();
  return bytes < kArenaBytes ? at::empty(shape, like.options()) : empty(arena, shape, like.scalar_type());
}

at::Tensor into_arena(Arena& arena, const at::Tensor& x) {
  if (is_plain(x) && arena.offset(x.data_ptr(), x.nbytes())) {
    return x;
  }
  const at::Tensor copy = empty(arena, x.sizes(), x.scalar_type());
  copy.copy_(x);
  return copy;
}

c10::intrusive_ptr<Group> group_of(const c10::intrusive_ptr<c10d::Backend>& backend) {
  auto group = c10::dynamic_intrusive_pointer_cast<Group>(backend);
  TORCH_CHECK_TYPE(group != nullptr, "not a group of ranks of one host");
  return group;
}

// A tensor that all ranks of a group use, in the arena of the first one, and where it lies there.
std::pair<at::Tensor, uint64_t> make_common(
    const c10::intrusive_ptr<c10d::Backend>& backend, int64_t size, at::ScalarType dtype) {
  const auto group = group_of(backend);
  const size_t bytes = size * c10::elementSize(dtype);
  const auto memory = group->arena().allocate_for_all(bytes, group->getSize());
  const auto tensor = at::from_blob(memory.get(), {size}, [memory](void*) {}, at::TensorOptions().dtype(dtype));
  return {tensor, *group->arena().offset(memory.get(), bytes)};
}

// The same tensor on another rank.
at::Tensor open_common(
    const c10::intrusive_ptr<c10d::Backend>& backend, uint64_t offset, int64_t size, at::ScalarType dtype) {
  const auto mapping = group_of(backend)->members().hold_arena_of(0);
  TORCH_CHECK(mapping->contains(mapping->data() + offset, size * c10::elementSize(dtype)));
  const auto release = [mapping](void* data) { let_go(data); };
  return at::from_blob(mapping->data() + offset, {size}, release, at::TensorOptions().dtype(dtype));
}

bool is_common(const c10::intrusive_ptr<c10d::Backend>& backend, const at::Tensor& tensor) {
  const auto group = group_of(backend);
  const void* data = tensor.storage().data();
  // Nothing but such tensors is ever opened in another rank's arena.
  return group->getRank() == 0 ? group->arena().is_for_all(data) : group->members().hold_arena_of(0)->contains(data, 1);
}

}  // namespace

Started::Started(
    c10::intrusive_ptr<Group> group, Kind kind, const at::Tensor& x, bool in_place, const std::vector<int64_t>& rows)
    : group_(std::move(group)), kind_(kind), input_(into_arena(group_->arena(), x)), in_place_(in_place) {
  const auto keep = std::make_shared<at::Tensor>(input_);
  const Held held{std::shared_ptr<void>(keep, input_.data_ptr()), input_.nbytes()};
  std::vector<size_t> bytes;
  for (const int64_t row : rows) {
    bytes.push_back(row * input_.element_size());
    row_ += row;
  }
  TORCH_CHECK_VALUE(
      kind != Kind::kReduceScatter || row_ * group_->getSize() == input_.numel(),
      "shared memory: rows of ", row_, " elements for ", group_->getSize(), " ranks are not ", input_.numel());
  number_ = group_->exchange().start(kind, input_.scalar_type(), held, std::move(bytes), group_->timeout());
}

at::Tensor Started::wait() {
  const int64_t size = group_->getSize();
  at::Tensor out = input_;
  std::vector<int64_t> shape = input_.sizes().vec();
  if (kind_ == Kind::kAllGather) {
    shape.insert(shape.begin(), size);
  } else if (kind_ == Kind::kReduceScatter) {
    shape = {row_};
  }
  if (!in_place_) {
    out = make(group_->arena(), shape, input_);
  }
  group_->failing([&] { group_->exchange().finish(number_, bytes_of(out)); });
  input_ = at::Tensor();
  return out;
}

void bind_started(pybind11::module& module) {
  namespace py = pybind11;
  py::class_<Started>(module, "Started").def("wait", &Started::wait, py::call_guard<py::gil_scoped_release>());
  const auto bind = [&](const char* name, Kind kind, bool in_place) {
    module.def(
        name,
        [kind, in_place](const c10::intrusive_ptr<c10d::Backend>& backend, const at::Tensor& x) {
          return Started(group_of(backend), kind, x, in_place, {});
        },
        py::arg("backend"),
        py::arg("x"));
  };
  bind("all_reduce", Kind::kAllReduce, false);
  bind("all_reduce_in_place", Kind::kAllReduce, true);
  bind("all_gather", Kind::kAllGather, false);
  bind("all_to_all", Kind::kAllToAll, false);
  module.def(
      "reduce_scatter",
      [](const c10::intrusive_ptr<c10d::Backend>& backend, const at::Tensor& x, const std::vector<int64_t>& rows) {
        return Started(group_of(backend), Kind::kReduceScatter, x, false, rows);
      },
      py::arg("backend"),
      py::arg("x"),
      py::arg("rows"));
  module.def(
      "fence",
      [](const c10::intrusive_ptr<c10d::Backend>& backend) {
        const auto group = group_of(backend);
        group->failing([&] { group->exchange().fence(group->timeout()); });
      },
      py::arg("backend"),
      py::call_guard<py::gil_scoped_release>());
  module.def("make_common", &make_common, py::arg("backend"), py::arg("size"), py::arg("dtype"));
  module.def(
      "bytes_in_use",
      [](const c10::intrusive_ptr<c10d::Backend>& backend) { return group_of(backend)->arena().bytes_in_use(); },
      py::arg("backend"));
  module.def("is_common", &is_common, py::arg("backend"), py::arg("tensor"));
  module.def("open_common", &open_common, py::arg("backend"), py::arg("offset"), py::arg("size"), py::arg("dtype"));
  module.def(
      "empty",
      [](const c10::intrusive_ptr<c10d::Backend>& backend, int64_t size, at::ScalarType dtype) {
        return empty(group_of(backend)->arena(), {size}, dtype);
      },
      py::arg("backend"),
      py::arg("size"),
      py::arg("dtype"));
}

}  // namespace paceline
