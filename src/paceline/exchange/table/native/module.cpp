// What Python sees of tables: arrays go in and out, and the interpreter is not held meanwhile.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "arrays.hpp"
#include "route.hpp"
#include "rows.hpp"
#include "several.hpp"
#include "shared.hpp"

namespace py = pybind11;

namespace {

using paceline::Array;
using paceline::Arrays;
using paceline::Beginning;
using paceline::check;
using paceline::check_rows;
using paceline::Column;
using paceline::Keys;
using paceline::Released;
using paceline::Rows;
using paceline::Steps;

// T: const where the columns are read only.
template <typename T, typename Data>
std::vector<Column<T>> columns_of(const Keys& keys, size_t record, Data& arrays) {
  std::vector<Column<T>> columns;
  size_t width = 0;
  for (auto& array : arrays) {
    check(array.ndim() == 2 && array.shape(0) == keys.shape(0), "keys and columns do not fit");
    const auto wide = static_cast<size_t>(array.shape(1));
    if constexpr (std::is_const_v<T>) {
      columns.push_back({array.data(), wide});
    } else {
      columns.push_back({array.mutable_data(), wide});
    }
    width += wide;
  }
  check(width == record, "columns are not those of a row");
  return columns;
}

template <typename T>
void bind_rows(py::module_& m, const char* name) {
  using Table = Rows<T>;
  py::class_<Table>(m, name)
      .def(py::init([](size_t width,
                       const std::string& rule,
                       const paceline::Constants& constants,
                       int distribution,
                       double scale,
                       uint64_t salt) {
        return Table(width, rule, constants, Beginning{distribution, scale, salt});
      }))
      .def("__len__", &Table::size)
      .def_property_readonly("memory_bytes", &Table::bytes)
      .def("set_tables", &Table::set_tables)
      .def(
          "set_rule",
          [](Table& table, const py::object& rule) {
            table.set_constants(rule.attr("constants")().cast<paceline::Constants>());
          })
      .def(
          "read",
          [](const Table& table, const Keys& keys, Array<T>& out) {
            check_rows(keys, out, table.width());
            T* data = out.mutable_data();
            const Released released(static_cast<size_t>(out.size()));
            return table.read(keys.data(), keys.size(), data);
          },
          py::arg("keys").noconvert(),
          py::arg("out").noconvert())
      .def(
          "update",
          [](Table& table, const Keys& keys, const Array<T>& gradients) {
            check_rows(keys, gradients, table.width());
            const Released released(static_cast<size_t>(gradients.size()));
            table.update(keys.data(), keys.size(), gradients.data());
          },
          py::arg("keys").noconvert(),
          py::arg("gradients").noconvert())
      .def(
          "add",
          [](Table& table, const Keys& keys, const Array<T>& differences) {
            check_rows(keys, differences, table.width());
            const Released released(static_cast<size_t>(differences.size()));
            table.add(keys.data(), keys.size(), differences.data());
          },
          py::arg("keys").noconvert(),
          py::arg("differences").noconvert())
      .def(
          "put",
          [](Table& table, const Keys& keys, const Arrays<T>& arrays) {
            const auto columns = columns_of<const T>(keys, table.record(), arrays);
            py::gil_scoped_release release;
            table.put(keys.data(), keys.size(), columns);
          },
          py::arg("keys").noconvert(),
          py::arg("columns").noconvert())
      .def("count", &Table::count)
      .def(
          "copy",
          [](const Table& table, bool touched, Keys& keys, Arrays<T>& arrays) {
            check(static_cast<size_t>(keys.size()) == table.count(touched), "there are more or fewer rows");
            const auto columns = columns_of<T>(keys, table.record(), arrays);
            int64_t* to = keys.mutable_data();
            py::gil_scoped_release release;
            table.copy(touched, to, columns);
          },
          py::arg("touched"),
          py::arg("keys").noconvert(),
          py::arg("columns").noconvert())
      .def("clear_touched", &Table::clear_touched);
}

template <typename T>
void update_dense(
    const std::string& name,
    const paceline::Constants& constants,
    Array<T>& values,
    const Array<T>& gradient,
    Arrays<T>& elements,
    Arrays<T>& rows,
    const Arrays<double>& tables) {
  const auto width = static_cast<size_t>(values.size());
  check(static_cast<size_t>(gradient.size()) == width, "values and gradient do not fit");
  for (const auto& state : elements) {
    check(static_cast<size_t>(state.size()) == width, "values and state do not fit");
  }
  for (const auto& state : rows) {
    check(state.size() == 1, "a range has one number of row state");
  }
  const paceline::Row<T> row = {
      values.mutable_data(),
      gradient.data(),
      elements.size() > 0 ? elements[0].mutable_data() : nullptr,
      elements.size() > 1 ? elements[1].mutable_data() : nullptr,
      rows.size() > 0 ? rows[0].mutable_data() : nullptr};
  Steps steps;
  if (tables.size() == 2) {
    steps = {tables[0].data(), tables[1].data(), static_cast<size_t>(tables[0].size())};
  }
  py::gil_scoped_release release;
  paceline::with_rule<T>(name, constants, [&](const auto& rule) {
    check(elements.size() == rule.kElements && rows.size() == rule.kRows, "the state is of another rule");
    rule.move(row, width, steps);
  });
}

template <typename T>
void update_shared(
    const std::string& name,
    const paceline::Constants& constants,
    const Keys& rows,
    const Array<T>& gradients,
    Arrays<T>& arrays,
    const Arrays<double>& tables) {
  check(!arrays.empty(), "there are no columns");
  std::vector<Column<T>> columns;
  for (auto& array : arrays) {
    check(array.ndim() == 2 && array.shape(0) == arrays[0].shape(0), "columns are of several lengths");
    columns.push_back({array.mutable_data(), static_cast<size_t>(array.shape(1))});
  }
  check_rows(rows, gradients, columns[0].width);
  for (py::ssize_t i = 0; i < rows.size(); ++i) {
    check(rows.data()[i] >= 0 && rows.data()[i] < arrays[0].shape(0), "there is no such row");
  }
  Steps steps;
  if (tables.size() == 2) {
    steps = {tables[0].data(), tables[1].data(), static_cast<size_t>(tables[0].size())};
  }
  py::gil_scoped_release release;
  paceline::update_shared(name, constants, rows.data(), rows.size(), gradients.data(), columns, steps);
}

template <typename T>
void bind_type(py::module_& m, const char* rows) {
  bind_rows<T>(m, rows);
  paceline::bind_several<T>(m);
  m.def(
      "update_dense",
      &update_dense<T>,
      py::arg("rule"),
      py::arg("constants"),
      py::arg("values").noconvert(),
      py::arg("gradient").noconvert(),
      py::arg("elements").noconvert(),
      py::arg("rows").noconvert(),
      py::arg("tables").noconvert());
  m.def(
      "update_shared",
      &update_shared<T>,
      py::arg("rule"),
      py::arg("constants"),
      py::arg("rows").noconvert(),
      py::arg("gradients").noconvert(),
      py::arg("columns").noconvert(),
      py::arg("tables").noconvert());
  m.def(
      "sum_rows",
      [](const Array<T>& rows, const Keys& places, Array<T>& sums) {
        check(rows.ndim() == 2 && sums.ndim() == 2 && rows.shape(1) == sums.shape(1), "rows and sums do not fit");
        check(places.size() == rows.shape(0), "rows and places do not fit");
        T* out = sums.mutable_data();
        const auto unique = sums.shape(0);
        py::gil_scoped_release release;
        for (py::ssize_t i = 0; i < places.size(); ++i) {
          check(places.data()[i] >= 0 && places.data()[i] < unique, "a place is not among the sums");
        }
        paceline::sum_rows(rows.data(), places.data(), places.size(), rows.shape(1), out);
      },
      py::arg("rows").noconvert(),
      py::arg("places").noconvert(),
      py::arg("sums").noconvert());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  bind_type<float>(m, "RowsFloat32");
  bind_type<double>(m, "RowsFloat64");
  m.def(
      "route",
      [](const Keys& keys, Keys& order, Keys& offsets) {
        check(order.size() == keys.size() && offsets.size() > 1, "keys and order do not fit");
        int64_t* to = order.mutable_data();
        int64_t* at = offsets.mutable_data();
        const Released released(static_cast<size_t>(keys.size()));
        paceline::route(keys.data(), keys.size(), offsets.size() - 1, to, at);
      },
      py::arg("keys").noconvert(),
      py::arg("order").noconvert(),
      py::arg("offsets").noconvert());
  m.def(
      "find_shared",
      [](const Array<int32_t>& index, const Keys& held, const Keys& keys, Keys& rows) {
        const auto slots = static_cast<size_t>(index.size());
        check(std::has_single_bit(slots), "an index has a power of two of slots");
        check(rows.size() == keys.size(), "keys and rows do not fit");
        int64_t* to = rows.mutable_data();
        py::gil_scoped_release release;
        paceline::find_shared(index.data(), slots, held.data(), keys.data(), keys.size(), to);
      },
      py::arg("index").noconvert(),
      py::arg("held").noconvert(),
      py::arg("keys").noconvert(),
      py::arg("rows").noconvert());
  m.def(
      "stray",
      [](const Keys& keys, uint64_t shard, uint64_t shards) {
        const Released released(static_cast<size_t>(keys.size()));
        return paceline::stray(keys.data(), keys.size(), shard, shards);
      },
      py::arg("keys").noconvert(),
      py::arg("shard"),
      py::arg("shards"));
  m.def(
      "stray_of_several",
      &paceline::stray_of_several,
      py::arg("keys").noconvert(),
      py::arg("bounds"),
      py::arg("numbers"),
      py::arg("shards"));
  m.def(
      "unique",
      [](const Keys& keys, Keys& places) {
        check(places.size() == keys.size(), "keys and places do not fit");
        int64_t* to = places.mutable_data();
        std::vector<int64_t> found;
        {
          py::gil_scoped_release release;
          found = paceline::unique(keys.data(), keys.size(), to);
        }
        Keys result(static_cast<py::ssize_t>(found.size()));
        std::copy(found.begin(), found.end(), result.mutable_data());
        return result;
      },
      py::arg("keys").noconvert(),
      py::arg("places").noconvert());
}
