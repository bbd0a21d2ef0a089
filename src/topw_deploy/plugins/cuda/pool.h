// The pool of a row: its best finite logits, sorted (docs/contract/graph.md, section 3). A leading block decides, all
// blocks read.
//
// The groups to read follow from their maxima: at least `wanted` tokens reach the `wanted`-th largest. With fewer
// groups, or too many tokens to sort, tokens are counted in 256 steps between the largest logit and a likely bound.
// Otherwise (a row crowded into few groups, or full of ties) the pool is selected bit by bit from the whole row.
#ifndef TOPW_CUDA_POOL_H
#define TOPW_CUDA_POOL_H

#include <float.h>
#include <math.h>

#include "jobs.h"
#include "logits.h"

namespace topw::crop {

constexpr int kQuarters = kGroup / 4;   // pieces of four per group
constexpr int kAtOnce = 4;              // pieces in flight per thread, which make an item

__device__ __forceinline__ bool holds(const Cut &cut, float logit, int32_t id) {
  return logit > cut.bound || (logit == cut.bound && id <= cut.last_id);
}
// The step of a token in the cut.
__device__ __forceinline__ int32_t step_of(const Cut &cut, float logit) {
  return cut.rate > 0 ? static_cast<int32_t>((cut.top - logit) * cut.rate) : 0;
}
__device__ __forceinline__ bool takes(const Cut &cut, float logit, int32_t id) {
  return holds(cut, logit, id) && step_of(cut, logit) <= cut.last_step;
}

// Reads the tokens of the listed or all groups for one item: kAtOnce pieces of four per thread.
class PoolReader {
 public:
  __device__ PoolReader(const LogitRow &row, const Job &job, const Memory &memory, BlockScratch &scratch)
      : row_(row), cut_(job.cut), listed_(job.listed), memory_(memory), scratch_(scratch) {}

  // Number of items for blocks of this size.
  __device__ int32_t items() const { return (pieces() + kAtOnce * block_size() - 1) / (kAtOnce * block_size()); }

  // Adds the item's tokens to the counts per step after memory.found.
  __device__ TOPW_OUT_OF_LINE void count(int32_t item) {
    for (int32_t b = own_index(); b < kSteps; b += block_size()) scratch_.bins[b] = 0;
    __syncthreads();
    const Batch batch = read(item);
    for_each_token(batch, [&](int, float logit, int32_t id) {
      if (!holds(cut_, logit, id)) return;
      const int32_t step = step_of(cut_, logit);
      atomicAdd(&scratch_.bins[step < kSteps ? step : kSteps - 1], 1u);
    });
    __syncthreads();
    for (int32_t b = own_index(); b < kSteps; b += block_size())
      if (scratch_.bins[b]) atomicAdd(memory_.found + 1 + b, scratch_.bins[b]);
  }

  // Appends the keys of the item's tokens in the cut, up to the capacity; counts all.
  __device__ TOPW_OUT_OF_LINE void take(int32_t item) {
    append(item, [&](float logit, int32_t id) { return takes(cut_, logit, id); });
  }

 protected:
  template <class Takes>
  __device__ void append(int32_t item, Takes takes) {
    const Batch batch = read(item);
    uint32_t taken = 0;  // a bit for each token
    for_each_token(batch, [&](int bit, float logit, int32_t id) {
      taken |= static_cast<uint32_t>(takes(logit, id)) << bit;
    });
    if (!__any_sync(kEveryLane, taken != 0)) return;
    const uint32_t own = static_cast<uint32_t>(__popc(taken)), sum = warp_scan(own);
    uint32_t place = 0;
    if (lane_index() == kWarp - 1) place = atomicAdd(memory_.found, sum);
    place = __shfl_sync(kEveryLane, place, kWarp - 1) + sum - own;
    for (; taken; taken &= taken - 1, ++place) {  // few, so read again instead of kept in registers
      const int bit = __ffs(static_cast<int>(taken)) - 1;
      const int32_t id = first_id(first_piece(item) + bit / 4 * block_size()) + bit % 4;
      if (place < static_cast<uint32_t>(kMostTaken)) memory_.taken[place] = token_key(row_.at(id), id);
    }
  }

  struct Batch {
    float4 logits[kAtOnce];
    int32_t ids[kAtOnce];  // first of each four
  };

