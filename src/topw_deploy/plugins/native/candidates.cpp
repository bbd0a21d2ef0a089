#include "candidates.h"

#include <math.h>

#include "objective.h"

namespace topw {
namespace {

constexpr int64_t kBlocksWithinGap = 192;  // more than this many: the best few instead of all within the gap
constexpr int64_t kFew = 64;
constexpr int64_t kMost = 1024;     // candidates; beyond, ties or a narrow row, which the pool does better
constexpr double kRounding = 1e-9;  // of J and of log-weights, in units of max(1, lam, beta): the ties' bound
constexpr double kNucleusRounding = 1e-12;

// A logit under this is further than `gap` selection temperatures below the largest, rounding included.
float bound_below(float top, const Parameters &P, double gap) {
  const double bound = static_cast<double>(top) - P.selection * (gap * (1 + kRounding) + kRounding);
  return nextafterf(static_cast<float>(bound), -INFINITY);
}

// How far below the largest logit a kept token may be, given an upper bound of the kept mass.
double gap(const Parameters &P, double mass) { return P.c / P.lam * (1 + log(mass)); }

// The kept mass is at most that of the candidates: narrow the gap by it as long as that drops some.
void shrink(Ranked &tokens, float top, const Parameters &P) {
  for (int round = 0; round < 4; ++round) {
    double mass = 0;
    for (int64_t i = 0; i < tokens.size; ++i) mass += weight(log_weight(tokens.logit[i], top, P.selection));
    const int64_t before = tokens.size;
    tokens.keep_from(bound_below(top, P, gap(P, mass)));
    if (tokens.size == before) return;
  }
}

// Block stop: whether no longer prefix than these candidates can be the first maximiser, where there are at most
// `further` more tokens, all with scores of at most the last one's.
bool block_stop(const Prefixes &base, double last_log_weight, const Parameters &P, int64_t further) {
  const double t = P.lam * last_log_weight;
  const double X = base.Gamma() + static_cast<double>(further) * weight(last_log_weight);
  return t + (base.Phi() - t * base.Gamma()) / X + P.c * log(X) <= base.best() - kRounding * P.unit;
}

}  // namespace

Outcome from_candidates(const EditedRow &row, const Parameters &P, int64_t top_m, Sorter &sorter, Ranked &tokens,
                        int64_t &kept, int64_t &seen) {
  const float top = row.top();
  const float edge = P.lam > 0 ? bound_below(top, P, gap(P, static_cast<double>(row.vocab()))) : -INFINITY;
  const bool all_within_gap = hot().count_from(row.maxima(), row.padded_blocks(), edge) <= kBlocksWithinGap;
  if (!all_within_gap && row.blocks() < kFew) return Outcome::open;
  const float from = all_within_gap ? edge : value_reached_by(row.maxima(), row.padded_blocks(), kFew, 2 * kFew);
  if (!tokens.take_from(row, from)) return Outcome::out_of_memory;
  seen = tokens.size;
  if (seen > kMost) return Outcome::open;
  if (all_within_gap) shrink(tokens, top, P);
  if (!tokens.rank(sorter)) return Outcome::out_of_memory;

  const int64_t counted = std::min(tokens.size, top_m);
  Prefixes base(P.c);
  double a = 0;
  for (int64_t i = 0; i < counted; ++i) {
    a = log_weight(tokens.logit[i], top, P.selection);
    base.add(weight(a), P.lam * a);
  }
  const int64_t further = std::min(top_m, row.vocab()) - counted;
  if (!all_within_gap && further > 0 && !block_stop(base, a, P, further)) return Outcome::open;
  kept = base.first_maximiser();
  const bool within_warm_start = kept == 1 || P.init_top_p >= 1 ||
                                 base.mass_before() < P.init_top_p * base.Gamma() * (1 - kNucleusRounding);
  return within_warm_start ? Outcome::settled : Outcome::open;
}

}  // namespace topw
