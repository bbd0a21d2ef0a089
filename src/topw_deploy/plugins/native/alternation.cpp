#include "alternation.h"

#include <math.h>
#include <string.h>

#include <algorithm>

#include "objective.h"

namespace topw {
namespace {

constexpr double kRounding = 1e-9;  // ties' bound of J, in units of max(1, lam, beta)
constexpr int kRounds = 16;         // pruning rounds; any number is sound

// h(y) = 1 - y/2 - y^2/6 - ...: later terms are negative, so this is an upper bound.
double h(double y) { return 1 - y * (0.5 + y / 6); }

}  // namespace

bool Alternation::run(const topw_options &options, const topw_table *table, const Pool &pool, const Parameters &P,
                      Sorter &sorter) {
  options_ = &options;
  table_ = options.metric == TOPW_UNIFORM || P.scale == 0 ? nullptr : table;
  pool_ = &pool;
  P_ = &P;
  sorter_ = &sorter;
  if (!start()) return false;
  const int64_t neighbours = options.knn_k;
  int64_t last = std::max<int64_t>(1, options.alt_iters);
  while (steps < last) {
    const int64_t before = kept;
    if (!step()) return false;
    if (entered_ == 0 && kept == before) break;
    const bool nested_is_final = P.scale >= 0 && (neighbours == 0 || kept >= neighbours);  // T1
    if (entered_ == 0 && nested_is_final) break;
    if (const int64_t cycle = cycle_length()) last = steps + (last - steps) % cycle;
  }
  if (table_) {
    pairs = distances_.pairs();
    literal_pairs = pool.tokens.size * distances_.joined();
  }
  return true;
}

bool Alternation::start() {
  const int64_t m = pool_->tokens.size;
  steps = pairs = literal_pairs = saved_at_ = 0;
  kept = pool_->k0;
  if (!member_.reserve(m) || !saved_.reserve(m) || !candidate_.reserve(m) || !exact_.reserve(m) || !far_.reserve(m) ||
      !sorter_->reserve(m))
    return false;
  for (int64_t i = 0; i < m; ++i) member_[i] = i < kept;
  return !table_ || distances_.open(*options_, *table_, pool_->tokens);
}

bool Alternation::step() {
  ++steps;
  if (table_ && !distances_.set_members(member_.data())) return false;
  for (int64_t i = 0; i < pool_->tokens.size; ++i) {
    candidate_[i] = !member_[i];
    if (candidate_[i]) set_lower_bound(i);
  }
  if (!(P_->scale < 0 ? measure_all() : measure_survivors())) return false;
  scan();
  return true;
}

void Alternation::set_lower_bound(int64_t i) {
  exact_[i] = !table_;
  far_[i] = P_->scale == 0 ? 0 : 1;  // of the uniform metric
  if (!table_) return;
  const float *bounds = table_->neighbour_bound;
  const double bound = bounds ? static_cast<double>(bounds[pool_->tokens.id[i]]) : 0;
  far_[i] = bound > 0 && bound < INFINITY ? bound : 0;
}

bool Alternation::measure_all() {
  if (!table_) return true;
  int32_t chunk[kChunk];
  const int64_t m = pool_->tokens.size;
  for (int64_t i = 0; i < m;) {
    int64_t count = 0;
    for (; i < m && count < kChunk; ++i)
      if (!member_[i]) chunk[count++] = static_cast<int32_t>(i);
    if (!distances_.measure(chunk, count)) return false;
    for (int64_t n = 0; n < count; ++n) far_[chunk[n]] = distances_.distance(chunk[n]);
  }
  return true;
}

// Applies the row test before any distance and after each chunk of distances.
bool Alternation::measure_survivors() {
  const double reached = lower_bound_of_best();
  prune(reached);
  int32_t chunk[kChunk];
  const int64_t m = pool_->tokens.size;
  for (int64_t i = 0; i < m;) {
    int64_t count = 0;
    for (; i < m && count < kChunk; ++i)
      if (candidate_[i] && !exact_[i]) chunk[count++] = static_cast<int32_t>(i);
    if (count == 0) break;
    if (!distances_.measure(chunk, count)) return false;
    for (int64_t n = 0; n < count; ++n) {
      far_[chunk[n]] = distances_.distance(chunk[n]);
      exact_[chunk[n]] = 1;
    }
    prune(reached);
  }
  return true;
}

// A lower bound of this step's best J: the best prefix of S, which needs no distance.
double Alternation::lower_bound_of_best() const {
  Prefixes within(P_->c);
  for (int64_t i = 0; i < pool_->tokens.size; ++i)
    if (member_[i]) within.add(pool_->p[i], P_->lam * pool_->a[i]);
  return within.best();
}

// Row test: drops candidates that cannot be kept even if all others stay.
void Alternation::prune(double reached) {
  const int64_t m = pool_->tokens.size;
  const double c = P_->c;
  for (int round = 0; round < kRounds; ++round) {
    double Gmax = 0;
    for (int64_t i = 0; i < m; ++i) Gmax += member_[i] || candidate_[i] ? pool_->p[i] : 0;
    Gmax *= 1 + kRounding;
    const double needed = reached - c * log(Gmax) - kRounding * P_->unit;
    int64_t dropped = 0;
    for (int64_t i = 0; i < m; ++i)
      if (candidate_[i] && P_->lam * pool_->a[i] - P_->scale * far_[i] + c * h(pool_->p[i] / Gmax) < needed) {
        candidate_[i] = 0;
        ++dropped;
      }
    if (dropped == 0) return;
  }
}

// Sorts the remaining tokens by phi; the best prefix becomes the set.
void Alternation::scan() {
  int64_t count = 0;
  for (int64_t i = 0; i < pool_->tokens.size; ++i) {
    if (!member_[i] && !candidate_[i]) continue;
    const double f = member_[i] ? 0.0 : -P_->scale * far_[i];
    far_[i] = f + P_->lam * pool_->a[i];  // phi from here
    sorter_->set(count++, descending_key(far_[i]), static_cast<int32_t>(i));
  }
  const Sorter::Entry *order = sorter_->sort(count);
  Prefixes prefixes(P_->c);
  for (int64_t n = 0; n < count; ++n) prefixes.add(pool_->p[order[n].item], far_[order[n].item]);
  kept = prefixes.first_maximiser();
  entered_ = 0;
  for (int64_t n = 0; n < kept; ++n) entered_ += !member_[order[n].item];
  memset(member_.data(), 0, static_cast<size_t>(pool_->tokens.size));
  for (int64_t n = 0; n < kept; ++n) member_[order[n].item] = 1;
}

// The sets' cycle length, or 0 (Brent's algorithm): with a negative scale they may never converge.
int64_t Alternation::cycle_length() {
  const size_t m = static_cast<size_t>(pool_->tokens.size);
  if (saved_at_ > 0 && memcmp(saved_.data(), member_.data(), m) == 0) return steps - saved_at_;
  if ((steps & (steps - 1)) == 0) {
    memcpy(saved_.data(), member_.data(), m);
    saved_at_ = steps;
  }
  return 0;
}

}  // namespace topw
