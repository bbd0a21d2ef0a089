// Bounds on the sums of a row's weights, tightened only as far as a rule needs.
#ifndef TOPW_ROW_SUMS_H
#define TOPW_ROW_SUMS_H

#include "best.h"

namespace topw {

struct Interval {
  double low = 0, high = 0;
};

// Sums over all tokens of w, w y and w^2, in units of the first token's weight. `others` is the sum of w without the
// first token, so that a peaked row does not lose it to rounding in Z = 1 + others.
class RowSums {
 public:
  // bounds: from the blocks' maxima. rough: sums of the row's first pass, or of a pass in float32, within 6.2 %. fine:
  // one pass in float32, within 2e-5. exact: one pass in double.
  enum class Level { bounds, rough, fine, exact };

  Level level = Level::bounds;
  Interval others, D, squares;

  // `best` holds the best tokens; the other tokens are bounded. False if out of memory.
  [[nodiscard]] bool open(const EditedRow &, const Best &, double selection, bool with_D);
  // Goes to the next level, if there is one.
  void refine();
  void make_exact();

  bool is_exact() const { return level == Level::exact; }
  Interval Z() const { return {1 + others.low, 1 + others.high}; }

 private:
  [[nodiscard]] bool bound_by_blocks();
  void set_bounds(const WeightSums &rest, double least_factor, double most_factor, double far);
  bool fits_float32() const;
  bool take_first_pass();
  using Add = void (*)(const float *, const float *, int64_t, const Weighing &, WeightSums &);
  WeightSums sum(Add add, double beyond) const;

  const EditedRow *row_ = nullptr;
  const Best *best_ = nullptr;
  double selection_ = 1;
  bool with_D_ = false;
  double y2_ = 0;       // y of the second token
  WeightSums known_;    // sums over the best tokens except the first, and over ties with the last one
  Array<double> block_weights_;
  Array<float> padded_;  // the best tokens' logits in whole blocks
};

}  // namespace topw
#endif