  __device__ int32_t pieces() const { return (listed_ < 0 ? row_.groups() : listed_) * kQuarters; }
  __device__ int32_t first_piece(int32_t item) const { return item * kAtOnce * block_size() + own_index(); }

  // The first of four tokens, by position in the listed groups or in all.
  __device__ int32_t first_id(int32_t piece) const {
    const int32_t group = listed_ < 0 ? piece / kQuarters : __ldcg(memory_.groups + piece / kQuarters);
    return group * kGroup + piece % kQuarters * 4;
  }

  // A thread's pieces, a block's size apart; -inf if none.
  __device__ Batch read(int32_t item) const {
    Batch batch;
    int32_t slots[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int32_t piece = first_piece(item) + n * block_size();
      batch.ids[n] = piece < pieces() ? first_id(piece) : -1;
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) slots[n] = batch.ids[n] >= 0 ? row_.slot(batch.ids[n] / kGroup) : -1;
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int32_t id = batch.ids[n];
      batch.logits[n].x = batch.logits[n].y = batch.logits[n].z = batch.logits[n].w = -static_cast<float>(INFINITY);
      if (id >= 0) batch.logits[n] = row_.four(id / kGroup, id % kGroup / 4, slots[n]);
    }
    return batch;
  }

  template <class Visit>
  __device__ static void for_each_token(const Batch &batch, Visit visit) {
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      visit(4 * n, batch.logits[n].x, batch.ids[n]);
      visit(4 * n + 1, batch.logits[n].y, batch.ids[n] + 1);
      visit(4 * n + 2, batch.logits[n].z, batch.ids[n] + 2);
      visit(4 * n + 3, batch.logits[n].w, batch.ids[n] + 3);
    }
  }

  const LogitRow &row_;
  const Cut cut_;
  const int32_t listed_;
  const Memory &memory_;
  BlockScratch &scratch_;
};

// The leading block's part.
class PoolTaker {
 public:
  // keys [capacity]: in shared memory, capacity a power of 2, at least `wanted`, at most kMostTaken.
  __device__ PoolTaker(const LogitRow &row, float top, int32_t wanted, uint64_t *keys, int32_t capacity, Job &job,
                       const Memory &memory, Leader &leader, BlockScratch &scratch)
      : row_(row),
        top_(top),
        wanted_(wanted),
        keys_(keys),
        capacity_(capacity),
        job_(job),
        memory_(memory),
        leader_(leader),
        scratch_(scratch) {
    job_.listed = -1;
  }

