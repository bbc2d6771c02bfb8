// Several tables in one call: a message has keys of many shards, and to come from Python for each costs more than rows do.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "arrays.hpp"
#include "route.hpp"
#include "rows.hpp"

namespace paceline {

using Bounds = std::vector<int64_t>;

// Keys `bounds[i]` to `bounds[i + 1]` are of the i-th.
inline void check_bounds(const Bounds& bounds, size_t several, const Keys& keys) {
  check(bounds.size() == several + 1 && bounds.front() >= 0 && bounds.back() <= keys.size(), "bounds do not fit");
  for (size_t i = 0; i < several; ++i) {
    check(bounds[i] <= bounds[i + 1], "bounds do not rise");
  }
}

// Returns the place of the first key that is of another shard than its part says; -1: there is none.
inline int64_t stray_of_several(
    const Keys& keys, const Bounds& bounds, const std::vector<uint64_t>& numbers, uint64_t shards) {
  check(keys.ndim() == 1, "keys have one dimension");
  check_bounds(bounds, numbers.size(), keys);
  const Released released(static_cast<size_t>(keys.size()));
  for (size_t i = 0; i < numbers.size(); ++i) {
    const int64_t at = stray(keys.data() + bounds[i], bounds[i + 1] - bounds[i], numbers[i], shards);
    if (at >= 0) {
      return bounds[i] + at;
    }
  }
  return -1;
}

// Calls `use` with each table, the place of its first key and how many it has.
template <typename T, typename Use>
void each_of_several(
    const std::vector<Rows<T>*>& tables, const Bounds& bounds, const Keys& keys, const Array<T>& values, Use&& use) {
  check_bounds(bounds, tables.size(), keys);
  for (const Rows<T>* table : tables) {
    check(table != nullptr, "there is no table");
    check_rows(keys, values, table->width());
  }
  const Released released(static_cast<size_t>(values.size()));
  for (size_t i = 0; i < tables.size(); ++i) {
    use(*tables[i], bounds[i], bounds[i + 1] - bounds[i]);
  }
}

template <typename T>
void bind_several(pybind11::module_& m) {
  namespace py = pybind11;
  m.def(
      "update_several",
      [](const std::vector<Rows<T>*>& tables, const Bounds& bounds, const Keys& keys, const Array<T>& gradients) {
        const T* from = gradients.data();
        each_of_several<T>(tables, bounds, keys, gradients, [&](Rows<T>& table, int64_t begin, int64_t count) {
          table.update(keys.data() + begin, count, from + begin * table.width());
        });
      },
      py::arg("tables"),
      py::arg("bounds"),
      py::arg("keys").noconvert(),
      py::arg("gradients").noconvert());
  m.def(
      "read_several",
      [](const std::vector<Rows<T>*>& tables, const Bounds& bounds, const Keys& keys, Array<T>& out) {
        T* to = out.mutable_data();
        each_of_several<T>(tables, bounds, keys, out, [&](const Rows<T>& table, int64_t begin, int64_t count) {
          table.read(keys.data() + begin, count, to + begin * table.width());
        });
      },
      py::arg("tables"),
      py::arg("bounds"),
      py::arg("keys").noconvert(),
      py::arg("out").noconvert());
}

}  // namespace paceline
