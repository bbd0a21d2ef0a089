// What a rule keeps, decided from a row's best tokens where these prove it.
#ifndef TOPW_CUDA_RULE_SCAN_CUH
#define TOPW_CUDA_RULE_SCAN_CUH

#include "block.h"
#include "logits.h"
#include "pairs.h"
#include "rules.h"

namespace topw {

// A row's best tokens in order: keys of token_key [size], size >= 1, in shared memory or written by this block.
// complete: no other token can be kept: these are all finite ones, or all that reach the rule's edge.
struct BestTokens {
  const uint64_t *keys;
  int32_t size;
  bool complete;
};

class RuleScan {
 public:
  // room: [best.size] doubles.
  __device__ RuleScan(const RulePlan &plan, const Cooling &selection, float top, const BestTokens &best, double *room,
                      BlockScratch &scratch)
      : plan_(plan), selection_(selection), top_(top), best_(best), room_(room), scratch_(scratch) {}

  // The number of tokens kept; 0 if it depends on tokens beyond these. Ends with a barrier.
  __device__ TOPW_OUT_OF_LINE int32_t run() {
    switch (plan_.limit) {
      case Limit::first: return 1;
      case Limit::edge: return of_edge();
      case Limit::count: return plan_.count <= best_.size ? plan_.count : unproven();
      case Limit::mass: return of_mass();
      case Limit::entropy: return of_entropy();
      case Limit::cliff: return of_cliff();
      case Limit::typical: return 0;
    }
    return 0;
  }

 private:
  __device__ float logit(int32_t i) const { return logit_of(best_.keys[i]); }
  __device__ int32_t unproven() const { return best_.complete ? best_.size : 0; }

  // The first token for which `holds`, from 0; the number of tokens if none.
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

  // The decay after place i is at most (l_i - l_n) / i from there on.
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

  // Of the logits at places i and i + 1, counted from 1.
  __device__ static double decay(float logit, double next, int32_t i) {
    return (static_cast<double>(logit) - next) / static_cast<double>(i);
  }

  const RulePlan &plan_;
  const Cooling &selection_;
  const float top_;
  const BestTokens best_;
  double *const room_;
  BlockScratch &scratch_;
};

}  // namespace topw
#endif
