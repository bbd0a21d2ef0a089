// The pool of a row: its best finite logits, sorted (docs/graph.md, section 3). By one block.
//
// The maxima of the groups of 64 logits say which groups can hold such tokens: all tokens from the `wanted`-th largest
// maximum up are at least `wanted`. Where there are fewer groups than that, or more tokens than can be sorted, the
// tokens are counted in 256 steps between the largest logit and a likely bound. What is left, a row crowded into few
// groups or full of equal logits, is selected bit by bit from the whole row.
#ifndef TOPW_CUDA_POOL_H
#define TOPW_CUDA_POOL_H

#include <float.h>
#include <math.h>

#include "block.h"
#include "logits.h"

namespace topw::crop {

constexpr int kQuarters = kGroup / 4;   // a group is read in so many pieces of four
constexpr int kAtOnce = 4, kAFew = 2;   // of them that a thread asks for before it waits for the first
constexpr int kSteps = 256;

// Which tokens are taken: those not under `bound`, and at most `last_step` steps under the row's largest.
struct Cut {
  float bound;      // finite
  int32_t last_id;  // of the tokens at it
  float top, rate;  // (top - logit) * rate is the step; 0: all are at step 0
  int32_t last_step;

  __device__ bool holds(float logit, int32_t id) const { return logit > bound || (logit == bound && id <= last_id); }
  // Of a token that it holds.
  __device__ int32_t step(float logit) const { return rate > 0 ? static_cast<int32_t>((top - logit) * rate) : 0; }
  __device__ bool takes(float logit, int32_t id) const { return holds(logit, id) && step(logit) <= last_step; }
};

class PoolTaker {
 public:
  // keys [capacity] in shared memory, capacity a power of 2 and at least `wanted`; groups [row.groups()] in global.
  __device__ PoolTaker(const LogitRow &row, float top, int32_t wanted, uint64_t *keys, int32_t capacity,
                       int32_t *groups, BlockScratch &scratch)
      : row_(row), top_(top), wanted_(wanted), keys_(keys), capacity_(capacity), groups_(groups), scratch_(scratch) {}

  // Leaves the keys of the pool's tokens in `keys`, sorted; how many. Fewer than wanted only if no more are finite.
  __device__ TOPW_OUT_OF_LINE int32_t run() {
    int32_t count = from_maxima();
    if (count < 0) count = selected();
    for (int32_t i = count + own_index(); i < power_of_two_from(count); i += block_size()) keys_[i] = ~uint64_t{0};
    block_sort(keys_, nullptr, power_of_two_from(count));
    return count < wanted_ ? count : wanted_;
  }

 private:
  static constexpr float kLowest = -FLT_MAX;

  __device__ Cut everything_from(uint32_t bound) const {
    const uint32_t lowest = descending_key(kLowest);
    return {value_of_key(bound < lowest ? bound : lowest), INT32_MAX, top_, 0.0f, 0};
  }

  // -1: not to be had so.
  __device__ int32_t from_maxima() {
    if (row_.vocab() <= capacity_) return take(everything_from(~uint32_t{0}));
    const int32_t groups = row_.groups();
    const bool enough_groups = groups > wanted_;
    Cut cut = list_groups(groups, enough_groups ? wanted_ : likely_groups(groups));
    if (enough_groups) {
      const int32_t count = take(cut);
      if (count <= capacity_) return count;
    }
    if (!narrow(cut)) return -1;
    const int32_t count = take(cut);
    return count >= wanted_ && count <= capacity_ ? count : -1;
  }

  // Lists the groups whose maxima are about the `reached` largest; what they hold from the least of these maxima up.
  // The maxima are read once, to where keys will lie later, if there is room.
  __device__ Cut list_groups(int32_t groups, int32_t reached) {
    uint32_t *const staged = groups <= 2 * capacity_ ? reinterpret_cast<uint32_t *>(keys_) : nullptr;
    if (staged) {
      for (int32_t g = own_index(); g < groups; g += block_size()) staged[g] = descending_key(row_.maximum(g));
      __syncthreads();
    }
    const auto key = [&](int32_t g) { return staged ? staged[g] : descending_key(row_.maximum(g)); };
    const uint32_t bound = block_select(groups, key, reached, reached + reached / 8, scratch_);
    const Cut cut = everything_from(bound);
    const uint32_t least = descending_key(cut.bound);
    listed_ = block_compact(
        groups, [&](int32_t g) { return key(g) <= least; }, [&](int32_t g, int32_t place) { groups_[place] = g; },
        scratch_);
    return cut;
  }

