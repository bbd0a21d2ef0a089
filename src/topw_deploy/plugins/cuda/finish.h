// The end of every row: draw and outputs (docs/contract/graph.md, section 5).
#ifndef TOPW_CUDA_FINISH_H
#define TOPW_CUDA_FINISH_H

#include "../native/objective.h"
#include "mass.cuh"
#include "pairs.h"

namespace topw {

// A crop: `size` keys of token_key, best first, in shared memory or in global memory written by this block.
struct Kept {
  const uint64_t *keys;
  int32_t size;
  bool certified;
};

// The drawn token's place. `G` [size]: inclusive sums of weights at the drawing temperature.
__device__ inline int32_t draw(const Parameters &P, const Kept &kept, const double *G, BlockScratch &scratch) {
  const double reached = P.uniform * G[kept.size - 1];
  int32_t first = kept.size - 1;
#pragma unroll 1
  for (int32_t i = own_index(); i < first; i += block_size())
    if (G[i] > reached) first = i;
  return block_reduce(first, Smaller(), scratch);
}

// Inclusive sums of the crop's weights at a temperature, without a lower bound, into `room`.
__device__ TOPW_OUT_OF_LINE inline void sum_weights(const Kept &kept, float top, double temperature, double *room,
                                   BlockScratch &scratch) {
  if (own_index() < kept.size) {
    const Cooling by = cooling_of(temperature);
#pragma unroll 1
    for (int32_t i = own_index(); i < kept.size; i += block_size())
      room[i] = weight_of(logit_of(kept.keys[i]), top, by, false).weight;
  }
  block_scan(room, nullptr, kept.size, scratch);
}

// What a row returns, but for `mass` and `keep_mask`. total: the kept weights at the drawing temperature, in units of
// the `largest` kept logit's.
struct Drawn {
  uint64_t key;
  float largest;
  double total;
  int32_t kept;
  bool certified;
};

// By one thread: small GPUs have few double units.
__device__ inline void write_answer(const Call &call, int64_t row, const Parameters &P, const Drawn &drawn,
                                    const topw_report &report) {
  const topw_outputs &out = call.outputs;
  out.next_token[row] = id_of(drawn.key);
  out.logprob[row] =
      P.greedy ? 0
               : static_cast<float>(log_weight(logit_of(drawn.key), drawn.largest, P.temperature) - log(drawn.total));
  out.kept[row] = drawn.kept;
  out.certified[row] = drawn.certified;
  if (out.reports) out.reports[row] = report;
}

__device__ inline void write_outputs(const Call &call, int64_t row, const Parameters &P, const Kept &kept,
                                     int32_t place, double total, const topw_report &report) {
  if (call.outputs.keep_mask) {
#pragma unroll 1
    for (int32_t i = own_index(); i < kept.size; i += block_size())
      call.outputs.keep_mask[row * call.inputs.vocab + id_of(kept.keys[i])] = 1;
  }
  if (own_index() == 0)
    write_answer(call, row, P, {kept.keys[place], logit_of(kept.keys[0]), total, kept.size, kept.certified}, report);
}

// Draws, and writes the row's outputs. All threads call it, after a barrier that follows the writes to `kept.keys`; it
// ends with a barrier. `room`: [kept.size] doubles of scratch, holding sum_weights at the drawing temperature if
// `weighed`. `top`: the row's largest logit, which with a negative geom_scale the crop may lack.
__device__ inline void finish_row(const Call &call, int64_t row, const Parameters &P, float top, const Kept &kept,
                                  const topw_report &report, double *room, BlockScratch &scratch,
                                  bool weighed = false) {
  int32_t place = 0;
  if (!P.greedy) {
    if (!weighed) sum_weights(kept, logit_of(kept.keys[0]), P.temperature, room, scratch);
    place = draw(P, kept, room, scratch);
  }
  write_outputs(call, row, P, kept, place, P.greedy ? 1 : room[kept.size - 1], report);
  __syncthreads();
  if (!call.outputs.mass) return;
  if (P.certain_selection) {
    if (own_index() == 0) call.outputs.mass[row] = 1;
    return;
  }
  sum_weights(kept, top, P.selection, room, scratch);
  write_mass(call, row, P, top, room[kept.size - 1]);
  __syncthreads();
}

}  // namespace topw
#endif
