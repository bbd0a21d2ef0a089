// The output `mass`: the crop's share of the full softmax at the selection temperature, within 3e-7 relative. certify
// sums the weights of each unit; the block that answers the row adds up the units. Units, and so the sums, are the same
// for every launch.
#ifndef TOPW_CUDA_MASS_CUH
#define TOPW_CUDA_MASS_CUH

#include "chunk.cuh"
#include "pairs.h"

namespace topw {

constexpr float kNegligible = -100.0f;  // e^-100 is negligible
constexpr int kUnitGroups = kMassUnit / kGroup;

// 1 / the selection temperature; 0 if no weights are needed.
__device__ inline Pair rate_of(const Call &call, int64_t row) {
  Parameters P;
  if (!P.take(given_parameters(call.inputs, row)) || P.certain_selection) return {0, 0};
  return pair_of(1 / P.selection);
}

// exp((logit - top) * rate), corrected for the exponent's rounding.
__device__ __forceinline__ float weight_below(float logit, float top, Pair rate) {
  const Pair exponent = times(sum_of(logit, -top), rate);
  if (!(exponent.high > kNegligible)) return 0;
  const float e = expf(exponent.high);
  return fmaf(e, exponent.low, e);
}

// A compensated sum of floats.
struct LongSum {
  float sum = 0, lost = 0;

  __device__ void add(float value) {
    const Pair both = sum_of(sum, value);
    sum = both.high;
    lost += both.low;
  }
};

// Sums the weights of one unit, in units of its largest logit's weight, by one warp.
__device__ inline void weigh_unit(const Call &call, const LogitRow &logits, int64_t row, int32_t unit, Pair rate) {
  const int32_t first = unit * kUnitGroups, own = first + lane_index() % kUnitGroups;
  float top = own < logits.groups() ? logits.maximum(own) : -static_cast<float>(INFINITY);
  top = warp_reduce(top, Larger());
  LongSum sum;
#pragma unroll 2
  for (int n = lane_index(); n < kMassUnit / 4; n += kWarp) {
    const int32_t group = first + n / (kGroup / 4);
    if (group >= logits.groups()) break;
    const float4 four = logits.four(group, n % (kGroup / 4), logits.slot(group));
    sum.add(weight_below(four.x, top, rate));
    sum.add(weight_below(four.y, top, rate));
    sum.add(weight_below(four.z, top, rate));
    sum.add(weight_below(four.w, top, rate));
  }
  const double total = warp_reduce(static_cast<double>(sum.sum) + static_cast<double>(sum.lost), Plus());
  if (lane_index() != 0) return;
  call.workspace.unit_tops[row * call.units + unit] = top;
  call.workspace.unit_sums[row * call.units + unit] = total;
}

// Sums the weights of a chunk's units, after their maxima. Begins with a barrier.
__device__ TOPW_OUT_OF_LINE inline void weigh_chunk(const Call &call, const Chunk &chunk) {
  TOPW_SHARED(Pair, rate);
  if (own_index() == 0) rate = rate_of(call, chunk.row);
  __syncthreads();
  if (rate.high == 0) return;
  const LogitRow logits(call, chunk.row);
  const int32_t end = (chunk.last + kUnitGroups - 1) / kUnitGroups;
#pragma unroll 1
  for (int32_t unit = chunk.first / kUnitGroups + warp_index(); unit < end; unit += warps())
    weigh_unit(call, logits, chunk.row, unit, rate);
}

// kept: the crop's weight at the selection temperature, in units of the weight of the largest logit, `top`. Called by
// the first warp.
__device__ inline void write_mass(const Call &call, int64_t row, const Parameters &P, float top, double kept) {
  if (warp_index() != 0) return;
  double total = 0;
#pragma unroll 1
  for (int32_t unit = lane_index(); unit < call.units; unit += kWarp) {
    const float unit_top = __ldcg(call.workspace.unit_tops + row * call.units + unit);
    if (unit_top > -static_cast<float>(INFINITY))
      total += __ldcg(call.workspace.unit_sums + row * call.units + unit) *
               exp(log_weight(unit_top, top, P.selection));
  }
  total = warp_reduce(total, Plus());
  if (lane_index() == 0) call.outputs.mass[row] = static_cast<float>(kept / total);
}

}  // namespace topw
#endif
