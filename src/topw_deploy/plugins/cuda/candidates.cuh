// native/candidates.cpp by one block: crop and certificate from a few candidates, with the same steps and slacks.
#ifndef TOPW_CUDA_CANDIDATES_CUH
#define TOPW_CUDA_CANDIDATES_CUH

#include "finish.h"
#include "rule_scan.cuh"
#include "scan.h"

namespace topw {

constexpr int32_t kMostCandidates = 1024;  // beyond (ties, a flat row) the pool is faster
constexpr int32_t kGroupsWithinGap = 384;  // beyond, take the best few instead of all within the gap
constexpr int32_t kMostListed = 1024;      // groups searched for tokens
constexpr int32_t kRanked = 256;           // up to here sorting by counting is faster
constexpr int32_t kGroupsAtOnce = 2;       // groups in flight per warp
constexpr double kRounding = 1e-9;         // ties' bound of J and log-weights, in units of max(1, lam, beta)
constexpr double kNucleusRounding = 4e-12;  // of sums of weights; pairs.h bounds their errors

// Shared memory besides `maxima`, floats [padded_groups, at least 2 * kMostCandidates].
struct CandidateRoom {
  uint64_t keys[kMostCandidates], spare[kMostCandidates];
};
struct CandidateLists {
  uint16_t groups[kMostListed];
  uint32_t listed, found;
};

inline size_t candidate_shared_bytes(int64_t padded_groups) {
  const int64_t floats = padded_groups > 2 * kMostCandidates ? padded_groups : 2 * kMostCandidates;
  return sizeof(CandidateRoom) + static_cast<size_t>(floats) * sizeof(float);
}

// Logits below this are outside the gap, rounding included.
__device__ inline float bound_below(float top, const Parameters &P, double gap) {
  const double bound = static_cast<double>(top) - P.selection * (gap * (1 + kRounding) + kRounding);
  return nextafterf(static_cast<float>(bound), -static_cast<float>(INFINITY));
}

template <class Logit>
class Candidates {
 public:
  __device__ Candidates(const Call &call, const LogitRow &logits, const Parameters &P, const Cooling &selection,
                        float top, CandidateRoom &room, float *maxima, CandidateLists &lists, BlockScratch &scratch)
      : call_(call),
        logits_(logits),
        P_(P),
        selection_(selection),
        top_(top),
        room_(room),
        maxima_(maxima),
        lists_(lists),
        scratch_(scratch),
        sorted_(room.keys) {}

  // Whether the first `kept` of keys() are the certified crop. Requires geom_scale >= 0 and c > 0. `edge`: the gap's
  // lower end, -inf if lam is 0. Overwrites `maxima`.
  __device__ bool settle(float edge) {
    float from = edge;
#pragma unroll 1
    for (bool within_gap = true;; within_gap = false) {
      const int32_t listed = list(from);
      if (listed <= (within_gap ? kGroupsWithinGap : kMostListed) && collect(from, listed)) return sum_up(within_gap);
      if (!within_gap || call_.best_groups == 0) return false;
      from = value_of_key(block_select(
          logits_.groups(), [&](int32_t g) { return descending_key(maxima_[g]); }, call_.best_groups,
          call_.best_groups + call_.best_groups / 16, scratch_));
      if (!(from > -static_cast<float>(INFINITY))) return false;  // or NaN: block_select's bound may lie beyond -inf
    }
  }

  // The tokens that a rule keeps, or none if the candidates do not decide it, and scratch of as many doubles.
  // Overwrites `maxima`.
  struct RuleCrop {
    Kept kept;
    double *room;
  };
  __device__ RuleCrop keep_by(const RulePlan &rule) {
    const float from = rule_bound(rule);
    if (!(from > -static_cast<float>(INFINITY))) return {};  // or NaN, as above
    const int32_t listed = list(from);
    if (listed > kMostListed || !collect(from, listed)) return {};
    sort();
    uint64_t *const keys = sorted_ == room_.keys ? room_.keys : room_.spare;
    const BestTokens best = {keys, found_, from == -FLT_MAX || rule.limit == Limit::edge};
    RuleScan scan(rule, selection_, top_, best, keys == room_.keys ? room_.spare : room_.keys,
                  reinterpret_cast<uint32_t *>(maxima_), scratch_);
    const Kept kept = scan.run();
    return {kept, scan.room()};
  }

  __device__ int32_t found() const { return found_; }
  __device__ int32_t kept() const { return kept_; }
  __device__ const uint64_t *keys() const { return sorted_; }
  // Scratch of as many doubles; if `weighed`, it holds the draw's sums.
  __device__ double *sums() const {
    return reinterpret_cast<double *>(sorted_ == room_.keys ? room_.spare : room_.keys);
  }
  __device__ bool weighed() const { return weighed_; }

 private:
  // A logit reached by enough tokens to decide most rules; -inf or NaN if no such logit is known.
  __device__ float rule_bound(const RulePlan &rule) {
    if (rule.limit == Limit::edge) return rule.edge;
    if (logits_.vocab() <= kMostCandidates) return -FLT_MAX;
    const bool counted = rule.limit == Limit::count;
    const int32_t wanted = counted ? rule.count : call_.best_groups;
    if (wanted < 1 || wanted > logits_.groups()) return -static_cast<float>(INFINITY);
    const auto key = [&](int32_t g) { return descending_key(maxima_[g]); };
    return value_of_key(block_select(logits_.groups(), key, wanted, wanted + wanted / 16, scratch_));
  }

