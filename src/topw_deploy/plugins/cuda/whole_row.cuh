// A row whose kept tokens do not follow from its best tokens: finds them, and draws, by selection over the whole row.
#ifndef TOPW_CUDA_WHOLE_ROW_CUH
#define TOPW_CUDA_WHOLE_ROW_CUH

#include "bins.h"
#include "finish.h"
#include "rules.h"

namespace topw::crop {

// keys [capacity]: dynamic shared memory, for at most kMostTaken keys.
struct WholeRoom {
  uint64_t *keys;
  int32_t capacity;
};

class WholeRow {
 public:
  __device__ WholeRow(const Call &call, int32_t row, const RowState &state, const WholeRoom &room, const Memory &memory,
                      RowSearch &search, BlockScratch &scratch)
      : call_(call),
        row_(row),
        P_(state.parameters),
        plan_(state.plan),
        top_(state.top),
        room_(room),
        memory_(memory),
        search_(search),
        scratch_(scratch) {
    kept_choice_.which = Chosen::range;
    kept_choice_.top = top_;
    kept_choice_.temperature = P_.selection;
    kept_choice_.center = plan_.center;
    kept_choice_.last = kLastKey;
  }

  // Decides, draws and writes the row's outputs. Called by a leading block.
  __device__ TOPW_OUT_OF_LINE void run() {
    decide();
    const bool certified = is_certified();
    const bool is_prefix = kept_choice_.which == Chosen::range;
    const float largest = is_prefix ? top_ : logit_of(at_count(kept_choice_, 1).key);
    const Bins drawing = weighing(largest, P_.temperature);
    const double uniform = P_.uniform;
    const FoundKey drawn = search_.first(drawing, [uniform](const Sums &upto, const Sums &total) {
      return static_cast<double>(upto.weight) > uniform * static_cast<double>(total.weight);
    });
    if (own_index() == 0) {
      const topw_report report = {TOPW_POOL, static_cast<int32_t>(call_.inputs.vocab), 0, 0, 0, 0};
      const double total = static_cast<double>(drawn.total.weight) / drawing.scale;
      write_answer(call_, row_, P_, {drawn.key, largest, total, kept_, certified}, report);
    }
    if (call_.outputs.keep_mask)
      search_.mark(counting(kept_choice_), call_.outputs.keep_mask + row_ * call_.inputs.vocab);
    if (call_.outputs.mass) write_mass_of_kept();
    __syncthreads();
  }

 private:
  static constexpr double kMostWeight = 0x1p62, kBoost = 0x1p500;  // no sum overflows 64 bits

  __device__ Bins counting(const Choice &choice) const {
    Bins bins = {};
    bins.choice = choice;
    return bins;
  }

  // Sets the scale for weights whose sum is at most `total`.
  __device__ Bins weighing(const Choice &choice, float top, double temperature, double total) const {
    Bins bins = counting(choice);
    bins.top = top;
    bins.temperature = temperature;
    bins.boost = total < 1 / kBoost ? kBoost : 1;  // near the smallest double, 1 / total is infinite
    bins.scale = kMostWeight / (total * bins.boost);
    return bins;
  }
  __device__ Bins weighing(float largest, double temperature) const {
    return weighing(kept_choice_, largest, temperature, kept_);
  }
  // Chooses all tokens, with the plan's weights.
  __device__ Bins planned() const {
    Bins bins = weighing(kept_choice_, top_, P_.selection, plan_.total);
    bins.terms = plan_.limit == Limit::entropy;
    bins.center = plan_.center;
    return bins;
  }

  __device__ FoundKey at_count(const Choice &choice, int32_t count) {
    return at_count(counting(choice), count);
  }
  __device__ FoundKey at_count(const Bins &bins, int32_t count) {
    const uint32_t wanted = static_cast<uint32_t>(count);
    return search_.first(bins, [wanted](const Sums &upto, const Sums &) { return upto.count >= wanted; });
  }
  __device__ FoundKey at_weight(const Bins &bins, double wanted) {
    return search_.first(bins, [wanted](const Sums &upto, const Sums &) {
      return static_cast<double>(upto.weight) >= wanted;
    });
  }

  __device__ void decide() {
    switch (plan_.limit) {
      case Limit::first: return keep_count(1);
      case Limit::edge: return keep_edge();
      case Limit::count: return keep_count(plan_.count);
      case Limit::mass: return keep_found(at_weight(planned(), plan_.target * planned().scale));
      case Limit::entropy: return keep_entropy();
      case Limit::cliff: return keep_count(cliff());
      case Limit::typical: return keep_typical();
    }
  }

  // Keeps the tokens up to the found one, or all tokens.
  __device__ void keep_found(const FoundKey &found) {
    kept_choice_.last = found.exists ? found.key : kLastKey;
    kept_ = static_cast<int32_t>(found.exists ? found.upto.count : found.total.count);
  }

  __device__ void keep_count(int32_t count) { keep_found(at_count(kept_choice_, count)); }

