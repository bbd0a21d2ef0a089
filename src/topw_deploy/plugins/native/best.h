// The best tokens of a row, with their weights.
#ifndef TOPW_BEST_H
#define TOPW_BEST_H

#include "ranked.h"

namespace topw {

constexpr int64_t kCandidates = 64;   // a row is certified if its kept tokens are among this many best ones
constexpr int64_t kMostSorted = 1024;  // more tokens are selected instead of sorted

// y = (l_1 - l) / Ts: a token's weight exp(-y) is its probability in units of the largest.
inline double surprise(float logit, float top, double selection) {
  return (static_cast<double>(top) - static_cast<double>(logit)) / selection;
}

struct Best {
  Ranked tokens;
  int64_t spare = 0;    // number of other tokens with the last one's logit
  bool complete = false;  // whether these are all finite tokens
  Array<double> y, w;   // [tokens.size]

  // Takes and ranks at least `count` <= kMostSorted tokens, or all finite ones, but at most kMostSorted. False if out
  // of memory.
  [[nodiscard]] bool take(const EditedRow &, int64_t count, double selection, Sorter &);
  double last_weight() const { return w[tokens.size - 1]; }
  float last_logit() const { return tokens.logit[tokens.size - 1]; }
};

}  // namespace topw
#endif
