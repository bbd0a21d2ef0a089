// Portable products: SSE2 on x86-64, NEON on arm64.

#include <string.h>

#include "product_chunk.h"
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace topw {
namespace {

#include "lanes_generic.h"

#include "product_lanes_generic.h"

// Adds the products of a vector of bytes below 16 with x [4].
#if defined(__ARM_NEON)
inline Ints add_dot(Ints sum, Ints codes, const int8_t *x) {
  int32_t four;
  memcpy(&four, x, sizeof four);
  const int8x16_t code = (int8x16_t)codes, fours = (int8x16_t)every(four);
  const int16x8_t low = vmull_s8(vget_low_s8(code), vget_low_s8(fours)), high = vmull_high_s8(code, fours);
  return (Ints)vpadalq_s16((int32x4_t)sum, vpaddq_s16(low, high));
}
#else
__attribute__((noinline)) Ints add_dot(Ints sum, Ints codes, const int8_t *x) {
  for (int j = 0; j < 4; ++j) sum += (codes >> 8 * j & 0xff) * x[j];
  return sum;
}
#endif
template <int n>
inline Ints dot(Ints sum, const Ints *codes, const int8_t *x) {
  for (int i = 0; i < n; ++i) sum = add_dot(sum, codes[i], x + 4 * i);
  return sum;
}

#include "product_loops.inc"

}  // namespace

const Product kProductGeneric = {"generic", round_row, multiply};

}  // namespace topw
