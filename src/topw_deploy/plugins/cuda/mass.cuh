// For the output `mass`: each crop's share of the softmax over the whole row at the selection temperature, within 3e-7
// relative. certify adds up the weights of a row's units while it has their logits; a unit is the same for every launch,
// so the sums are, too. Whoever answers the row adds up the units.
#ifndef TOPW_CUDA_MASS_CUH
#define TOPW_CUDA_MASS_CUH

#include "chunk.cuh"

namespace topw {

constexpr float kNegligible = -100.0f;  // e^-100 of the largest adds nothing
constexpr int kUnitGroups = kMassUnit / kGroup;

// 1 / the selection temperature, as the sum of two floats; 0 where no weights are needed. In shared memory.
struct Rate {
  float high, low;
};

__device__ inline Rate rate_of(const Call &call, int64_t row) {
  Parameters P;
  if (!P.take(given_parameters(call.inputs, row)) || P.certain_selection) return {0, 0};
  const double rate = 1 / P.selection;
  const float high = static_cast<float>(rate);
  return {high, static_cast<float>(rate - static_cast<double>(high))};
}

// e to the power (logit - top) * rate. Roundings of the exponent are made up for.
__device__ __forceinline__ float weight_below(float logit, float top, Rate rate) {
  const float difference = logit - top, shifted = difference - logit;
  const float lost = (logit - (difference - shifted)) - (top + shifted);
  const float exponent = __fmul_rn(difference, rate.high);
  if (!(exponent > kNegligible)) return 0;
  const float rest = fmaf(difference, rate.high, -exponent) + (difference * rate.low + lost * rate.high);
  const float e = expf(exponent);
  return fmaf(e, rest, e);
}

// A sum of floats with what rounding lost of it.
struct LongSum {
  float sum = 0, lost = 0;

  __device__ void add(float value) {
    const float total = __fadd_rn(sum, value), added = __fadd_rn(total, -sum);
    lost += __fadd_rn(__fadd_rn(sum, -__fadd_rn(total, -added)), __fadd_rn(value, -added));
    sum = total;
  }
};

// One warp's sum over one unit, in units of its largest logit.
__device__ inline void weigh_unit(const Call &call, const LogitRow &logits, int64_t row, int32_t unit, Rate rate) {
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

// Of all units of a chunk, whose maxima are known. Begins with a barrier.
__device__ TOPW_OUT_OF_LINE inline void weigh_chunk(const Call &call, const Chunk &chunk) {
  TOPW_SHARED(Rate, rate);
  if (own_index() == 0) rate = rate_of(call, chunk.row);
  __syncthreads();
  if (rate.high == 0) return;
  const LogitRow logits(call, chunk.row);
  const int32_t end = (chunk.last + kUnitGroups - 1) / kUnitGroups;
#pragma unroll 1
  for (int32_t unit = chunk.first / kUnitGroups + warp_index(); unit < end; unit += warps())
    weigh_unit(call, logits, chunk.row, unit, rate);
}

// kept: the crop's weight at the selection temperature, in units of the row's largest logit `top`. By the first warp.
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
