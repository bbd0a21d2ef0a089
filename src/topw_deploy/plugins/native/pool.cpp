#include "pool.h"

#include <float.h>

#include <algorithm>

#include "objective.h"

namespace topw {
namespace {

constexpr int64_t kSorted = 2;  // times the pool's size; beyond, cut before sorting
constexpr int64_t kSpare = 12;  // one extra token per this many, for the estimate's error

}  // namespace

bool Pool::fill(const EditedRow &row, const Parameters &P, int64_t top_m, Sorter &sorter) {
  const int64_t size = std::min(top_m, row.vocab());
  if (!take_some(row, size)) return false;
  if (tokens.size > kSorted * size && !tokens.cut(size)) return false;
  if (!tokens.rank(sorter)) return false;
  tokens.size = std::min(tokens.size, size);
  if (!a.reserve(tokens.size) || !p.reserve(tokens.size)) return false;
  weigh(row.top(), P);
  return true;
}

// The first bound assumes tokens spread at random over the blocks. If it fails, use the `size`-th largest maximum of
// many small groups, which at least `size` tokens reach.
bool Pool::take_some(const EditedRow &row, int64_t size) {
  const float likely = value_reached_by_tokens(row, size + size / kSpare);
  if (likely > -INFINITY) {
    if (!tokens.take_from(row, likely, kSorted * size)) return false;
    const bool all_finite = likely <= -FLT_MAX;
    if ((tokens.size >= size || all_finite) && tokens.size <= kSorted * size) return true;
  }
  float bound = -FLT_MAX;
  const int64_t columns = row.blocks() * kColumns;
  if (columns > 2 * size) {
    if (!columns_.reserve(columns)) return false;
    for (int64_t b = 0; b < row.blocks(); ++b) hot().column_maxima(row.block(b), &columns_[b * kColumns]);
    bound = value_reached_by(columns_.data(), columns, size, size + size / 4);
  }
  return tokens.take_from(row, bound);
}

void Pool::weigh(float top, const Parameters &P) {
  Prefixes base(P.c);
  for (int64_t i = 0; i < tokens.size; ++i) {
    a[i] = log_weight(tokens.logit[i], top, P.selection);
    p[i] = weight(a[i]);
    base.add(p[i], P.lam * a[i]);
  }
  K = base.first_maximiser();
  mass = base.Gamma();
  k0 = tokens.size;
  if (P.init_top_p >= 1) return;
  double G = 0;
  for (k0 = 1; k0 < tokens.size; ++k0)
    if ((G += p[k0 - 1]) >= P.init_top_p * mass) break;
}

}  // namespace topw