  // Writes the pool's sorted keys to `keys`. Returns their number, less than wanted only if no more are finite.
  __device__ TOPW_OUT_OF_LINE int32_t run() {
    int32_t count = from_maxima();
    if (count < 0) count = selected();
    load_together(count, [&](int32_t i) { return __ldcg(memory_.taken + i); },
                  [&](int32_t i, uint64_t key) { keys_[i] = key; });
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

  // -1: not possible.
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

  // Lists the groups with about the `reached` largest maxima; the least of these bounds their tokens. Reads the maxima
  // once, into `keys`, if they fit.
  __device__ Cut list_groups(int32_t groups, int32_t reached) {
    uint32_t *const staged = groups <= 2 * capacity_ ? reinterpret_cast<uint32_t *>(keys_) : nullptr;
    if (staged) {
      load_together(groups, [&](int32_t g) { return row_.maximum(g); },
                    [&](int32_t g, float maximum) { staged[g] = descending_key(maximum); });
      __syncthreads();
    }
    const auto key = [&](int32_t g) { return staged ? staged[g] : descending_key(row_.maximum(g)); };
    const uint32_t bound = block_select(groups, key, reached, reached + reached / 8, scratch_);
    const Cut cut = everything_from(bound);
    const uint32_t least = descending_key(cut.bound);
    job_.listed = block_compact(
        groups, [&](int32_t g) { return key(g) <= least; },
        [&](int32_t g, int32_t place) { memory_.groups[place] = g; }, scratch_);
    return cut;
  }

  // Groups with a maximum among about twice the wanted tokens, if randomly placed.
  __device__ int32_t likely_groups(int32_t groups) const {
    const float share = 1 - expf(-2.0f * static_cast<float>(wanted_) / static_cast<float>(groups));
    const int32_t likely = static_cast<int32_t>(share * static_cast<float>(groups));
    return likely < 1 ? 1 : likely > groups ? groups : likely;
  }

  // Zeroes the items' counters; the barrier of `run` follows.
  __device__ void forget_counts() {
    for (int32_t n = own_index(); n < 1 + kSteps; n += block_size()) memory_.found[n] = 0;
  }

  // Writes the keys of the cut's tokens to memory.taken, up to its capacity. Returns their number.
  __device__ int32_t take(const Cut &cut) {
    forget_counts();
    job_.work = Work::take_tokens;
    job_.cut = cut;
    PoolReader reader(row_, job_, memory_, scratch_);
    leader_.run(job_, reader.items(), [&](int32_t item) { reader.take(item); });
    const int32_t count = static_cast<int32_t>(__ldcg(memory_.found));
    __syncthreads();  // before the next job overwrites it
    return count;
  }

  // Narrows the cut by counting tokens per step. False for too few tokens, too many in one step, or steps without
  // width.
  __device__ TOPW_OUT_OF_LINE bool narrow(Cut &cut) {
    const float range = top_ - cut.bound;
    if (!(range > 0 && range < FLT_MAX)) return false;
    cut.rate = static_cast<float>(kSteps) / range;
    if (!(cut.rate < FLT_MAX)) return false;
    forget_counts();
    job_.work = Work::count_steps;
    job_.cut = cut;
    PoolReader reader(row_, job_, memory_, scratch_);
    leader_.run(job_, reader.items(), [&](int32_t item) { reader.count(item); });
    if (warp_index() == 0) find_step();
    __syncthreads();
    const int32_t step = static_cast<int32_t>(scratch_.chosen[0]), found = static_cast<int32_t>(scratch_.chosen[1]);
    __syncthreads();
    if (step >= kSteps - 1) return false;  // the last step includes everything below it
    cut.last_step = step;
    return found <= capacity_;
  }

  // The first step that reaches the wanted number of tokens, and that number; by one warp.
  __device__ void find_step() {
    constexpr int kEach = kSteps / kWarp;
    const int first = kEach * lane_index();
    uint32_t counts[kEach], sum = 0;
#pragma unroll
    for (int b = 0; b < kEach; ++b) sum += counts[b] = __ldcg(memory_.found + 1 + first + b);
    uint32_t reached = warp_scan(sum) - sum;
    if (lane_index() == 0) scratch_.chosen[0] = kSteps;
    __syncwarp();
    const uint32_t wanted = static_cast<uint32_t>(wanted_);
    if (reached >= wanted || reached + sum < wanted) return;
    bool found = false;
#pragma unroll
    for (int b = 0; b < kEach; ++b) {
      reached += found ? 0 : counts[b];
      if (found || reached < wanted) continue;
      found = true;
      scratch_.chosen[0] = static_cast<uint32_t>(first + b);
      scratch_.chosen[1] = reached;
    }
  }

  // Selects from the whole row.
  __device__ TOPW_OUT_OF_LINE int32_t selected() {
    const auto key = [&](int32_t id) { return descending_key(row_.at(id)); };
    job_.listed = -1;
    Cut cut = everything_from(block_select(row_.vocab(), key, wanted_, capacity_, scratch_));
    int32_t count = take(cut);
    if (count <= capacity_) return count;
    // Too many ties at the cut: takes the lowest ids.
    cut = everything_from(block_select(row_.vocab(), key, wanted_, wanted_, scratch_));
    cut.last_id = -1;
    const int32_t equals = wanted_ - take(cut);
    const float bound = cut.bound;
    cut.last_id = static_cast<int32_t>(block_select(
        row_.vocab(), [&](int32_t id) { return row_.at(id) == bound ? static_cast<uint32_t>(id) : 0xffffffffu; },
        equals, equals, scratch_));
    return take(cut);
  }

  const LogitRow &row_;
  float top_;
  int32_t wanted_;
  uint64_t *keys_;
  int32_t capacity_;
  Job &job_;
  const Memory &memory_;
  Leader &leader_;
  BlockScratch &scratch_;
};

}  // namespace topw::crop
#endif
