// Values of new rows, as `initial.py` computes them, operation by operation.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "keys.hpp"

namespace paceline {

namespace initial {

inline double logarithm(double x) {
  int exponent = 0;
  double mantissa = std::frexp(x, &exponent);
  double power = exponent;
  if (mantissa < 0.70710678118654752440) {
    mantissa += mantissa;
    power -= 1;
  }
  const double s = (mantissa - 1) / (mantissa + 1);
  const double square = s * s;
  double series = 0;
  for (int term = 10; term >= 0; --term) {
    series = series * square + 1 / (2.0 * term + 1);
  }
  return power * 0.6931471805599453 + (s + s) * series;
}

template <size_t N>
double horner(const double (&coefficients)[N], double x) {
  double total = coefficients[0];
  for (size_t i = 1; i < N; ++i) {
    total = total * x + coefficients[i];
  }
  return total;
}

// Below this a standard normal number lies with a probability from within 0 and 1 (Wichura, 1988, AS 241).
inline double normal(double between) {
  constexpr double kMiddleAbove[] = {
      2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
      1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0};
  constexpr double kMiddleBelow[] = {
      5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
      5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0};
  constexpr double kTailAbove[] = {
      7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0,
      3.64784832476320460504e0,  5.76949722146069140550e0,  4.63033784615654529590e0,  1.42343711074968357734e0};
  constexpr double kTailBelow[] = {
      1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
      6.89767334985100004550e-1, 1.67638483018380384940e0,  2.05319162663775882187e0,  1.0};
  constexpr double kFarAbove[] = {
      2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
      2.96560571828504891230e-1, 1.78482653991729133580e0,  5.46378491116411436990e0,  6.65790464350110377720e0};
  constexpr double kFarBelow[] = {
      2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
      1.48753612908506148525e-2,  1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0};
  const double off = between - 0.5;
  if (std::abs(off) <= 0.425) {
    const double r = 0.425 * 0.425 - off * off;
    return off * (horner(kMiddleAbove, r) / horner(kMiddleBelow, r));
  }
  const double depth = std::sqrt(-logarithm(off < 0 ? between : 1 - between));
  const double tail = depth <= 5.0 ? horner(kTailAbove, depth - 1.6) / horner(kTailBelow, depth - 1.6)
                                   : horner(kFarAbove, depth - 5.0) / horner(kFarBelow, depth - 5.0);
  return off < 0 ? -tail : tail;
}

}  // namespace initial

// What rows of a table begin with.
struct Beginning {
  enum Distribution { kZeros = 0, kUniform = 1, kNormal = 2 };

  int distribution;
  double scale;
  uint64_t salt;

  template <typename T>
  void fill(int64_t key, T* values, size_t width) const {
    constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
    if (distribution == kZeros) {
      for (size_t i = 0; i < width; ++i) {
        values[i] = 0;
      }
      return;
    }
    const uint64_t start = mixed(static_cast<uint64_t>(key) ^ salt);
    for (size_t i = 0; i < width; ++i) {
      const uint64_t bits = mixed(start + (i + 1) * kGolden);
      const double between = (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52;
      const double drawn = distribution == kUniform ? 2 * between - 1 : initial::normal(between);
      values[i] = static_cast<T>(scale * drawn);
    }
  }
};

}  // namespace paceline
