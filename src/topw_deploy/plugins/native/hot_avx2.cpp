// The hot loops for AVX2 and FMA.

#include "hot.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif

namespace topw {
namespace {

#include "lanes_avx2.h"

#include "hot_loops.inc"

#include "hot_sums.inc"

#include "attention_loops.inc"

}  // namespace

const Hot kAvx2 = TOPW_HOT_LOOPS("avx2");

}  // namespace topw

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
