// Weights as pairs of float32, for devices with slow doubles: graphics GPUs and Jetsons have one double unit per 64 of
// float32, and a double's exponential takes some sixty instructions.
//
// A pair is `high` + `low`, |low| at most half an ulp of `high`: about 47 bits. Error-free additions and products (T.
// J. Dekker, 1971; D. E. Knuth, TAOCP 4.2.2) that no compiler may reorder.
#ifndef TOPW_CUDA_PAIRS_H
#define TOPW_CUDA_PAIRS_H

#include <math.h>

#include "../native/objective.h"
#include "../native/parameters.h"
#include "platform.h"

// sm_80, 90 and 100 have one double unit per two of float32.
#if !defined(TOPW_FAST_DOUBLES)
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000)
#define TOPW_FAST_DOUBLES 1
#else
#define TOPW_FAST_DOUBLES 0
#endif
#endif

namespace topw {

struct Pair {
  float high, low;
};

__device__ __forceinline__ double as_double(Pair a) { return static_cast<double>(a.high) + static_cast<double>(a.low); }

__device__ __forceinline__ Pair pair_of(double value) {
  const float high = static_cast<float>(value);
  return {high, static_cast<float>(value - static_cast<double>(high))};
}

// a + b, for |a| >= |b| or a = 0.
__device__ __forceinline__ Pair joined(float a, float b) {
  const float sum = __fadd_rn(a, b);
  return {sum, __fadd_rn(b, -__fadd_rn(sum, -a))};
}

__device__ __forceinline__ Pair sum_of(float a, float b) {
  const float sum = __fadd_rn(a, b), of_b = __fadd_rn(sum, -a);
  return {sum, __fadd_rn(__fadd_rn(a, -__fadd_rn(sum, -of_b)), __fadd_rn(b, -of_b))};
}

__device__ __forceinline__ Pair plus(Pair a, Pair b) {
  const Pair high = sum_of(a.high, b.high), low = sum_of(a.low, b.low);
  const Pair both = joined(high.high, __fadd_rn(high.low, low.high));
  return joined(both.high, __fadd_rn(both.low, low.low));
}

__device__ __forceinline__ Pair times(Pair a, Pair b) {
  const float product = __fmul_rn(a.high, b.high);
  const float rest = fmaf(a.high, b.high, -product);
  return joined(product, fmaf(a.high, b.low, fmaf(a.low, b.high, rest)));
}

__device__ __forceinline__ Pair scaled(Pair a, float power_of_two) {
  return {__fmul_rn(a.high, power_of_two), __fmul_rn(a.low, power_of_two)};
}

// e^a for -87 <= a <= 0, within 2^-42 relative: 2^n exp(r), with exp(r) - 1 by squaring exp(r / 16) four times; power
// series to the seventh term.
__device__ TOPW_OUT_OF_LINE inline Pair exponential(Pair a) {
  constexpr float kLn2[] = {0x1.62e4p-1f, 0x1.7f7d1cp-20f, 0x1.ef357ap-45f};  // the first times n is exact
  const float n = rintf(a.high * 1.44269504f);
  const float first = fmaf(-n, kLn2[0], a.high), product = __fmul_rn(n, kLn2[1]);
  const Pair difference = sum_of(first, -product);
  const float rest = fmaf(-n, kLn2[2], __fadd_rn(a.low, -fmaf(n, kLn2[1], -product)));
  const Pair x = scaled(joined(difference.high, __fadd_rn(difference.low, rest)), 1.0f / 16);

  const Pair square = times(x, x), cube = times(square, x), sixth = {0x1.555556p-3f, -0x1.555556p-28f};
  const float y = x.high;
  const float tail = y * y * y * y * (1.0f / 24 + y * (1.0f / 120 + y * (1.0f / 720 + y * (1.0f / 5040))));
  Pair grown = plus(x, plus(scaled(square, 0.5f), plus(times(cube, sixth), {tail, 0})));
#pragma unroll 1
  for (int i = 0; i < 4; ++i) grown = plus(scaled(grown, 2), times(grown, grown));
  return scaled(plus({1, 0}, grown), ldexpf(1.0f, static_cast<int>(n)));
}

// A temperature prepared for many tokens.
struct Cooling {
  Pair inverse;
  double temperature;
};

__device__ inline Cooling cooling_of(double temperature) { return {pair_of(1 / temperature), temperature}; }

// Log-weight and weight in units of `top`, a larger logit; at least e^-60 if `bounded`.
struct Weight {
  double log, weight;
};

__device__ __forceinline__ Weight weight_of(float logit, float top, const Cooling &by, bool bounded) {
#if !TOPW_FAST_DOUBLES
  const Pair log = times(sum_of(logit, -top), by.inverse);
  const Pair least = {static_cast<float>(kSmallestLogWeight), 0};
  if (log.high > least.high) return {as_double(log), as_double(exponential(log))};
  if (bounded && log.high <= least.high) return {as_double(log), as_double(exponential(least))};
#endif  // values outside float32's range become NaN
  const double exact = log_weight(logit, top, by.temperature);
  return {exact, bounded ? weight(exact) : exp(exact)};
}

}  // namespace topw
#endif
