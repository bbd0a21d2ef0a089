#include "pool.h"

#include <algorithm>

#include "objective.h"

namespace topw {

bool Pool::fill(const EditedRow &row, const Parameters &P, int64_t top_m, Sorter &sorter) {
  const int64_t size = std::min(top_m, row.vocab());
  if (!tokens.take_at_least(row, size)) return false;
  if (tokens.size > kCutFrom * size && !tokens.cut(size)) return false;
  if (!tokens.rank(sorter)) return false;
  tokens.size = std::min(tokens.size, size);
  if (!a.reserve(tokens.size) || !p.reserve(tokens.size)) return false;
  weigh(row.top(), P);
  return true;
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