  // Lists groups with a finite logit >= from, unordered. Returns their number.
  __device__ int32_t list(float from) {
    if (own_index() == 0) lists_.listed = lists_.found = 0;
    __syncthreads();
#pragma unroll 1
    for (int32_t g = own_index(); g < logits_.groups(); g += block_size()) {
      if (!(maxima_[g] >= from) || maxima_[g] == -static_cast<float>(INFINITY)) continue;
      const uint32_t at = atomicAdd(&lists_.listed, 1u);
      if (at < kMostListed) lists_.groups[at] = static_cast<uint16_t>(g);
    }
    __syncthreads();
    return static_cast<int32_t>(lists_.listed);
  }

  __device__ void take(float logit, int32_t id, float from) {
    if (!(logit >= from) || logit == -static_cast<float>(INFINITY) || !logits_.allows(id)) return;
    const uint32_t at = atomicAdd(&lists_.found, 1u);
    if (at < kMostCandidates) room_.keys[at] = token_key(logit, id);
  }

  // Collects their finite logits >= from, unordered. Returns whether all fit.
  __device__ bool collect(float from, int32_t listed) {
#pragma unroll 1
    for (int32_t first = warp_index(); first < listed; first += kGroupsAtOnce * warps()) {
      int32_t groups[kGroupsAtOnce];
      Two<Logit> logits[kGroupsAtOnce];
#pragma unroll
      for (int u = 0; u < kGroupsAtOnce; ++u) {
        const int32_t i = first + u * warps();
        groups[u] = lists_.groups[i < listed ? i : first];
        logits[u] = logits_.template load_two<Logit>(groups[u], lane_index());
      }
#pragma unroll
      for (int u = 0; u < kGroupsAtOnce; ++u) {
        if (first + u * warps() >= listed) break;
        const int32_t id = groups[u] * kGroup + lane_index();
        const float2 two = LogitRow::value_of(logits[u]);
        take(two.x, id, from);
        take(two.y, id + kGroup / 2, from);
      }
    }
    __syncthreads();
    found_ = static_cast<int32_t>(lists_.found);
    return found_ <= kMostCandidates;
  }

  __device__ void sort() {
    if (found_ <= kRanked) {
      block_rank_sort(room_.keys, found_, room_.spare);
      sorted_ = room_.spare;
      return;
    }
    const int32_t size = power_of_two_from(found_);
#pragma unroll 1
    for (int32_t i = found_ + own_index(); i < size; i += block_size()) room_.keys[i] = ~uint64_t{0};
    block_sort(room_.keys, nullptr, size);
    sorted_ = room_.keys;
  }

  // Finds the candidates' best prefix. Returns whether it settles the row.
  __device__ bool sum_up(bool gap_covers) {
    sort();
    const int64_t pool = call_.options.top_m;
    const int32_t counted = found_ < pool ? found_ : static_cast<int32_t>(pool);
    double *const Gamma = sums(), *const Phi = reinterpret_cast<double *>(maxima_);
#pragma unroll 1
    for (int32_t i = own_index(); i < counted; i += block_size()) {
      const Weight of = weight_of(logit_of(sorted_[i]), top_, selection_, true);
      Gamma[i] = of.weight;
      Phi[i] = of.weight * (P_.lam * of.log);
    }
    block_scan(Gamma, Phi, counted, scratch_);
    const crop::Maximum best = crop::first_maximiser(Gamma, Phi, counted, P_.c, scratch_);
    kept_ = best.size;
    if (own_index() == 0) {
      const bool covered = counted == pool || (gap_covers && counted == found_) ||
                           block_stop(best.J, Gamma[counted - 1], Phi[counted - 1], pool - counted, counted);
      scratch_.chosen[0] = covered && within_warm_start(Gamma, counted);
      scratch_.chosen[1] = same_as_drawing();
    }
    __syncthreads();
    weighed_ = scratch_.chosen[1];
    return scratch_.chosen[0];
  }

  // See native/candidates.cpp.
  __device__ bool block_stop(double best, double Gamma, double Phi, int64_t further, int32_t counted) const {
    const double a = log_weight(logit_of(sorted_[counted - 1]), top_, P_.selection), t = P_.lam * a;
    const double X = Gamma + static_cast<double>(further) * weight(a);
    return t + (Phi - t * Gamma) / X + P_.c * log(X) <= best - kRounding * P_.unit;
  }

  // See native/candidates.cpp.
  __device__ bool within_warm_start(const double *Gamma, int32_t counted) const {
    return kept_ == 1 || P_.init_top_p >= 1 ||
           Gamma[kept_ - 2] < P_.init_top_p * Gamma[counted - 1] * (1 - kNucleusRounding);
  }

  // Whether the weights equal those at the drawing temperature, none bounded from below.
  __device__ bool same_as_drawing() const {
    return P_.selection == P_.temperature &&
           log_weight(logit_of(sorted_[kept_ - 1]), top_, P_.selection) >= kSmallestLogWeight;
  }

  const Call &call_;
  const LogitRow &logits_;
  const Parameters &P_;
  const Cooling &selection_;
  const float top_;
  CandidateRoom &room_;
  float *const maxima_;
  CandidateLists &lists_;
  BlockScratch &scratch_;
  const uint64_t *sorted_;
  int32_t found_ = 0, kept_ = 0;
  bool weighed_ = false;
};

}  // namespace topw
#endif
