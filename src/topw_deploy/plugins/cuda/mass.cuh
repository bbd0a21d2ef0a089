// The third launch, where the caller asks for `mass`: each crop's share of the softmax over the whole row at the
// selection temperature, within 3e-7 relative.
#ifndef TOPW_CUDA_MASS_CUH
#define TOPW_CUDA_MASS_CUH

#include "block.h"
#include "logits.h"

namespace topw {

constexpr unsigned kMassThreads = 256;
constexpr float kNegligible = -100.0f;  // e^-100 of the largest adds nothing

// The weight of a logit, in units of the largest: exp in float32 of a double, whose rounding is made up for.
__device__ inline double weight_in_row(float logit, double top, double rate) {
  const double a = (static_cast<double>(logit) - top) * rate;
  if (!(a > static_cast<double>(kNegligible))) return 0;
  const float rounded = static_cast<float>(a), rest = static_cast<float>(a - static_cast<double>(rounded));
  const float e = expf(rounded);
  return static_cast<double>(e + e * rest);
}

// One warp's sum over one unit of the row, in an order of its own.
__device__ inline double mass_of_unit(const LogitRow &logits, int32_t unit, double top, double rate) {
  double sum = 0;
  for (int32_t k = lane_index(); k < kMassUnit; k += kWarp) {
    const int32_t id = unit * static_cast<int32_t>(kMassUnit) + k;
    if (id < logits.vocab()) sum += weight_in_row(logits.at(id), top, rate);
  }
  return warp_reduce(sum, Plus());
}

// Blocks: `of_row` for every row, one row after another; a warp has a unit.
__global__ void __launch_bounds__(kMassThreads) mass(const __grid_constant__ Call call, int32_t of_row) {
  TOPW_SHARED(BlockScratch, scratch);
  TOPW_SHARED(uint32_t, last);
  const int64_t row = blockIdx.x / static_cast<unsigned>(of_row);
  const int32_t units = static_cast<int32_t>((call.inputs.vocab + kMassUnit - 1) / kMassUnit);
  const RowState &state = call.workspace.rows[row];
  if (!state.valid || state.parameters.certain_selection) {
    if (own_index() == 0 && blockIdx.x % static_cast<unsigned>(of_row) == 0)
      call.outputs.mass[row] = state.valid ? 1.0f : 0.0f;
    return;
  }
  double *const sums = call.workspace.masses + row * units;
  const int32_t unit = static_cast<int32_t>(blockIdx.x % static_cast<unsigned>(of_row)) * warps() + warp_index();
  if (unit < units) {
    const double sum = mass_of_unit(LogitRow(call, row), unit, static_cast<double>(state.top),
                                    1 / state.parameters.selection);
    if (lane_index() == 0) sums[unit] = sum;
  }
  __syncthreads();
  if (own_index() == 0) {
    last = take_ticket(&call.workspace.tickets[row]) == static_cast<uint32_t>(of_row) - 1;
    if (last) call.workspace.tickets[row] = 0;
  }
  __syncthreads();
  if (!last) return;
  double *const total = reinterpret_cast<double *>(dynamic_shared());
  for (int32_t i = own_index(); i < units; i += block_size()) total[i] = __ldcg(sums + i);
  block_scan(total, nullptr, units, scratch);
  if (own_index() == 0) call.outputs.mass[row] = static_cast<float>(state.kept_weight / total[units - 1]);
}

}  // namespace topw
#endif
