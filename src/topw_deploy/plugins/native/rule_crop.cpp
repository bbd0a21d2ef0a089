// Rules that count tokens in order, and rules with a threshold.

#include "rule_crop.h"

#include <float.h>
#include <math.h>

#include <algorithm>

namespace topw {
namespace {

constexpr double kSlack = 1e-9;      // relative; closer to a bound than this, exact sums decide
constexpr double kRounding = 1e-14;  // relative error of a few operations in double
constexpr double kMomentError = 4e-6;  // three times that of a float32 sum of squares (20 roundings)

// A float close to x that is certainly not above x.
float float_below(double x) {
  const double clamped = std::min(std::max(x, -static_cast<double>(FLT_MAX)), static_cast<double>(FLT_MAX));
  return std::max(nextafterf(static_cast<float>(clamped), -INFINITY), -FLT_MAX);
}

double mean_of_first_block(const EditedRow &row) {
  Moments moments;
  hot().exact_moments(row.block(0), 1, 0, moments);
  return moments.count > 0 ? moments.sum / moments.count : static_cast<double>(row.top());
}

// The unbiased standard deviation, 0 for a single token. `slack` bounds the error of the sum of squares.
Interval deviation(const Moments &m, double slack) {
  if (m.count < 2) return {0, 0};
  const double squares = m.squares - m.sum * m.sum / m.count, free = m.count - 1;
  return {sqrt(std::max(0.0, squares - slack) / free), sqrt(std::max(0.0, squares + slack) / free)};
}

Moments rough_moments(const EditedRow &row, float centre) {
  Moments total;
  row.for_each_run([&](const float *logits, int64_t, int64_t blocks) {
    Moments part;
    hot().rough_moments(logits, blocks, centre, part);
    part.count = static_cast<double>(blocks * kBlock);
    if (!(part.squares < INFINITY)) {  // some logits are -inf
      part = {};
      hot().exact_moments(logits, blocks, static_cast<double>(centre), part);
    }
    total.count += part.count;
    total.sum += part.sum;
    total.squares += part.squares;
  });
  return total;
}

Moments exact_moments(const EditedRow &row, double centre) {
  Moments total;
  row.for_each_run([&](const float *logits, int64_t, int64_t blocks) {
    hot().exact_moments(logits, blocks, centre, total);
  });
  return total;
}

Interval epsilon_threshold(const RowSums &sums, const Rule &rule) {
  return {rule.v0 * sums.Z().low, rule.v0 * sums.Z().high};
}

// min(eta Z, sqrt(eta) Z exp(-H)), where Z exp(-H) = exp(-D / Z).
Interval eta_threshold(const RowSums &sums, const Rule &rule) {
  const Interval Z = sums.Z();
  return {std::min(rule.v0 * Z.low, sqrt(rule.v0) * exp(-sums.D.high / Z.low)),
          std::min(rule.v0 * Z.high, sqrt(rule.v0) * exp(-sums.D.low / Z.high))};
}

Interval p_less_threshold(const RowSums &sums, const Rule &) {
  return {sums.squares.low / sums.Z().high, sums.squares.high / sums.Z().low};
}

int64_t count_from(const Best &best, double weight) {
  const double *w = best.w.data(), *end = w + best.tokens.size;
  return std::partition_point(w, end, [&](double each) { return each >= weight; }) - w;
}

}  // namespace

EditedRow::Sums sums_of(const Rule &rule) {
  switch (rule.code) {
    case TOPW_RULE_TOP_P:
    case TOPW_RULE_TOP_H:
    case TOPW_RULE_EPSILON:
    case TOPW_RULE_P_LESS: return EditedRow::Sums::weights;
    case TOPW_RULE_TOP_N_SIGMA: return EditedRow::Sums::moments;
    default: return EditedRow::Sums::none;
  }
}

bool RuleCrop::choose(const EditedRow &row, const Rule &rule, double selection, Sorter &sorter, Crop &crop) {
  row_ = &row;
  rule_ = &rule;
  selection_ = selection;
  sorter_ = &sorter;
  crop_ = &crop;
  const auto made = [&] {
    switch (rule.code) {
      case TOPW_RULE_TOP_K: return top_k(static_cast<int64_t>(rule.v0));
      case TOPW_RULE_TOP_P: return rule.v0 < 1 ? top_p() : keep_everything();
      case TOPW_RULE_MIN_P: return rule.v0 > 0 ? keep_weights_from({rule.v0, rule.v0}, true) : keep_everything();
      case TOPW_RULE_TOP_H: return top_h();
      case TOPW_RULE_TYPICAL: return typical();
      case TOPW_RULE_EPSILON: return keep_above_threshold(epsilon_threshold, false);
      case TOPW_RULE_ETA: return keep_above_threshold(eta_threshold, true);
      case TOPW_RULE_TOP_N_SIGMA: return top_n_sigma();
      case TOPW_RULE_P_LESS: return keep_above_threshold(p_less_threshold, false);
      case TOPW_RULE_MIN_K: return min_k();
      default: return keep_everything();
    }
  }();
  return made == Step::decided;
}

RuleCrop::Step RuleCrop::keep_first(int64_t kept) {
  const bool certified = kept <= kCandidates;
  const int32_t stage = certified ? TOPW_CANDIDATES : TOPW_POOL;
  *crop_ = {&best_.tokens, kept, certified, true, {stage, static_cast<int32_t>(best_.tokens.size), 0, 0, 0, 0}};
  return Step::decided;
}

RuleCrop::Step RuleCrop::keep_top_alone() {
  if (!found_.id.reserve(1) || !found_.logit.reserve(1)) return Step::out_of_memory;
  found_.size = 1;
  found_.id[0] = static_cast<int32_t>(row_->first_at_top());
  found_.logit[0] = row_->top();
  return keep_found();
}

RuleCrop::Step RuleCrop::keep_found() {
  if (found_.size == 0) return keep_top_alone();
  const bool certified = found_.size <= kCandidates, ranked = found_.size <= kMostSorted;
  if (ranked && !found_.rank(*sorter_)) return Step::out_of_memory;
  const int32_t stage = certified ? TOPW_CANDIDATES : TOPW_POOL;
  *crop_ = {&found_, found_.size, certified, ranked, {stage, static_cast<int32_t>(found_.size), 0, 0, 0, 0}};
  return Step::decided;
}

RuleCrop::Step RuleCrop::keep_everything() {
  return found_.take_from(*row_, -FLT_MAX) ? keep_found() : Step::out_of_memory;
}

RuleCrop::Step RuleCrop::top_k(int64_t k) {
  if (k <= kMostSorted) {
    if (!best_.take(*row_, k, selection_, *sorter_)) return Step::out_of_memory;
    return keep_first(std::min(k, best_.tokens.size));
  }
  if (!found_.take_at_least(*row_, std::min(k, row_->vocab())) || !found_.cut(k)) return Step::out_of_memory;
  return keep_found();
}

// Keeps the logits above a threshold that lies in `cut`. Logits inside `cut` are kept if `is_kept` is true for them;
// without `is_kept`, they leave the step undecided.
template <class IsKept>
RuleCrop::Step RuleCrop::keep_logits_from(Interval cut, const IsKept *is_kept) {
  if (!found_.take_from(*row_, float_below(cut.low))) return Step::out_of_memory;
  int64_t kept = 0;
  for (int64_t i = 0; i < found_.size; ++i) {
    const double logit = static_cast<double>(found_.logit[i]);
    if (logit < cut.low) continue;
    if (logit < cut.high) {
      if (!is_kept) return Step::undecided;
      if (!(*is_kept)(found_.logit[i])) continue;
    }
    found_.logit[kept] = found_.logit[i];
    found_.id[kept++] = found_.id[i];
  }
  found_.size = kept;
  return keep_found();
}

RuleCrop::Step RuleCrop::keep_weights_from(Interval threshold, bool exact) {
  const double top = static_cast<double>(row_->top());
  const auto logit_of = [&](double weight, double sign) {
    const double below = -selection_ * log(weight);
    return top - below + sign * (kSlack * selection_ + kRounding * (fabs(top) + fabs(below)));
  };
  const Interval cut = {logit_of(threshold.low, -1), logit_of(threshold.high, 1)};
  const auto is_kept = [&](float logit) { return exp(-surprise(logit, row_->top(), selection_)) >= threshold.low; };
  return keep_logits_from(cut, exact ? &is_kept : nullptr);
}

RuleCrop::Step RuleCrop::keep_above_threshold(Interval (*threshold)(const RowSums &, const Rule &), bool with_D) {
  if (!best_.take(*row_, kCandidates, selection_, *sorter_) || !sums_.open(*row_, best_, selection_, with_D))
    return Step::out_of_memory;
  for (;; sums_.refine()) {
    Interval t = threshold(sums_, *rule_);
    if (!sums_.is_exact()) t = {t.low * (1 - kSlack), t.high * (1 + kSlack)};
    if (best_.complete || t.low > best_.last_weight() * (1 + kSlack)) {
      const int64_t most = count_from(best_, t.low), least = count_from(best_, t.high);
      if (most == least) return keep_first(std::max<int64_t>(1, most));
    } else if (sums_.level >= RowSums::Level::fine) {
      const Step step = keep_weights_from(t, sums_.is_exact());
      if (step != Step::undecided) return step;
    }
  }
}

RuleCrop::Step RuleCrop::top_n_sigma() {
  const double top = static_cast<double>(row_->top()), n = rule_->v0;
  Interval sigma;
  const auto is_kept = [&](float logit) { return top - static_cast<double>(logit) <= n * sigma.low; };
  const auto cut = [&](double slack) {
    const double rounding = kRounding * (fabs(top) + n * sigma.high);
    return Interval{top - n * sigma.high * (1 + slack) - rounding, top - n * sigma.low * (1 - slack) + rounding};
  };
  if (n > 0) {
    const bool summed = row_->has_sums() && row_->moments().squares < INFINITY;
    const float centre = summed ? row_->centre() : static_cast<float>(mean_of_first_block(*row_));
    const Moments rough = summed ? row_->moments() : rough_moments(*row_, centre);
    sigma = deviation(rough, kMomentError * (rough.squares + (summed ? row_->removed() : 0)));
    const Step step = keep_logits_from<decltype(is_kept)>(cut(kSlack), nullptr);
    if (step != Step::undecided) return step;
    const Moments exact = exact_moments(*row_, static_cast<double>(centre) + rough.sum / rough.count);
    sigma = deviation(exact, 0);
  }
  return keep_logits_from(cut(kSlack), &is_kept);
}

// Keeps max(i, floor(tau / range)) tokens, with i the first maximiser of (l_i - l_(i+1)) / i.
RuleCrop::Step RuleCrop::min_k() {
  double lowest = INFINITY;
  row_->for_each_run([&](const float *logits, int64_t, int64_t blocks) {
    lowest = std::min(lowest, static_cast<double>(hot().lowest_of(logits, blocks)));
  });
  const double range = static_cast<double>(row_->top()) - lowest;
  if (range == 0) return rule_->v0 > 0 ? keep_everything() : keep_top_alone();
  for (const int64_t count : {kCandidates, kMostSorted, INT64_MAX}) {
    const bool all = count == INT64_MAX;
    if (all ? !found_.take_from(*row_, -FLT_MAX) || !found_.rank(*sorter_)
            : !best_.take(*row_, count, selection_, *sorter_))
      return Step::out_of_memory;
    const Ranked &tokens = all ? found_ : best_.tokens;
    int64_t cliff = 0;
    double steepest = -1;
    for (int64_t i = 1; i < tokens.size; ++i) {
      const double drop = static_cast<double>(tokens.logit[i - 1]) - static_cast<double>(tokens.logit[i]);
      const double decay = drop / static_cast<double>(i);
      if (decay <= steepest) continue;
      steepest = decay;
      cliff = i;
    }
    const double further = static_cast<double>(tokens.logit[tokens.size - 1]) - lowest;
    if (!all && further > 0 && !(steepest * (1 - kSlack) > further / static_cast<double>(tokens.size))) continue;
    const double flat = std::min(floor(rule_->v0 / range), static_cast<double>(row_->vocab()));
    return top_k(std::max(cliff, static_cast<int64_t>(flat)));
  }
  return Step::undecided;
}

}  // namespace topw
