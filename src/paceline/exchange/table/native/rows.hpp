// Rows by key, with what their rule keeps. A record has all of a row: values, element state, row state.
//
// Memory is far: keys are taken in blocks, and what a block needs is asked for before it is used.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "index.hpp"
#include "initial.hpp"
#include "rules.hpp"
#include "slabs.hpp"

namespace paceline {

// What is kept of a row, apart: values, element state, row state.
template <typename T>
struct Column {
  T* data;
  size_t width;
};

// Calls `use` with a width: one that is frequent is known to the compiler.
template <typename Use>
void with_width(size_t width, Use&& use) {
  switch (width) {
    case 1:
      return use(std::integral_constant<size_t, 1>());
    case 8:
      return use(std::integral_constant<size_t, 8>());
    case 16:
      return use(std::integral_constant<size_t, 16>());
    case 32:
      return use(std::integral_constant<size_t, 32>());
    default:
      return use(width);
  }
}

template <typename T>
class Rows {
 public:
  Rows(size_t width, std::string rule, Constants constants, Beginning beginning)
      : width_(width),
        rule_(std::move(rule)),
        constants_(std::move(constants)),
        beginning_(beginning),
        size_(with_rule<T>(
            rule_,
            constants_,
            [width](auto rule) { return width * (1 + rule.kElements) + rule.kRows; })),
        records_(size_),
        keys_(1) {}

  size_t size() const { return index_.size(); }
  size_t width() const { return width_; }
  size_t record() const { return size_; }

  size_t bytes() const {
    return index_.bytes() + size() * (size_ * sizeof(T) + sizeof(int64_t)) + touched_.size() * sizeof(uint64_t);
  }

  // Of the same rule, at another rate.
  void set_constants(Constants constants) { constants_ = std::move(constants); }

  void set_tables(std::vector<std::vector<double>> tables) { tables_ = std::move(tables); }

  size_t read(const int64_t* keys, size_t count, T* out) const {
    size_t missing = 0;
    with_width(width_, [&](auto width) {
      std::array<uint64_t, kBlock> hashes;
      std::array<const T*, kBlock> records;
      for (size_t begin = 0; begin < count; begin += kBlock) {
        const size_t size = std::min(kBlock, count - begin);
        hash(keys + begin, size, hashes);
        for (size_t i = 0; i < size; ++i) {
          const int64_t row = index_.find(keys[begin + i], hashes[i]);
          records[i] = row == Index::kNone ? nullptr : records_[row];
          prefetch(records[i], records[i] == nullptr ? 0 : width_);
        }
        for (size_t i = 0; i < size; ++i) {
          T* target = out + (begin + i) * width;
          if (records[i] == nullptr) {
            beginning_.fill(keys[begin + i], target, width);
            ++missing;
          } else {
            std::memcpy(target, records[i], width * sizeof(T));
          }
        }
      }
    });
    return missing;
  }

  void update(const int64_t* keys, size_t count, const T* gradients) {
    Steps steps;
    if (tables_.size() == 2) {
      steps = {tables_[0].data(), tables_[1].data(), tables_[0].size()};
    }
    with_rule<T>(rule_, constants_, [&](const auto& rule) {
      with_width(width_, [&](auto width) {
        each(keys, count, rule, [&](size_t at, T* record) {
          rule.move(parts(rule, record, gradients + at * width, width), width, steps);
        });
      });
    });
  }

  void add(const int64_t* keys, size_t count, const T* differences) {
    with_rule<T>(rule_, constants_, [&](const auto& rule) {
      each(keys, count, rule, [&](size_t at, T* record) {
        for (size_t i = 0; i < width_; ++i) {
          record[i] += differences[at * width_ + i];
        }
      });
    });
  }

  void put(const int64_t* keys, size_t count, const std::vector<Column<const T>>& columns) {
    with_rule<T>(rule_, constants_, [&](const auto& rule) {
      each(keys, count, rule, [&](size_t at, T* record) {
        for (const auto& column : columns) {
          record = std::copy_n(column.data + at * column.width, column.width, record);
        }
      });
    });
  }

