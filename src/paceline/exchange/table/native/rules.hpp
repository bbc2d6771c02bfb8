// Update rules, in the order of operations of `rules.py`; what they are and what they keep is told there.
//
// A rule works on a row: values, gradient, up to two arrays of element state, up to one number of row state.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

namespace paceline {

// Numbers by the step of a row.
struct Steps {
  const double* means = nullptr;
  const double* roots = nullptr;
  size_t count = 0;
};

template <typename T>
struct Row {
  T* __restrict values;
  const T* __restrict gradient;
  T* __restrict first;
  T* __restrict second;
  T* __restrict state;
};

using Constants = std::vector<double>;

template <typename T>
T decayed(T gradient, T value, T decay) {
  return decay != 0 ? gradient + decay * value : gradient;
}

template <typename T>
struct Sgd {
  static constexpr size_t kElements = 0, kRows = 0;
  T lr, decay;

  explicit Sgd(const Constants& c) : lr(c.at(0)), decay(c.at(1)) {}

  void start(const Row<T>&, size_t) const {}
  void move(const Row<T>& row, size_t width, const Steps&) const {
    for (size_t i = 0; i < width; ++i) {
      row.values[i] -= lr * decayed(row.gradient[i], row.values[i], decay);
    }
  }
};

template <typename T>
struct Momentum {
  static constexpr size_t kElements = 1, kRows = 0;
  T lr, decay, momentum;
  bool nesterov;

  explicit Momentum(const Constants& c) : lr(c.at(0)), decay(c.at(1)), momentum(c.at(2)), nesterov(c.at(3) != 0) {}

  void start(const Row<T>& row, size_t width) const { std::fill_n(row.first, width, T(0)); }
  void move(const Row<T>& row, size_t width, const Steps&) const {
    for (size_t i = 0; i < width; ++i) {
      const T gradient = decayed(row.gradient[i], row.values[i], decay);
      const T total = momentum * row.first[i] + gradient;
      row.first[i] = total;
      row.values[i] -= nesterov ? lr * (gradient + momentum * total) : lr * total;
    }
  }
};

template <typename T>
struct Adagrad {
  static constexpr size_t kElements = 1, kRows = 0;
  T lr, decay, eps, initial;

  explicit Adagrad(const Constants& c) : lr(c.at(0)), decay(c.at(1)), eps(c.at(2)), initial(c.at(3)) {}

  void start(const Row<T>& row, size_t width) const { std::fill_n(row.first, width, initial); }
  void move(const Row<T>& row, size_t width, const Steps&) const {
    for (size_t i = 0; i < width; ++i) {
      const T gradient = decayed(row.gradient[i], row.values[i], decay);
      const T total = row.first[i] + gradient * gradient;
      row.first[i] = total;
      row.values[i] -= lr * (gradient / (std::sqrt(total) + eps));
    }
  }
};

template <typename T>
struct RowwiseAdagrad {
  static constexpr size_t kElements = 0, kRows = 1;
  T lr, eps, initial;

  explicit RowwiseAdagrad(const Constants& c) : lr(c.at(0)), eps(c.at(1)), initial(c.at(2)) {}

  void start(const Row<T>& row, size_t) const { *row.state = initial; }
  void move(const Row<T>& row, size_t width, const Steps&) const {
    constexpr size_t kLanes = 8;
    T lanes[kLanes] = {};
    size_t start = 0;
    for (; start + kLanes <= width; start += kLanes) {
      for (size_t i = 0; i < kLanes; ++i) {
        lanes[i] += row.gradient[start + i] * row.gradient[start + i];
      }
    }
    for (size_t i = 0; start + i < width; ++i) {
      lanes[i] += row.gradient[start + i] * row.gradient[start + i];
    }
    for (size_t half = kLanes / 2; half > 0; half /= 2) {
      for (size_t i = 0; i < half; ++i) {
        lanes[i] += lanes[i + half];
      }
    }
    *row.state += lanes[0] / static_cast<T>(width);
    const T rate = lr / (std::sqrt(*row.state) + eps);
    for (size_t i = 0; i < width; ++i) {
      row.values[i] -= rate * row.gradient[i];
    }
  }
};

template <typename T>
struct Adam {
  static constexpr size_t kElements = 2, kRows = 1;
  double lr;
  T decay, keep1, take1, keep2, take2, eps, shrink;

  explicit Adam(const Constants& c)
      : lr(c.at(0)),
        decay(c.at(1)),
        keep1(c.at(2)),
        take1(c.at(3)),
        keep2(c.at(4)),
        take2(c.at(5)),
        eps(c.at(6)),
        shrink(c.at(7)) {}

  void start(const Row<T>& row, size_t width) const {
    std::fill_n(row.first, width, T(0));
    std::fill_n(row.second, width, T(0));
    *row.state = 0;
  }
  void move(const Row<T>& row, size_t width, const Steps& steps) const {
    *row.state += 1;
    const size_t step = std::min(static_cast<size_t>(*row.state), steps.count - 1);
    const T rate = static_cast<T>(lr / steps.means[step]);
    const T root = static_cast<T>(steps.roots[step]);
    for (size_t i = 0; i < width; ++i) {
      const T gradient = decayed(row.gradient[i], row.values[i], decay);
      const T value = shrink != 1 ? row.values[i] * shrink : row.values[i];
      const T mean = keep1 * row.first[i] + take1 * gradient;
      const T square = keep2 * row.second[i] + take2 * (gradient * gradient);
      row.first[i] = mean;
      row.second[i] = square;
      row.values[i] = value - rate * (mean / (std::sqrt(square) / root + eps));
    }
  }
};

template <typename T>
struct Ftrl {
  static constexpr size_t kElements = 2, kRows = 0;
  T lr, beta, l1, l2;

  explicit Ftrl(const Constants& c) : lr(c.at(0)), beta(c.at(1)), l1(c.at(2)), l2(c.at(3)) {}

  void start(const Row<T>& row, size_t width) const {
    for (size_t i = 0; i < width; ++i) {
      const T value = row.values[i];
      row.first[i] = value == 0 ? T(0) : -(value * (beta / lr + l2) + std::copysign(l1, value));
      row.second[i] = 0;
    }
  }
  void move(const Row<T>& row, size_t width, const Steps&) const {
    for (size_t i = 0; i < width; ++i) {
      const T before = std::sqrt(row.second[i]);
      const T square = row.second[i] + row.gradient[i] * row.gradient[i];
      const T root = std::sqrt(square);
      const T z = row.first[i] + (row.gradient[i] - ((root - before) / lr) * row.values[i]);
      const T moved = (std::copysign(l1, z) - z) / ((beta + root) / lr + l2);
      row.first[i] = z;
      row.second[i] = square;
      row.values[i] = std::abs(z) <= l1 ? T(0) : moved;
    }
  }
};

// Calls `use` with the rule of a name.
template <typename T, typename Use>
auto with_rule(const std::string& name, const Constants& constants, Use&& use) {
  if (name == "sgd") {
    return use(Sgd<T>(constants));
  }
  if (name == "momentum") {
    return use(Momentum<T>(constants));
  }
  if (name == "adagrad") {
    return use(Adagrad<T>(constants));
  }
  if (name == "rowwise_adagrad") {
    return use(RowwiseAdagrad<T>(constants));
  }
  if (name == "adam") {
    return use(Adam<T>(constants));
  }
  if (name == "ftrl") {
    return use(Ftrl<T>(constants));
  }
  throw std::invalid_argument("no rule is named " + name);
}

}  // namespace paceline
