#include "reduce.hpp"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

#include <algorithm>
#include <array>
#include <complex>
#include <type_traits>

namespace paceline {

namespace {

constexpr size_t kBlock = 2048;  // elements that stay in the nearest cache while sources are added to them

struct Sum {
  template <typename T>
  T operator()(T a, T b) const {
    return a + b;
  }
};
struct Product {
  template <typename T>
  T operator()(T a, T b) const {
    return a * b;
  }
};
// As in torch, a value that is not a number is the smallest and the largest.
struct Min {
  template <typename T>
  T operator()(T a, T b) const {
    return (a < b || a != a) ? a : b;
  }
};
struct Max {
  template <typename T>
  T operator()(T a, T b) const {
    return (a > b || a != a) ? a : b;
  }
};
struct And {
  template <typename T>
  T operator()(T a, T b) const {
    return a & b;
  }
};
struct Or {
  template <typename T>
  T operator()(T a, T b) const {
    return a | b;
  }
};
struct Xor {
  template <typename T>
  T operator()(T a, T b) const {
    return a ^ b;
  }
};

template <typename T, typename Op>
void combine(T* out, const std::vector<const char*>& sources, size_t count, Op op) {
  const auto source = [&](size_t index) { return reinterpret_cast<const T*>(sources[index]); };
  if (sources.size() == 1) {
    std::copy_n(source(0), count, out);
    return;
  }
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t size = std::min(kBlock, count - begin);
    std::array<T, kBlock> total;
    const T* first = source(0) + begin;
    const T* second = source(1) + begin;
    T* target = sources.size() == 2 ? out + begin : total.data();  // `out` may be a source that is still to be read
    for (size_t i = 0; i < size; ++i) {
      target[i] = op(first[i], second[i]);
    }
    for (size_t index = 2; index < sources.size(); ++index) {
      const T* next = source(index) + begin;
      target = index + 1 == sources.size() ? out + begin : total.data();
      for (size_t i = 0; i < size; ++i) {
        target[i] = op(total[i], next[i]);
      }
    }
  }
}

template <typename T, typename Op>
void combine_as_float(T* out, const std::vector<const char*>& sources, size_t count, Op op) {
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t size = std::min(kBlock, count - begin);
    std::array<float, kBlock> total;
    for (size_t index = 0; index < sources.size(); ++index) {
      const T* next = reinterpret_cast<const T*>(sources[index]) + begin;
      for (size_t i = 0; i < size; ++i) {
        const float value = static_cast<float>(next[i]);
        total[i] = index == 0 ? value : op(total[i], value);
      }
    }
    for (size_t i = 0; i < size; ++i) {
      out[begin + i] = static_cast<T>(total[i]);
    }
  }
}

template <typename T>
void divide(T* out, size_t count, size_t divisor) {
  const T by = static_cast<T>(divisor);
  for (size_t i = 0; i < count; ++i) {
    out[i] = out[i] / by;
  }
}


template <typename T, typename Op>
void run(T* out, const std::vector<const char*>& sources, size_t count, Op op) {
  constexpr bool half = std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>;
  if constexpr (half) {
    combine_as_float(out, sources, count, op);
  } else {
    combine(out, sources, count, op);
  }
}

template <typename T>
void reduce_ordered(Reduction reduction, T* out, const std::vector<const char*>& sources, size_t count) {
  switch (reduction) {
    case Reduction::MIN:
      return run(out, sources, count, Min{});
    case Reduction::MAX:
      return run(out, sources, count, Max{});
    default:
      TORCH_INTERNAL_ASSERT(false);
  }
}

template <typename T>
void reduce_numbers(Reduction reduction, T* out, const std::vector<const char*>& sources, size_t count) {
  switch (reduction) {
    case Reduction::SUM:
      return run(out, sources, count, Sum{});
    case Reduction::AVG:
      run(out, sources, count, Sum{});
      return divide(out, count, sources.size());
    case Reduction::PRODUCT:
      return run(out, sources, count, Product{});
    default:
      if constexpr (!c10::is_complex<T>::value) {
        return reduce_ordered(reduction, out, sources, count);
      }
      TORCH_INTERNAL_ASSERT(false);
  }
}