  // So many groups have a maximum among some two times the tokens wanted, if chance has thrown these into the groups.
  __device__ int32_t likely_groups(int32_t groups) const {
    const float share = 1 - expf(-2.0f * static_cast<float>(wanted_) / static_cast<float>(groups));
    const int32_t likely = static_cast<int32_t>(share * static_cast<float>(groups));
    return likely < 1 ? 1 : likely > groups ? groups : likely;
  }

  // Counts the tokens that `cut` takes by steps, and has it take no more steps than needed. False if they are too few,
  // or too many in one step, or the steps have no width.
  __device__ TOPW_OUT_OF_LINE bool narrow(Cut &cut) {
    const float range = top_ - cut.bound;
    if (!(range > 0 && range < FLT_MAX)) return false;
    cut.rate = static_cast<float>(kSteps) / range;
    if (!(cut.rate < FLT_MAX)) return false;
    for (int32_t b = own_index(); b < kSteps; b += block_size()) scratch_.bins[b] = 0;
    __syncthreads();
    for_each_batch<kAFew>([&](int32_t, const Batch<kAFew> &batch) {
      for_each_token<kAFew>(batch, [&](int, float logit, int32_t id) {
        if (!cut.holds(logit, id)) return;
        const int32_t step = cut.step(logit);
        atomicAdd(&scratch_.bins[step < kSteps ? step : kSteps - 1], 1u);
      });
    });
    __syncthreads();
    if (warp_index() == 0) find_step();
    __syncthreads();
    const int32_t step = static_cast<int32_t>(scratch_.chosen[0]), found = static_cast<int32_t>(scratch_.chosen[1]);
    __syncthreads();
    if (step >= kSteps - 1) return false;  // the last one may hold what lies behind it, too
    cut.last_step = step;
    return found <= capacity_;
  }

  // The first step by which the tokens are as many as wanted, and how many they are; by one warp.
  __device__ void find_step() {
    constexpr int kEach = kSteps / kWarp;
    const int first = kEach * lane_index();
    uint32_t sum = 0;
    for (int b = first; b < first + kEach; ++b) sum += scratch_.bins[b];
    uint32_t reached = warp_scan(sum) - sum;
    if (lane_index() == 0) scratch_.chosen[0] = kSteps;
    __syncwarp();
    const uint32_t wanted = static_cast<uint32_t>(wanted_);
    if (reached >= wanted || reached + sum < wanted) return;
    int b = first;
    for (; reached + scratch_.bins[b] < wanted; ++b) reached += scratch_.bins[b];
    scratch_.chosen[0] = static_cast<uint32_t>(b);
    scratch_.chosen[1] = reached + scratch_.bins[b];
  }

  __device__ TOPW_OUT_OF_LINE float logit_at(int32_t id) const { return row_.at(id); }

  // From the whole row, whatever it holds.
  __device__ TOPW_OUT_OF_LINE int32_t selected() {
    const auto key = [&](int32_t id) { return descending_key(logit_at(id)); };
    listed_ = -1;
    Cut cut = everything_from(block_select(row_.vocab(), key, wanted_, capacity_, scratch_));
    int32_t count = take(cut);
    if (count <= capacity_) return count;
    // More are equal at the end than there is room for: the lowest ids of them.
    cut = everything_from(block_select(row_.vocab(), key, wanted_, wanted_, scratch_));
    cut.last_id = -1;
    const int32_t equals = wanted_ - take(cut);
    const float bound = cut.bound;
    cut.last_id = static_cast<int32_t>(block_select(
        row_.vocab(), [&](int32_t id) { return logit_at(id) == bound ? static_cast<uint32_t>(id) : 0xffffffffu; },
        equals, equals, scratch_));
    return take(cut);
  }

