// Tokens by (logit descending, id ascending): candidates, the pool, and a crop.
#ifndef TOPW_RANKED_H
#define TOPW_RANKED_H

#include "array.h"
#include "edited_row.h"
#include "order.h"

namespace topw {

class Ranked {
 public:
  int64_t size = 0;
  Array<int32_t> id;
  Array<float> logit;

  // Collects every token whose logit is finite and at least `bound`, by id; may stop once `size` exceeds `most`. False
  // if out of memory.
  [[nodiscard]] bool take_from(const EditedRow &row, float bound, int64_t most = INT64_MAX);
  // Keeps those at least `bound`.
  void keep_from(float bound);
  // Keeps the `count` best; of equal logits at the cut, the lower ids. To be called before `rank`.
  [[nodiscard]] bool cut(int64_t count);
  // Sorts by (logit descending, id ascending). False if out of memory.
  [[nodiscard]] bool rank(Sorter &);

 private:
  Array<int32_t> blocks_;
  Array<float> maxima_;
};

// A bound that at least `count` of `values` reach and, if ties allow, at most `enough`; the largest one for `enough` =
// `count`. [size], a multiple of 16, padded with -inf.
float value_reached_by(const float *values, int64_t size, int64_t count, int64_t enough);

// A logit that about `count` tokens reach, estimated from the blocks' maxima as if tokens were placed at random; -inf
// if `count` is so large that the maxima say little.
float value_reached_by_tokens(const EditedRow &row, int64_t count);

}  // namespace topw
#endif
