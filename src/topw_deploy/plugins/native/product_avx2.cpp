// Products for AVX2.

#include <string.h>

#include "product_chunk.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif

namespace topw {
namespace {

#include "lanes_avx2.h"

#include "product_lanes_avx2.h"

// The products of eight bytes below 16 fit into 16 bits.
constexpr bool kTakesBytes = false;
template <int n>
inline Ints dot(Ints sum, const Ints *codes, const int8_t *x) {
  Ints pairs = _mm256_maddubs_epi16(codes[0], four_of(x));
#pragma GCC unroll 8
  for (int i = 1; i < n; ++i) pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(codes[i], four_of(x + 4 * i)));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

#include "product_loops.inc"

}  // namespace

const Product kProductAvx2 = {"avx2", round_row, multiply};

}  // namespace topw

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
