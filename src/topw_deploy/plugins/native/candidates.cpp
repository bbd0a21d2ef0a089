#include "candidates.h"

#include <math.h>

#include <algorithm>

#include "objective.h"

namespace topw {
namespace {

constexpr int64_t kBlocksWithinGap = 192;  // beyond, take the best few instead of all within the gap
constexpr int64_t kFew = 64;        // the best few, tried first
constexpr int64_t kMore = 640;
constexpr int64_t kMost = 1024;     // beyond (ties, a flat row) the pool is faster
constexpr int64_t kStride = 64;     // candidates between two tests
constexpr double kRounding = 1e-9;  // ties' bound of J and log-weights, in units of max(1, lam, beta)
constexpr double kNucleusRounding = 1e-12;

// Logits below this are outside the gap, rounding included.
float bound_below(float top, const Parameters &P, double gap) {
  const double bound = static_cast<double>(top) - P.selection * (gap * (1 + kRounding) + kRounding);
  return nextafterf(static_cast<float>(bound), -INFINITY);
}

// Largest distance of a kept token below the largest logit; mass: an upper bound of the kept mass.
double gap(const Parameters &P, double mass) { return P.c / P.lam * (1 + log(mass)); }

// Narrows the gap as long as that drops candidates: their mass bounds the kept mass, which the gap depends on.
void narrow_gap(Ranked &tokens, float top, const Parameters &P) {
  for (int round = 0; round < 4; ++round) {
    double mass = 0;
    for (int64_t i = 0; i < tokens.size; ++i) mass += weight(log_weight(tokens.logit[i], top, P.selection));
    const int64_t before = tokens.size;
    tokens.keep_from(bound_below(top, P, gap(P, mass)));
    if (tokens.size == before) return;
  }
}

// Block stop: whether no longer prefix can be the first maximiser, given at most `further` more tokens, none with a
// larger score than the last one.
bool block_stop(const Prefixes &base, double last_log_weight, const Parameters &P, int64_t further) {
  const double t = P.lam * last_log_weight;
  const double X = base.Gamma() + static_cast<double>(further) * weight(last_log_weight);
  return t + (base.Phi() - t * base.Gamma()) / X + P.c * log(X) <= base.best() - kRounding * P.unit;
}

// Certificate without the pool, whose mass is at least that of these tokens: whether the best prefix is in the warm
// start.
bool within_warm_start(const Prefixes &base, const Parameters &P) {
  return base.first_maximiser() == 1 || P.init_top_p >= 1 ||
         base.mass_before() < P.init_top_p * base.Gamma() * (1 - kNucleusRounding);
}

struct Candidates {
  const EditedRow &row;
  const Parameters &P;
  int64_t pool;  // pool size
  Sorter &sorter;
  Ranked &tokens;
  Prefixes base;
  double last = 0;   // log-weight of the last token
  int64_t seen = 0;  // tokens found by the last scan

  Outcome scan_down_to(float from, bool gap_covers);
  bool settle(bool gap_covers);
  bool is_promising(float from) const;
};

// Collects the tokens down to logit `from` and tries to settle the row. gap_covers: whether no other token can be kept.
Outcome Candidates::scan_down_to(float from, bool gap_covers) {
  if (!tokens.take_from(row, from, kMost)) return Outcome::out_of_memory;
  seen = tokens.size;
  base = Prefixes(P.c);
  if (seen > kMost) return Outcome::undecided;
  if (gap_covers) narrow_gap(tokens, row.top(), P);
  if (!tokens.rank(sorter)) return Outcome::out_of_memory;
  return settle(gap_covers) ? Outcome::settled : Outcome::undecided;
}

// Adds tokens, best first, until the crop and its certificate follow.
bool Candidates::settle(bool gap_covers) {
  const int64_t counted = std::min(tokens.size, pool);
  for (int64_t n = 1; n <= counted; ++n) {
    last = log_weight(tokens.logit[n - 1], row.top(), P.selection);
    base.add(weight(last), P.lam * last);
    if (n < counted && n % kStride != 0) continue;
    const bool covered = n == pool || (n == counted && gap_covers) || block_stop(base, last, P, pool - n);
    if (covered && within_warm_start(base, P)) return true;
  }
  return false;
}

// Whether a second scan, down to logit `from`, is likely to settle the row. Assumes that the new tokens, up to kMore in
// all, are two thirds of the way down. Affects only speed.
bool Candidates::is_promising(float from) const {
  const double a = log_weight(from, row.top(), P.selection), between = (last + 2 * a) / 3;
  const double entering = static_cast<double>(kMore - base.size()) * weight(between);
  Prefixes likely = base;
  likely.add(entering, P.lam * between);
  return block_stop(likely, a, P, pool - kMore) && within_warm_start(likely, P);
}

}  // namespace

Outcome crop_from_candidates(const EditedRow &row, const Parameters &P, int64_t top_m, Sorter &sorter, Ranked &tokens,
                             int64_t &kept, int64_t &seen) {
  const float top = row.top();
  const float edge = P.lam > 0 ? bound_below(top, P, gap(P, static_cast<double>(row.vocab()))) : -INFINITY;
  const bool gap_covers = hot().count_from(row.maxima(), row.padded_blocks(), edge) <= kBlocksWithinGap;
  if (!gap_covers && row.blocks() < kFew) return Outcome::undecided;

  Candidates few{row, P, std::min(top_m, row.vocab()), sorter, tokens, Prefixes(P.c)};
  const float from = gap_covers ? edge : value_reached_by(row.maxima(), row.padded_blocks(), kFew, 2 * kFew);
  Outcome outcome = few.scan_down_to(from, gap_covers);
  const int64_t summed = few.base.size();
  if (outcome == Outcome::undecided && !gap_covers && summed > 0 && summed < kMore && kMore < few.pool) {
    const float further = value_reached_by_tokens(row, kMore);
    if (further > -INFINITY && few.is_promising(further)) outcome = few.scan_down_to(further, false);
  }
  seen = few.seen;
  kept = few.base.first_maximiser();
  return outcome;
}

}  // namespace topw
