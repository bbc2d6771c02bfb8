// Rows in memory that is not ours, and that other processes write to meanwhile (`exchange/hogwild/rows.py`).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "keys.hpp"
#include "rows.hpp"
#include "rules.hpp"

namespace paceline {

// Writes the row of each key, -1 where there is none. A slot of the index has its row and 1, or 0.
inline void find_shared(
    const int32_t* index, size_t slots, const int64_t* held, const int64_t* keys, size_t count, int64_t* rows) {
  const size_t mask = slots - 1;
  for (size_t i = 0; i < count; ++i) {
    size_t slot = mixed(static_cast<uint64_t>(keys[i])) & mask;
    for (;; slot = (slot + 1) & mask) {
      // What was written before a row got its slot is to be seen by who finds it there.
      const int32_t taken = std::atomic_ref(const_cast<int32_t&>(index[slot])).load(std::memory_order_acquire);
      if (taken == 0) {
        rows[i] = -1;
        break;
      }
      if (held[taken - 1] == keys[i]) {
        rows[i] = taken - 1;
        break;
      }
    }
  }
}

// Updates rows where they lie, one after the other: what others do to a row is lost while it is its turn only.
template <typename T>
void update_shared(
    const std::string& name,
    const Constants& constants,
    const int64_t* rows,
    size_t count,
    const T* gradients,
    const std::vector<Column<T>>& columns,
    const Steps& steps) {
  with_rule<T>(name, constants, [&](const auto& rule) {
    if (columns.size() != 1 + rule.kElements + rule.kRows) {
      throw std::invalid_argument("the columns are of another rule");
    }
    with_width(columns[0].width, [&](auto width) {
      const auto at = [&](size_t column, int64_t row) {
        return column < columns.size() ? columns[column].data + row * columns[column].width : nullptr;
      };
      for (size_t i = 0; i < count; ++i) {
        const Row<T> row = {
            at(0, rows[i]),
            gradients + i * width,
            rule.kElements > 0 ? at(1, rows[i]) : nullptr,
            rule.kElements > 1 ? at(2, rows[i]) : nullptr,
            rule.kRows > 0 ? at(1 + rule.kElements, rows[i]) : nullptr};
        rule.move(row, width, steps);
      }
    });
  });
}

}  // namespace paceline
