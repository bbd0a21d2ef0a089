// Products for AVX2 with VNNI.

#include <string.h>

#include "product_chunk.h"

#if defined(TOPW_AVX_VNNI)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avxvnni"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,avxvnni")
#endif

namespace topw {
namespace {

#include "lanes_avx2.h"

#include "product_lanes_avx2.h"

constexpr bool kTakesBytes = true;
template <int n>
inline Ints dot(Ints sum, const Ints *codes, const int8_t *x) {
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i) sum = _mm256_dpbusd_avx_epi32(sum, codes[i], four_of(x + 4 * i));
  return sum;
}

#include "product_loops.inc"

}  // namespace

const Product kProductAvxVnni = {"avx_vnni", round_row, multiply};

}  // namespace topw

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
