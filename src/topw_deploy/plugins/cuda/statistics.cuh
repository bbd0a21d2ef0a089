// The numbers of a whole row that some rules need. certify computes them for each unit; the row's last block adds up
// the units. Units, and so the sums, are the same for every launch. All sums are in double, because they decide which
// tokens a rule keeps.
#ifndef TOPW_CUDA_STATISTICS_CUH
#define TOPW_CUDA_STATISTICS_CUH

#include "mass.cuh"
#include "rules.h"

namespace topw {

// What a chunk's block computes. `needs` is `nothing` for an invalid, greedy or Top-W row.
struct Measuring {
  Needs needs;
  Cooling selection;
};

__device__ inline Measuring measuring_of(const Call &call, int64_t row) {
  Rule rule;
  Parameters P;
  const bool needed = P.read(call.inputs, row) && !P.greedy && rule.read(call.inputs, row);
  return {needed ? needs_of(rule) : Needs::nothing, cooling_of(P.selection)};
}

// A lane's part of a unit. Weights are in units of the largest logit's weight, which is itself left out once.
class UnitPart {
 public:
  __device__ UnitPart(const Measuring &how, float top) : how_(how), top_(top) {}

  __device__ void add(float logit) {
    if (logit == -static_cast<float>(INFINITY)) return;
    if (how_.needs == Needs::spread) {
      const double below = static_cast<double>(logit) - static_cast<double>(top_);
      sums[0] += 1;
      sums[1] += below;
      sums[2] += below * below;
      sums[3] = below < sums[3] ? below : sums[3];
      return;
    }
    const Weight of = weight_of(logit, top_, how_.selection, false);
    if (logit == top_) {
      sums[3] += 1;
      return;
    }
    sums[0] += of.weight;
    sums[1] -= of.weight > 0 ? of.weight * of.log : 0;
    sums[2] += of.weight * of.weight;
  }

  // spread: count, sum and sum of squares of (logit - top), and the smallest. weights: sums of w, w y and w^2 over all
  // other tokens, and the number of other tokens at `top`.
  double sums[4] = {0, 0, 0, 0};

