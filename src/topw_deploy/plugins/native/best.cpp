#include "best.h"

#include <float.h>
#include <math.h>

namespace topw {
namespace {

constexpr double kFastUpTo = 700;         // hot().weights is exact up to this y
constexpr int64_t kFewTokens = 16 * 1024;  // vocabularies up to this size are taken whole

// Takes at least `count` tokens, if so many are finite, and sometimes all. `complete`: whether it certainly took all.
[[nodiscard]] bool take_enough(const EditedRow &row, int64_t count, Ranked &tokens, bool &complete) {
  float bound = -FLT_MAX;
  if (row.blocks() >= count)  // as many tokens as blocks reach a bound of their maxima
    bound = value_reached_by(row.maxima(), row.padded_blocks(), count, count + count / 8);
  complete = bound <= -FLT_MAX;
  if (!complete || row.vocab() <= kFewTokens) return tokens.take_from(row, bound);
  complete = false;
  return tokens.take_at_least(row, count);
}

}  // namespace

bool Best::take(const EditedRow &row, int64_t count, double selection, Sorter &sorter) {
  if (!take_enough(row, count, tokens, complete)) return false;
  spare = 0;
  if (tokens.size > kMostSorted) {
    complete = false;
    if (!tokens.cut(count, &spare)) return false;
  }
  const int64_t size = tokens.size;
  if (!tokens.rank(sorter) || !y.reserve(size) || !w.reserve(size + 8)) return false;
  hot().weights(tokens.logit.data(), size, row.top(), 1 / selection, w.data());
  for (int64_t i = 0; i < size; ++i) {
    y[i] = surprise(tokens.logit[i], row.top(), selection);
    if (y[i] > kFastUpTo) w[i] = exp(-y[i]);
  }
  return true;
}

}  // namespace topw
