// Arrays of Python, and what is done with all of them.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace paceline {

template <typename T>
using Array = pybind11::array_t<T, pybind11::array::c_style>;
using Keys = Array<int64_t>;
template <typename T>
using Arrays = std::vector<Array<T>>;

// Gives up the interpreter where the work takes longer than to have it back from another thread, which may keep it for
// milliseconds.
class Released {
 public:
  explicit Released(size_t elements) {
    if (elements > kMost) {
      released_.emplace();
    }
  }

 private:
  static constexpr size_t kMost = 32 << 10;
  std::optional<pybind11::gil_scoped_release> released_;
};

inline void check(bool right, const char* what) {
  if (!right) {
    throw pybind11::value_error(what);
  }
}

template <typename T>
void check_rows(const Keys& keys, const Array<T>& values, size_t width) {
  check(
      keys.ndim() == 1 && values.ndim() == 2 && values.shape(0) == keys.shape(0) &&
          static_cast<size_t>(values.shape(1)) == width,
      "keys and values do not fit");
}

}  // namespace paceline
