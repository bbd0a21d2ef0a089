// Products for arm64 with the dot product instructions (FEAT_DotProd).

#include <string.h>

#include "product_chunk.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("+dotprod")
#endif

namespace topw {
namespace {

#include "lanes_generic.h"

#include "product_lanes_generic.h"

template <int n>
inline Ints dot(Ints sum, const Ints *codes, const int8_t *x) {
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i) {
    int32_t four;
    memcpy(&four, x + 4 * i, sizeof four);
    sum = (Ints)vdotq_s32((int32x4_t)sum, (int8x16_t)codes[i], (int8x16_t)every(four));
  }
  return sum;
}

#include "product_loops.inc"

}  // namespace

const Product kProductDot = {"dotprod", round_row, multiply};

}  // namespace topw

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