template <typename T>
void reduce_integers(Reduction reduction, T* out, const std::vector<const char*>& sources, size_t count) {
  switch (reduction) {
    case Reduction::BAND:
      return run(out, sources, count, And{});
    case Reduction::BOR:
      return run(out, sources, count, Or{});
    case Reduction::BXOR:
      return run(out, sources, count, Xor{});
    default:
      return reduce_numbers(reduction, out, sources, count);
  }
}

// Truth values are bytes of 0 and 1: a sum is "any", a product "all".
Reduction for_truth(Reduction reduction) {
  switch (reduction) {
    case Reduction::SUM:
    case Reduction::MAX:
      return Reduction::BOR;
    case Reduction::PRODUCT:
    case Reduction::MIN:
      return Reduction::BAND;
    default:
      return reduction;
  }
}

bool is_bitwise(Reduction reduction) {
  return reduction == Reduction::BAND || reduction == Reduction::BOR || reduction == Reduction::BXOR;
}

}  // namespace

const char* name_of(Reduction reduction) {
  constexpr std::array<const char*, 9> names = {
      "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
  return static_cast<size_t>(reduction) < names.size() ? names[static_cast<size_t>(reduction)] : "an unknown reduction";
}

void check_reduction(Reduction reduction, c10::ScalarType dtype) {
  bool possible = false;
  if (reduction == Reduction::SUM || reduction == Reduction::PRODUCT) {
    possible = true;
  } else if (reduction == Reduction::AVG) {
    possible = !c10::isIntegralType(dtype, /*includeBool=*/true);
  } else if (reduction == Reduction::MIN || reduction == Reduction::MAX) {
    possible = !c10::isComplexType(dtype);
  } else if (is_bitwise(reduction)) {
    possible = c10::isIntegralType(dtype, /*includeBool=*/true);
  }
  TORCH_CHECK_VALUE(possible, "shared memory: ", name_of(reduction), " of ", c10::toString(dtype), " is not defined");
  switch (dtype) {
    case c10::kBool:
    case c10::kByte:
    case c10::kChar:
    case c10::kShort:
    case c10::kInt:
    case c10::kLong:
    case c10::kUInt16:
    case c10::kUInt32:
    case c10::kUInt64:
    case c10::kHalf:
    case c10::kBFloat16:
    case c10::kFloat:
    case c10::kDouble:
    case c10::kComplexFloat:
    case c10::kComplexDouble:
      return;
    default:
      TORCH_CHECK_TYPE(
          false, "shared memory: tensors of ", c10::toString(dtype), " can be exchanged but not reduced; convert them to float");
  }
}

void reduce(
    Reduction reduction,
    c10::ScalarType dtype,
    char* out,
    const std::vector<const char*>& sources,
    size_t bytes) {
  const auto integers = [&](auto zero) {
    using T = decltype(zero);
    reduce_integers(reduction, reinterpret_cast<T*>(out), sources, bytes / sizeof(T));
  };
  const auto numbers = [&](auto zero) {
    using T = decltype(zero);
    reduce_numbers(reduction, reinterpret_cast<T*>(out), sources, bytes / sizeof(T));
  };
  switch (dtype) {
    case c10::kBool:
      return reduce_integers(for_truth(reduction), reinterpret_cast<uint8_t*>(out), sources, bytes);
    case c10::kByte:
      return integers(uint8_t{});
    case c10::kChar:
      return integers(int8_t{});
    case c10::kShort:
      return integers(int16_t{});
    case c10::kInt:
      return integers(int32_t{});
    case c10::kLong:
      return integers(int64_t{});
    case c10::kUInt16:
      return integers(uint16_t{});
    case c10::kUInt32:
      return integers(uint32_t{});
    case c10::kUInt64:
      return integers(uint64_t{});
    case c10::kHalf:
      return numbers(c10::Half{});
    case c10::kBFloat16:
      return numbers(c10::BFloat16{});
    case c10::kFloat:
      return numbers(float{});
    case c10::kDouble:
      return numbers(double{});
    case c10::kComplexFloat:
      return numbers(c10::complex<float>{});
    case c10::kComplexDouble:
      return numbers(c10::complex<double>{});
    default:
      check_reduction(reduction, dtype);
  }
}

}  // namespace paceline
