// J over the prefixes of an order, as in native/objective.h: by one block, in double.
#ifndef TOPW_CUDA_SCAN_H
#define TOPW_CUDA_SCAN_H

#include <math.h>

#include "block.h"

namespace topw::crop {

// Every thread gets the sum; a float's order depends on the number of threads.
template <class T>
__device__ inline T block_sum(T value, BlockScratch &scratch) {
  T *const of_warp = reinterpret_cast<T *>(scratch.values);
  value = warp_reduce(value, Plus());
  if (lane_index() == 0) of_warp[warp_index()] = value;
  __syncthreads();
  value = 0;
  for (int i = 0; i < warps(); ++i) value += of_warp[i];
  __syncthreads();
  return value;
}

struct Maximum {
  double J;
  int32_t size;  // of its first prefix
};

// J of a prefix in float32 with an error bound, to skip most logarithms in double.
struct Roughly {
  float low, high;

  __device__ Roughly(double Gamma, double Phi, float c) {
    constexpr float kRelative = 4e-6f;  // a few roundings of the mean, the logarithm, and their product and sum
    const float mean = static_cast<float>(Phi) / static_cast<float>(Gamma), gain = logf(static_cast<float>(Gamma));
    const float J = mean + c * gain, error = kRelative * (fabsf(mean) + c * (1 + fabsf(gain)));
    const bool known = error < static_cast<float>(INFINITY);
    low = known ? J - error : -static_cast<float>(INFINITY);
    high = known ? J + error : static_cast<float>(INFINITY);
  }
};

// The best prefix, given inclusive sums [count] of p and p * phi, count >= 1; for c <= 0 the first. Every thread must
// have written or seen its elements own_index() + n * block_size().
__device__ TOPW_OUT_OF_LINE inline Maximum first_maximiser(const double *Gamma, const double *Phi, int32_t count,
                                                           double c, BlockScratch &scratch) {
  if (c <= 0) return {Phi[0] / Gamma[0] + c * log(Gamma[0]), 1};
  const float rough_c = static_cast<float>(c);
  float low = -static_cast<float>(INFINITY);
  if (count > kWarp) {  // for one warp, computing all logarithms is cheaper
#pragma unroll 1
    for (int32_t i = own_index(); i < count; i += block_size())
      low = Larger()(Roughly(Gamma[i], Phi[i], rough_c).low, low);
    low = block_reduce(low, Larger(), scratch);
  }
  Best best = {-static_cast<double>(INFINITY), INT32_MAX};
#pragma unroll 1
  for (int32_t i = own_index(); i < count; i += block_size())
    if (count <= kWarp || !(Roughly(Gamma[i], Phi[i], rough_c).high < low))
      best = better(best, {Phi[i] / Gamma[i] + c * log(Gamma[i]), i});
  best = block_best(best, scratch);
  return {best.value, best.place < count ? best.place + 1 : 1};
}

}  // namespace topw::crop
#endif
