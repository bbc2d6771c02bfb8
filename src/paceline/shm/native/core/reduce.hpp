// Element-wise reduction of what several ranks give, always in the order of ranks.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace paceline {

// Numbered as in c10d.
enum class Reduction : uint8_t { SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM, UNUSED };

const char* name_of(Reduction reduction);

// Throws where the reduction has no meaning for the type.
void check_reduction(Reduction reduction, c10::ScalarType dtype);

// out[i] = sources[0][i] op sources[1][i] op ...; `out` may be one of the sources. AVG divides by their number.
// Half-precision floats are added up as float and rounded once.
void reduce(
    Reduction reduction,
    c10::ScalarType dtype,
    char* out,
    const std::vector<const char*>& sources,
    size_t bytes);

}  // namespace paceline