  __device__ void keep_edge() {
    kept_choice_.last = token_key(plan_.edge, 0) | 0xffffffffu;
    kept_ = static_cast<int32_t>(search_.total(counting(kept_choice_)).count);
  }

  // Keeps the longest prefix of the pool whose terms sum to at most alpha times the pool's sum, at least one token.
  __device__ void keep_entropy() {
    const FoundKey pool = at_count(planned(), plan_.count);
    if (pool.exists) kept_choice_.last = pool.key;
    const double limit = plan_.target * static_cast<double>(pool.exists ? pool.upto.weight : pool.total.weight);
    const FoundKey beyond = search_.first(planned(), [limit](const Sums &upto, const Sums &) {
      return static_cast<double>(upto.weight) > limit;
    });
    if (beyond.exists)
      keep_count(beyond.before.count > 1 ? static_cast<int32_t>(beyond.before.count) : 1);
    else
      kept_ = static_cast<int32_t>(beyond.total.count);
  }

  // Finds the kept tokens of min-k: goes through the tokens in order, a few thousand at a time, until no later drop can
  // be steeper.
  __device__ int32_t cliff() {
    Best best = {-1.0, INT32_MAX};
    Choice next = kept_choice_;
    float previous = top_;
    for (int32_t seen = 0; seen < plan_.finite;) {
      const int32_t left = plan_.finite - seen, count = left < room_.capacity ? left : room_.capacity;
      const FoundKey end = at_count(next, count);
      next.last = end.exists ? end.key : kLastKey;
      sort_chosen(next, count);
      best = steepest(seen, count, previous, best);
      previous = logit_of(room_.keys[count - 1]);
      __syncthreads();
      seen += count;
      next.after = next.last;
      next.last = kLastKey;
      if (best.value >= (static_cast<double>(previous) - plan_.target) / static_cast<double>(seen)) break;
    }
    const int32_t place = best.place < plan_.finite ? best.place : 1;
    return place > plan_.count ? place : plan_.count;
  }

  __device__ void sort_chosen(const Choice &choice, int32_t count) {
    search_.take(counting(choice));
    const int32_t size = power_of_two_from(count);
    for (int32_t i = own_index(); i < size; i += block_size())
      room_.keys[i] = i < count ? __ldcg(memory_.taken + i) : kLastKey;
    block_sort(room_.keys, nullptr, size);
  }

  // Takes into account the drops among `count` sorted tokens. They follow `seen` others; `previous` is the last.
  __device__ Best steepest(int32_t seen, int32_t count, float previous, Best best) {
    for (int32_t i = own_index(); i < count; i += block_size()) {
      if (seen + i == 0) continue;
      const float before = i == 0 ? previous : logit_of(room_.keys[i - 1]);
      const double drop = static_cast<double>(before) - static_cast<double>(logit_of(room_.keys[i]));
      best = better(best, {drop / static_cast<double>(seen + i), seen + i});
    }
    return block_best(best, scratch_);
  }

  // Keeps the shortest list with the wanted mass, by distance, then by logit and id.
  __device__ void keep_typical() {
    Bins by_distance = planned();
    by_distance.by_distance = true;
    const double wanted = plan_.target * by_distance.scale;
    const FoundKey farthest = at_weight(by_distance, wanted);
    if (!farthest.exists) return keep_found(farthest);
    Bins equal = planned();
    equal.choice.which = Chosen::equally_near;
    equal.choice.distance = farthest.key;
    const uint64_t before = farthest.before.weight;
    const FoundKey last = search_.first(equal, [before, wanted](const Sums &upto, const Sums &) {
      return static_cast<double>(before + upto.weight) >= wanted;
    });
    kept_choice_.which = Chosen::nearest;
    kept_choice_.distance = farthest.key;
    kept_choice_.last = last.key;
    kept_ = static_cast<int32_t>(farthest.before.count + last.upto.count);
  }

  // Whether all kept tokens are among the kCertifiedRank best.
  __device__ bool is_certified() {
    if (kept_ > kCertifiedRank) return false;
    if (kept_choice_.which == Chosen::range) return true;
    Choice up_to_last = kept_choice_;
    up_to_last.which = Chosen::range;
    up_to_last.last = at_count(kept_choice_, kept_).key;
    return search_.total(counting(up_to_last)).count <= kCertifiedRank;
  }

  __device__ void write_mass_of_kept() {
    if (P_.certain_selection) {
      if (own_index() == 0) call_.outputs.mass[row_] = 1;
      return;
    }
    const Bins bins = weighing(top_, P_.selection);
    write_mass(call_, row_, P_, top_, static_cast<double>(search_.total(bins).weight) / bins.scale);
  }

  const Call &call_;
  const int32_t row_;
  const Parameters P_;
  const RulePlan plan_;
  const float top_;
  const WholeRoom room_;
  const Memory &memory_;
  RowSearch &search_;
  BlockScratch &scratch_;
  Choice kept_choice_ = {};
  int32_t kept_ = 0;
};

}  // namespace topw::crop
#endif