  template <int kCount>
  struct Batch {
    float4 logits[kCount];
    int32_t ids[kCount];  // of the first of each four
  };

  // The keys of the tokens that `cut` takes, in no order, as far as there is room; how many they are.
  __device__ TOPW_OUT_OF_LINE int32_t take(const Cut &cut) {
    if (own_index() == 0) scratch_.chosen[0] = 0;
    __syncthreads();
    for_each_batch<kAtOnce>([&](int32_t first, const Batch<kAtOnce> &batch) {
      uint32_t taken = 0;  // a bit for each token
      for_each_token<kAtOnce>(batch, [&](int bit, float logit, int32_t id) {
        taken |= static_cast<uint32_t>(cut.takes(logit, id)) << bit;
      });
      if (!__any_sync(kEveryLane, taken != 0)) return;
      const uint32_t own = static_cast<uint32_t>(__popc(taken)), sum = warp_scan(own);
      uint32_t place = 0;
      if (lane_index() == kWarp - 1) place = atomicAdd(&scratch_.chosen[0], sum);
      place = __shfl_sync(kEveryLane, place, kWarp - 1) + sum - own;
      for (; taken; taken &= taken - 1, ++place) {  // few: so they are read again, and not kept in every register
        const int bit = __ffs(static_cast<int>(taken)) - 1;
        const int32_t id = first_id(first + bit / 4 * block_size()) + bit % 4;
        if (place < static_cast<uint32_t>(capacity_)) keys_[place] = token_key(logit_at(id), id);
      }
    });
    __syncthreads();
    const int32_t count = static_cast<int32_t>(scratch_.chosen[0]);
    __syncthreads();
    return count;
  }

  template <int kCount, class Visit>
  __device__ static void for_each_token(const Batch<kCount> &batch, Visit visit) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      visit(4 * n, batch.logits[n].x, batch.ids[n]);
      visit(4 * n + 1, batch.logits[n].y, batch.ids[n] + 1);
      visit(4 * n + 2, batch.logits[n].z, batch.ids[n] + 2);
      visit(4 * n + 3, batch.logits[n].w, batch.ids[n] + 3);
    }
  }

  // The first of four tokens, counted over the listed groups or all.
  __device__ int32_t first_id(int32_t piece) const {
    const int32_t group = listed_ < 0 ? piece / kQuarters : groups_[piece / kQuarters];
    return group * kGroup + piece % kQuarters * 4;
  }

  // visit(piece, batch) until the tokens of the listed groups, or of all, have come; by whole warps, -inf where there
  // is none. `piece` is the thread's first four of the batch, the others follow at a block's distance.
  template <int kCount, class Visit>
  __device__ void for_each_batch(Visit visit) {
    const int32_t pieces = (listed_ < 0 ? row_.groups() : listed_) * kQuarters;
    float4 none;
    none.x = none.y = none.z = none.w = -static_cast<float>(INFINITY);
#pragma unroll 1
    for (int32_t first = 0; first < pieces; first += kCount * block_size()) {
      Batch<kCount> batch;
      int32_t slots[kCount];
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        const int32_t piece = first + n * block_size() + own_index();
        batch.ids[n] = piece < pieces ? first_id(piece) : -1;
        slots[n] = piece < pieces ? row_.slot(batch.ids[n] / kGroup) : -1;
      }
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        batch.logits[n] = none;
        const int32_t id = batch.ids[n];
        if (id >= 0) batch.logits[n] = row_.four(id / kGroup, id % kGroup / 4, slots[n]);
      }
      visit(first + own_index(), batch);
    }
  }

  const LogitRow &row_;
  float top_;
  int32_t wanted_;
  uint64_t *keys_;
  int32_t capacity_;
  int32_t *groups_;
  BlockScratch &scratch_;
  int32_t listed_ = -1;  // groups; -1: all
};

}  // namespace topw::crop
#endif
