#include "pool.h"

#include <float.h>

#include "objective.h"

namespace topw {

bool Pool::fill(const EditedRow &row, const Parameters &P, int64_t top_m, Sorter &sorter) {
  const int64_t size = std::min(top_m, row.vocab());
  if (!take_best(row, size) || !tokens.rank(sorter)) return false;
  if (!a.reserve(tokens.size) || !p.reserve(tokens.size)) return false;
  weigh(row.top(), P);
  return true;
}

// Where the `size`-th largest of many small groups' maxima lies, at least `size` tokens lie above.
bool Pool::take_best(const EditedRow &row, int64_t size) {
  float bound = -FLT_MAX;
  const int64_t columns = row.blocks() * kColumns;
  if (columns > 2 * size) {
    if (!columns_.reserve(columns)) return false;
    for (int64_t b = 0; b < row.blocks(); ++b) hot().column_maxima(row.block(b), &columns_[b * kColumns]);
    bound = value_reached_by(columns_.data(), columns, size, size + size / 4);
  }
  return tokens.take_from(row, bound) && tokens.cut(size);
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
