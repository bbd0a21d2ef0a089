// Rules that compare a running sum over the tokens with a target.

#include <float.h>
#include <math.h>

#include <algorithm>

#include "rule_crop.h"

namespace topw {
namespace {

constexpr double kSlack = 1e-9;   // relative; closer to a cut than this, exact sums decide
constexpr double kFar = 60;       // the weights of tokens with a larger y are negligible
constexpr double kExactUpTo = 700;  // hot().weights is exact for y up to here
constexpr double kLess = 1 - kSlack, kMore = 1 + kSlack;

}  // namespace

// Keeps the shortest prefix of the best tokens whose mass reaches a number in `target`. Undecided if the bounds of
// `target` give different prefixes, or if the best tokens do not reach it.
RuleCrop::Step RuleCrop::keep_first_reaching(Interval target) {
  double G = 0;
  for (int64_t i = 0; i < best_.tokens.size; ++i) {
    if (G >= target.low) return Step::undecided;
    G += best_.w[i];
    if (G >= target.high) return keep_first(i + 1);
  }
  return Step::undecided;
}

RuleCrop::Step RuleCrop::top_p() {
  if (!best_.take(*row_, kCandidates, selection_, *sorter_) || !sums_.open(*row_, best_, selection_, false))
    return Step::out_of_memory;
  double mass = 0;
  for (int64_t i = 0; i < best_.tokens.size; ++i) mass += best_.w[i];
  while (!sums_.is_exact()) {
    const Interval Z = sums_.Z();
    const Step step = keep_first_reaching({rule_->v0 * Z.low * kLess, rule_->v0 * Z.high * kMore});
    if (step != Step::undecided) return step;
    if (mass < rule_->v0 * Z.low) sums_.make_exact();
    sums_.refine();
  }
  const double target = rule_->v0 * sums_.Z().low;
  Step step = keep_first_reaching({target, target});
  if (step != Step::undecided) return step;
  if (!best_.take(*row_, kMostSorted, selection_, *sorter_)) return Step::out_of_memory;
  step = keep_first_reaching({target, target});
  return step != Step::undecided ? step : keep_all_up_to_mass(target);
}

RuleCrop::Step RuleCrop::top_h() {
  const int64_t pool = static_cast<int64_t>(rule_->v1), count = pool <= kMostSorted ? pool : kCandidates;
  if (!best_.take(*row_, std::max(count, kCandidates), selection_, *sorter_) ||
      !sums_.open(*row_, best_, selection_, false))
    return Step::out_of_memory;
  if (pool > kMostSorted && best_.tokens.size >= kCandidates && !best_.complete) {
    sums_.make_exact();
    return keep_all_up_to_entropy(pool);
  }
  const int64_t size = std::min(pool, best_.tokens.size);
  if (!G_.reserve(size) || !D_.reserve(size)) return Step::out_of_memory;
  double G = 0, D = 0;
  for (int64_t i = 0; i < size; ++i) {
    G_[i] = G += best_.w[i];
    D_[i] = D += best_.w[i] > 0 ? best_.w[i] * best_.y[i] : 0.0;
  }
  for (;; sums_.refine()) {
    const Step step = keep_up_to_entropy(size);
    if (step != Step::undecided) return step;
  }
}

// With lambda = ln Z, Z times the sum of -p ln p over the first k tokens is D_k + lambda G_k. The test is linear in
// lambda: what holds for both its bounds holds between them.
RuleCrop::Step RuleCrop::keep_up_to_entropy(int64_t size) {
  const double low = log1p(sums_.others.low), high = log1p(sums_.others.high);
  const auto within = [&](double lambda, double limit) {
    int64_t k = 0;
    while (k < size && D_[k] + lambda * G_[k] <= limit) ++k;
    return k;
  };
  const double least = D_[size - 1] + low * G_[size - 1], most = D_[size - 1] + high * G_[size - 1];
  if (rule_->v0 >= 1 && least > 0) return keep_first(size);
  if (sums_.is_exact()) return keep_first(least > 0 ? std::max<int64_t>(1, within(low, rule_->v0 * least)) : 1);
  const int64_t k = within(low, rule_->v0 * least * kLess);
  const bool same = least > 0 && k == within(low, rule_->v0 * least * kMore) &&
                    k == within(high, rule_->v0 * most * kLess) && k == within(high, rule_->v0 * most * kMore);
  return same ? keep_first(std::max<int64_t>(1, k)) : Step::undecided;
}

RuleCrop::Step RuleCrop::typical() {
  if (!best_.take(*row_, kCandidates, selection_, *sorter_) || !sums_.open(*row_, best_, selection_, true))
    return Step::out_of_memory;
  for (;; sums_.refine()) {
    const Interval Z = sums_.Z(), m = {sums_.D.low / Z.high, sums_.D.high / Z.low};
    const double share = rule_->v0;
    const bool exact = sums_.is_exact();
    const Interval mass = {share * Z.low * (exact ? 1 : kLess), share * Z.high * (exact ? 1 : kMore)};
    const Step step = keep_typical_of_best(m, mass);
    if (step != Step::undecided) return step;
    if (!exact) continue;
    if (!best_.take(*row_, kMostSorted, selection_, *sorter_)) return Step::out_of_memory;
    const double target = share * Z.low;
    const Step more = keep_typical_of_best(m, {target, target});
    return more != Step::undecided ? more : keep_all_typical(m.low, target);
  }
}

// Keeps the shortest list of tokens, by distance of y from its mean m, whose mass reaches a number in `target`.
// Undecided if the bounds of m or of `target` give different lists, or if tokens other than the best may be listed.
RuleCrop::Step RuleCrop::keep_typical_of_best(Interval m, Interval target) {
  const int64_t size = best_.tokens.size;
  const double *y = best_.y.data(), mean = (m.low + m.high) / 2;
  const double spread = sums_.is_exact() ? 0 : (m.high - m.low) / 2 + kSlack * mean;
  if (!running_.reserve(size) || !sorter_->reserve(size) || !member_.reserve(size)) return Step::out_of_memory;
  for (int64_t i = 0; i < size; ++i) sorter_->set(i, ascending_key(fabs(y[i] - mean)), static_cast<int32_t>(i));
  const Sorter::Entry *order = sorter_->sort(size);
  std::fill(member_.data(), member_.data() + size, uint8_t{0});
  double G = 0;
  int64_t kept = 0;
  while (kept < size && G < target.high) {
    if (G >= target.low) return Step::undecided;
    member_[order[kept].item] = 1;
    G += best_.w[order[kept++].item];
  }
  if (G < target.high) return Step::undecided;
  const double last = y[order[kept - 1].item], reach = fabs(last - mean);
  if (!best_.complete && !(reach + 2 * spread < y[size - 1] - mean)) return Step::undecided;
  for (int64_t i = 0; spread > 0 && i < size; ++i) {  // tokens that might swap places with the last one
    const bool same_side = (y[i] > m.high && last > m.high) || (y[i] < m.low && last < m.low) || y[i] == last;
    if (!same_side && fabs(fabs(y[i] - mean) - reach) <= 2 * spread) return Step::undecided;
  }
  return keep_members();
}

RuleCrop::Step RuleCrop::keep_members() {
  Ranked &tokens = best_.tokens;
  int64_t kept = 0, worst = 0;
  for (int64_t i = 0; i < tokens.size; ++i) {
    if (!member_[i]) continue;
    tokens.id[kept] = tokens.id[i];
    tokens.logit[kept++] = tokens.logit[i];
    worst = i;
  }
  keep_first(kept);
  crop_->certified = worst < kCandidates;
  crop_->report.stage = crop_->certified ? TOPW_CANDIDATES : TOPW_POOL;
  return Step::decided;
}

RuleCrop::Step RuleCrop::keep_all_up_to_mass(double target) {
  if (!take_and_weigh(-1)) return Step::out_of_memory;
  if (!running_.find(found_, target, false, kFar * selection_, *sorter_)) return Step::out_of_memory;
  return keep_up_to_found(true);
}

RuleCrop::Step RuleCrop::keep_all_up_to_entropy(int64_t pool) {
  if (!take_and_weigh(pool)) return Step::out_of_memory;
  const double lambda = log1p(sums_.others.low);
  for (int64_t i = 0; i < found_.size; ++i)
    running_.weight[i] *= surprise(found_.logit[i], row_->top(), selection_) + lambda;
  const double sum = running_.total(found_.size), limit = rule_->v0 * sum;
  if (limit == 0) return keep_top_alone();
  if (rule_->v0 >= 1) return keep_found();
  if (!running_.find(found_, limit, true, kFar * selection_, *sorter_)) return Step::out_of_memory;
  return keep_up_to_found(!running_.has_reached());
}

RuleCrop::Step RuleCrop::keep_all_typical(double mean, double target) {
  if (!take_and_weigh(-1)) return Step::out_of_memory;
  for (int64_t i = 0; i < found_.size; ++i)
    running_.key[i] = fabs(surprise(found_.logit[i], row_->top(), selection_) - mean);
  if (!running_.find(found_, target, false, mean + kFar, *sorter_)) return Step::out_of_memory;
  int64_t worst = -1;
  for (int64_t i = 0; i < found_.size; ++i)
    if (running_.is_up_to_found(i) && (worst < 0 || found_.logit[i] <= found_.logit[worst])) worst = i;
  int64_t ahead = 0;
  for (int64_t i = 0; i < found_.size; ++i)
    ahead += found_.logit[i] > found_.logit[worst] || (found_.logit[i] == found_.logit[worst] && i < worst);
  const Step step = keep_up_to_found(true);
  crop_->certified = ahead < kCandidates;
  return step;
}

// Takes all finite tokens, or the `pool` best of them, with their weights and with keys in order of descending logit.
bool RuleCrop::take_and_weigh(int64_t pool) {
  if (pool < 0 ? !found_.take_from(*row_, -FLT_MAX)
               : !found_.take_at_least(*row_, std::min(pool, row_->vocab())) || !found_.cut(pool))
    return false;
  if (!running_.reserve(found_.size)) return false;
  hot().weights(found_.logit.data(), found_.size, row_->top(), 1 / selection_, running_.weight.data());
  const double top = static_cast<double>(row_->top());
  for (int64_t i = 0; i < found_.size; ++i) {
    running_.key[i] = top - static_cast<double>(found_.logit[i]);
    if (running_.key[i] > kExactUpTo * selection_) running_.weight[i] = exp(-running_.key[i] / selection_);
  }
  return true;
}

RuleCrop::Step RuleCrop::keep_up_to_found(bool with_last) {
  int64_t kept = 0;
  for (int64_t i = 0; i < found_.size; ++i) {
    if (!running_.is_up_to_found(i) || (!with_last && i == running_.place())) continue;
    found_.id[kept] = found_.id[i];
    found_.logit[kept++] = found_.logit[i];
  }
  found_.size = kept;
  return keep_found();
}

}  // namespace topw
