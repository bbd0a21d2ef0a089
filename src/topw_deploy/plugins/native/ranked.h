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

  // Every token whose logit is at least `bound` and finite, in the order of their ids; where they are more than `most`,
  // only so many that `size` is, too. False if memory ran out.
  [[nodiscard]] bool take_from(const EditedRow &row, float bound, int64_t most = INT64_MAX);
  // Only those at least `bound`.
  void keep_from(float bound);
  // The `count` best, where there are more; among equals at the end the lower ids. Before `rank`.
  [[nodiscard]] bool cut(int64_t count);
  // By (logit descending, id ascending); false if memory ran out.
  [[nodiscard]] bool rank(Sorter &);

 private:
  Array<int32_t> blocks_;
  Array<float> maxima_;
};

// A value that at least `count` of `values` reach, and no more than `enough` of them if ties allow that; for `enough` =
// `count` the largest such. [size], a multiple of 16, padded with -inf.
float value_reached_by(const float *values, int64_t size, int64_t count, int64_t enough);

// A logit that about `count` tokens reach, judged by how many blocks' maxima do if chance has thrown the tokens into
// the blocks; -inf where so many tokens crowd the blocks that their maxima say little.
float value_reached_by_tokens(const EditedRow &row, int64_t count);

}  // namespace topw
#endif