  size_t count(bool touched) const {
    if (!touched) {
      return size();
    }
    size_t total = 0;
    for (const uint64_t marks : touched_) {
      total += std::popcount(marks);
    }
    return total;
  }

  // Columns and keys have room for `count(touched)`.
  void copy(bool touched, int64_t* keys, const std::vector<Column<T>>& columns) const {
    size_t at = 0;
    for (size_t row = 0; row < size(); ++row) {
      if (touched && (touched_[row / 64] >> (row % 64) & 1) == 0) {
        continue;
      }
      keys[at] = *keys_[row];
      const T* record = records_[row];
      for (const auto& column : columns) {
        std::copy_n(record, column.width, column.data + at * column.width);
        record += column.width;
      }
      ++at;
    }
  }

  void clear_touched() { std::fill(touched_.begin(), touched_.end(), 0); }

 private:
  static constexpr size_t kBlock = 64;
  static constexpr uintptr_t kLine = 64;  // bytes

  void hash(const int64_t* keys, size_t count, std::array<uint64_t, kBlock>& hashes) const {
    for (size_t i = 0; i < count; ++i) {
      hashes[i] = mixed(static_cast<uint64_t>(keys[i]));
      index_.prefetch(hashes[i]);
    }
  }

  static void prefetch(const T* record, size_t count) {
    const auto begin = reinterpret_cast<uintptr_t>(record) & ~(kLine - 1);
    const auto end = reinterpret_cast<uintptr_t>(record + count);
    for (uintptr_t line = begin; line < end; line += kLine) {
      __builtin_prefetch(reinterpret_cast<const void*>(line));
    }
  }

  template <typename Rule, typename Width>
  static Row<T> parts(const Rule&, T* record, const T* gradient, Width width) {
    return {
        record,
        gradient,
        Rule::kElements > 0 ? record + width : nullptr,
        Rule::kElements > 1 ? record + 2 * width : nullptr,
        Rule::kRows > 0 ? record + (1 + Rule::kElements) * width : nullptr};
  }

  // Calls `use` with the place of each key and its record, which is made where there is none, and marks it.
  template <typename Rule, typename Use>
  void each(const int64_t* keys, size_t count, const Rule& rule, Use&& use) {
    std::array<uint64_t, kBlock> hashes;
    std::array<T*, kBlock> records;
    for (size_t begin = 0; begin < count; begin += kBlock) {
      const size_t size = std::min(kBlock, count - begin);
      reserve(size);
      hash(keys + begin, size, hashes);
      for (size_t i = 0; i < size; ++i) {
        const int64_t key = keys[begin + i];
        bool added = false;
        const int64_t row = index_.find_or_add(key, hashes[i], added);
        records[i] = records_[row];
        touched_[row / 64] |= uint64_t{1} << (row % 64);
        if (added) {
          *keys_[row] = key;
          beginning_.fill(key, records[i], width_);
          rule.start(parts(rule, records[i], nullptr, width_), width_);
        } else {
          prefetch(records[i], size_);
        }
      }
      for (size_t i = 0; i < size; ++i) {
        use(begin + i, records[i]);
      }
    }
  }

  void reserve(size_t more) {
    index_.reserve(more);
    const size_t rows = size() + more;
    records_.reserve(rows);
    keys_.reserve(rows);
    if (touched_.size() * 64 < rows) {
      touched_.resize((rows + 63) / 64);
    }
  }

  size_t width_;
  std::string rule_;
  Constants constants_;
  Beginning beginning_;
  size_t size_;  // elements of a record
  Index index_;
  Slabs<T> records_;
  Slabs<int64_t> keys_;
  std::vector<uint64_t> touched_;
  std::vector<std::vector<double>> tables_;
};

}  // namespace paceline
