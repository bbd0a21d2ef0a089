// Tokens by (logit descending, id ascending): candidates, pool, crop.
#ifndef TOPW_RANKED_H
#define TOPW_RANKED_H

#include "array.h"
#include "edited_row.h"
#include "order.h"

namespace topw {

constexpr int64_t kCutFrom = 2;  // with more than this many times the wanted tokens, cut before sorting

class Ranked {
 public:
  int64_t size = 0;
  Array<int32_t> id;
  Array<float> logit;

  // Collects by id the tokens with finite logits >= `bound`; may stop once `size` exceeds `most`. False if out of
  // memory.
  [[nodiscard]] bool take_from(const EditedRow &row, float bound, int64_t most = INT64_MAX);
  // Collects by id all tokens that reach some bound: at least `count`, if so many are finite. False if out of memory.
  [[nodiscard]] bool take_at_least(const EditedRow &row, int64_t count);
  // Keeps logits >= `bound`.
  void keep_from(float bound);
  // Keeps the `count` best, lower ids first among ties. Call before `rank`. `spare` receives the number of dropped
  // tokens that tie with the last one kept. False if out of memory.
  [[nodiscard]] bool cut(int64_t count, int64_t *spare = nullptr);
  // Sorts the tokens. False if out of memory.
  [[nodiscard]] bool rank(Sorter &);

 private:
  Array<int32_t> blocks_;
  Array<float> maxima_, columns_;
};

// A bound that at least `count` of `values` reach and, ties permitting, at most `enough`; the largest such bound for
// `enough` = `count`. values [size]: size a multiple of 16, padded with -inf.
float value_reached_by(const float *values, int64_t size, int64_t count, int64_t enough);

// A logit that about `count` tokens reach, estimated from block maxima assuming random placement; -inf if `count` is
// too large.
float value_reached_by_tokens(const EditedRow &row, int64_t count);

}  // namespace topw
#endif
