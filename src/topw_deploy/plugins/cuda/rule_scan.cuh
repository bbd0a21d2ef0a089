// The tokens that a rule keeps, decided from a row's best tokens if these prove it.
#ifndef TOPW_CUDA_RULE_SCAN_CUH
#define TOPW_CUDA_RULE_SCAN_CUH

#include "finish.h"
#include "rules.h"

namespace topw {

// A row's best tokens in order: keys of token_key [size], size >= 1, in shared memory or written by this block.
// complete: whether no other token can be kept, because these are all finite ones, or all that reach the rule's edge.
struct BestTokens {
  uint64_t *keys;
  int32_t size;
  bool complete;
};

class RuleScan {
 public:
  // spare, items: arrays of the smallest power of 2 >= best.size.
  __device__ RuleScan(const RulePlan &plan, const Cooling &selection, float top, const BestTokens &best,
                      uint64_t *spare, uint32_t *items, BlockScratch &scratch)
      : plan_(plan),
        selection_(selection),
        top_(top),
        best_(best),
        spare_(spare),
        items_(items),
        room_(reinterpret_cast<double *>(spare)),
        scratch_(scratch) {}

  // The kept tokens; none if they depend on tokens other than these. Ends with a barrier.
  __device__ TOPW_OUT_OF_LINE Kept run() {
    if (plan_.limit == Limit::typical) return of_typical();
    const int32_t kept = of_prefix();
    return {best_.keys, kept, kept <= kCertifiedRank};
  }

  // Scratch for finish_row.
  __device__ double *room() const { return room_; }

 private:
  __device__ int32_t of_prefix() {
    switch (plan_.limit) {
      case Limit::first: return 1;
      case Limit::edge: return of_edge();
      case Limit::count: return plan_.count <= best_.size ? plan_.count : unproven();
      case Limit::mass: return of_mass();
      case Limit::entropy: return of_entropy();
      case Limit::cliff: return of_cliff();
      case Limit::typical: break;
    }
    return 0;
  }

  __device__ float logit(int32_t i) const { return logit_of(best_.keys[i]); }
  __device__ int32_t unproven() const { return best_.complete ? best_.size : 0; }

  // The place, from 0, of the first token for which `holds` is true; the number of tokens if there is none.
  template <class Holds>
  __device__ int32_t place_of(int32_t count, Holds holds) {
    int32_t first = count;
#pragma unroll 1
    for (int32_t i = own_index(); i < first; i += block_size())
      if (holds(i)) first = i;
    return block_reduce(first, Smaller(), scratch_);
  }

  __device__ int32_t of_edge() {
    const int32_t kept = place_of(best_.size, [&](int32_t i) { return !(logit(i) >= plan_.edge); });
    return kept < best_.size ? kept : unproven();
  }

  __device__ int32_t of_mass() {
#pragma unroll 1
    for (int32_t i = own_index(); i < best_.size; i += block_size())
      room_[i] = weight_of(logit(i), top_, selection_, false).weight;
    block_scan(room_, nullptr, best_.size, scratch_);
    const int32_t last = place_of(best_.size, [&](int32_t i) { return room_[i] >= plan_.target; });
    return last < best_.size ? last + 1 : unproven();
  }

  __device__ int32_t of_entropy() {
    if (plan_.count > best_.size && !best_.complete) return 0;
    const int32_t pool = plan_.count < best_.size ? plan_.count : best_.size;
#pragma unroll 1
    for (int32_t i = own_index(); i < pool; i += block_size()) {
      const Weight of = weight_of(logit(i), top_, selection_, false);
      room_[i] = of.weight > 0 ? of.weight * (plan_.center - of.log) : 0;
    }
    block_scan(room_, nullptr, pool, scratch_);
    const double limit = plan_.target * room_[pool - 1];
    if (limit == 0) return 1;
    const int32_t kept = place_of(pool, [&](int32_t i) { return room_[i] > limit; });
    return kept > 1 ? kept : 1;
  }

  // From place i on, no decay exceeds (l_i - l_n) / i.
  __device__ int32_t of_cliff() {
    Best best = {-1.0, INT32_MAX};
#pragma unroll 1
    for (int32_t i = 1 + own_index(); i < best_.size; i += block_size())
      best = better(best, {decay(logit(i - 1), static_cast<double>(logit(i)), i), i});
    best = block_best(best, scratch_);
    const bool all = best_.complete || best_.size == plan_.finite;
    if (!all && !(best.value >= decay(logit(best_.size - 1), plan_.target, best_.size))) return 0;
    const int32_t cliff = best.place < best_.size ? best.place : 1;
    const int32_t kept = cliff > plan_.count ? cliff : plan_.count;
    return kept <= best_.size ? kept : unproven();
  }

  // A sort key for |y - center|.
  __device__ double distance(int32_t i) const {
    return fabs(-log_weight(logit(i), top_, selection_.temperature) - plan_.center);
  }

  // Sorts the tokens by distance, takes the shortest list with the wanted mass, and sorts it again by token. No other
  // token is nearer than the last of these, if that is below the center.
  __device__ Kept of_typical() {
    const int32_t size = power_of_two_from(best_.size);
#pragma unroll 1
    for (int32_t i = own_index(); i < size; i += block_size()) {
      spare_[i] = i < best_.size ? static_cast<uint64_t>(ordered(distance(i))) : ~uint64_t{0};
      items_[i] = static_cast<uint32_t>(i);
    }
    block_sort(spare_, items_, size);
#pragma unroll 1
    for (int32_t i = own_index(); i < best_.size; i += block_size())
      room_[i] = weight_of(logit(static_cast<int32_t>(items_[i])), top_, selection_, false).weight;
    block_scan(room_, nullptr, best_.size, scratch_);
    int32_t kept = place_of(best_.size, [&](int32_t i) { return room_[i] >= plan_.target; });
    kept = kept < best_.size ? kept + 1 : unproven();
    if (kept == 0) return {};
    const double farthest = distance(static_cast<int32_t>(items_[kept - 1]));
    const double last = -log_weight(logit(best_.size - 1), top_, selection_.temperature);
    if (!best_.complete && !(last >= plan_.center + farthest)) return {};
    return sorted_kept(kept);
  }

  // Sorts the tokens at the first places of items_ by token.
  __device__ Kept sorted_kept(int32_t kept) {
    const int32_t size = power_of_two_from(kept);
    int32_t last = 0;
#pragma unroll 1
    for (int32_t i = own_index(); i < size; i += block_size()) {
      spare_[i] = i < kept ? best_.keys[items_[i]] : ~uint64_t{0};
      if (i < kept) last = Larger()(last, static_cast<int32_t>(items_[i]));
    }
    last = block_reduce(last, Larger(), scratch_);
    block_sort(spare_, nullptr, size);
    room_ = reinterpret_cast<double *>(best_.keys);
    return {spare_, kept, last < kCertifiedRank};
  }

  // The decay between the logits at places i and i + 1, counted from 1.
  __device__ static double decay(float logit, double next, int32_t i) {
    return (static_cast<double>(logit) - next) / static_cast<double>(i);
  }

  const RulePlan &plan_;
  const Cooling &selection_;
  const float top_;
  const BestTokens best_;
  uint64_t *const spare_;
  uint32_t *const items_;
  double *room_;
  BlockScratch &scratch_;
};

}  // namespace topw
#endif