 private:
  const Measuring &how_;
  const float top_;
};

// Computes the numbers of one unit, by one warp.
__device__ inline void measure_unit(const Call &call, const LogitRow &logits, int64_t row, int32_t unit,
                                    const Measuring &how) {
  const int32_t first = unit * kUnitGroups, own = first + lane_index() % kUnitGroups;
  float top = own < logits.groups() ? logits.maximum(own) : -static_cast<float>(INFINITY);
  top = warp_reduce(top, Larger());
  UnitPart part(how, top);
#pragma unroll 1
  for (int n = lane_index(); n < kMassUnit / 4; n += kWarp) {
    const int32_t group = first + n / (kGroup / 4);
    if (group >= logits.groups()) break;
    const float4 four = logits.four(group, n % (kGroup / 4), logits.slot(group));
    part.add(four.x);
    part.add(four.y);
    part.add(four.z);
    part.add(four.w);
  }
  UnitNumbers found;
#pragma unroll
  for (int i = 0; i < 3; ++i) found.sums[i] = warp_reduce(part.sums[i], Plus());
  found.sums[3] = how.needs == Needs::spread ? warp_reduce(part.sums[3], Smaller()) : warp_reduce(part.sums[3], Plus());
  if (lane_index() != 0) return;
  call.workspace.unit_tops[row * call.units + unit] = top;
  call.workspace.unit_numbers[row * call.units + unit] = found;
}

// Computes the numbers of a chunk's units, after their maxima. Begins with a barrier.
__device__ TOPW_OUT_OF_LINE inline void measure_units(const Call &call, const Chunk &chunk) {
  TOPW_SHARED(Measuring, how);
  if (own_index() == 0) how = measuring_of(call, chunk.row);
  __syncthreads();
  if (how.needs == Needs::nothing) return;
  const LogitRow logits(call, chunk.row);
  const int32_t end = (chunk.last + kUnitGroups - 1) / kUnitGroups;
#pragma unroll 1
  for (int32_t unit = chunk.first / kUnitGroups + warp_index(); unit < end; unit += warps())
    measure_unit(call, logits, chunk.row, unit, how);
}

// Reads another block's numbers, past L1.
__device__ inline UnitNumbers unit_numbers(const Call &call, int64_t row, int32_t unit) {
  const double *const from = call.workspace.unit_numbers[row * call.units + unit].sums;
  UnitNumbers numbers;
#pragma unroll
  for (int i = 0; i < 4; ++i) numbers.sums[i] = __ldcg(from + i);
  return numbers;
}

// Adds the weights of all units, in units of the weight of `top`. One unit that has `top` gives its largest token the
// weight 1.
__device__ inline RowNumbers added_weights(const Call &call, int64_t row, const Parameters &P, float top) {
  const float *const tops = call.workspace.unit_tops + row * call.units;
  int32_t best = INT32_MAX;
#pragma unroll 1
  for (int32_t unit = lane_index(); unit < call.units && best == INT32_MAX; unit += kWarp)
    if (__ldcg(tops + unit) == top) best = unit;
  best = warp_reduce(best, Smaller());
  RowNumbers sums = {};
#pragma unroll 1
  for (int32_t unit = lane_index(); unit < call.units; unit += kWarp) {
    const float unit_top = __ldcg(tops + unit);
    if (unit_top == -static_cast<float>(INFINITY)) continue;
    const UnitNumbers of = unit_numbers(call, row, unit);
    const double log = log_weight(unit_top, top, P.selection), scale = exp(log), equal = of.sums[3];
    if (scale == 0) continue;
    sums.rest += scale * (of.sums[0] + (unit == best ? equal - 1 : equal));
    sums.surprise += scale * (of.sums[1] - log * (of.sums[0] + equal));
    sums.squares += scale * scale * (of.sums[2] + (unit == best ? equal - 1 : equal));
  }
  sums.rest = warp_reduce(sums.rest, Plus());
  sums.surprise = warp_reduce(sums.surprise, Plus());
  sums.squares = warp_reduce(sums.squares, Plus());
  return sums;
}

__device__ inline RowNumbers added_spread(const Call &call, int64_t row, float top) {
  double count = 0, sum = 0, squares = 0, lowest = 0;
#pragma unroll 1
  for (int32_t unit = lane_index(); unit < call.units; unit += kWarp) {
    const float unit_top = __ldcg(call.workspace.unit_tops + row * call.units + unit);
    if (unit_top == -static_cast<float>(INFINITY)) continue;
    const UnitNumbers of = unit_numbers(call, row, unit);
    const double below = static_cast<double>(unit_top) - static_cast<double>(top);
    count += of.sums[0];
    sum += of.sums[1] + below * of.sums[0];
    squares += of.sums[2] + below * (2 * of.sums[1] + below * of.sums[0]);
    lowest = of.sums[3] + below < lowest ? of.sums[3] + below : lowest;
  }
  count = warp_reduce(count, Plus());
  sum = warp_reduce(sum, Plus());
  squares = warp_reduce(squares, Plus());
  lowest = warp_reduce(lowest, Smaller());
  const double about_mean = squares - sum * (sum / count);
  RowNumbers numbers = {};
  numbers.count = count;
  numbers.lowest = static_cast<double>(top) + lowest;
  numbers.deviation = count > 1 && about_mean > 0 ? sqrt(about_mean / (count - 1)) : 0;
  return numbers;
}

// The numbers of a row with a finite `top`. Called by one warp of the row's last block.
__device__ inline RowNumbers added_units(const Call &call, int64_t row, const Parameters &P, float top, Needs needs) {
  if (needs == Needs::weights) return added_weights(call, row, P, top);
  if (needs == Needs::spread) return added_spread(call, row, top);
  return {};
}

}  // namespace topw
#endif
