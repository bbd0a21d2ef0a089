// The hot loops for AVX-512 (F, BW, DQ, VL).

#include "hot.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))), apply_to = function)
#else
#pragma GCC diagnostic ignored "-Wuninitialized"  // gcc 12 warns about its own _mm512_undefined (bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#endif

namespace topw {
namespace {

#include "lanes_avx512.h"

#include "hot_loops.inc"

#include "hot_sums.inc"

#include "attention_loops.inc"

}  // namespace

const Hot kAvx512 = TOPW_HOT_LOOPS("avx512");

}  // namespace topw

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
