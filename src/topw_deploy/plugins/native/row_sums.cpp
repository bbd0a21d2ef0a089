#include "row_sums.h"

#include <math.h>

#include <algorithm>

namespace topw {
namespace {

// A rough weight is (1 + f) / 2^f times the true one, at most 1.06148 for 0 <= f < 1, and 1e-4 covers the rounding of y
// up to 126 log 2 to float32, of its factor and of the sums in a block. A fine weight has the error of its polynomial
// and of the same rounding.
constexpr double kRoughMost = 1.06148 * (1 + 1e-4), kRoughLeast = 1 - 1e-4;
constexpr double kFineMost = 1 + 2e-5, kFineLeast = 1 - 2e-5;
constexpr double kLargestGap = 50;       // largest y of the second token for float32: no weight that matters underflows
constexpr double kFar = 30, kVeryFar = 60;  // blocks whose y exceeds the second token's by this are only bounded
constexpr double kUnderflow = 640;       // if the second token's y is larger, only the best tokens have weight
constexpr double kUp = 1 + 1e-12;
constexpr double kMostAbove = 80;  // if y of the first pass's centre is larger, its weights may overflow
constexpr double kMuch = 1e-3;
constexpr double kSumError = 1e-5;  // relative error of two float32 sums over four blocks: at most 68 roundings each

}  // namespace

bool RowSums::open(const EditedRow &row, const Best &best, double selection, bool with_D) {
  row_ = &row;
  best_ = &best;
  selection_ = selection;
  with_D_ = with_D;
  level = Level::bounds;
  known_ = {};
  const int64_t size = best.tokens.size;
  y2_ = size > 1 ? best.y[1] : INFINITY;
  for (int64_t i = 1; i < size; ++i) {
    known_.Z += best.w[i];
    known_.D += best.w[i] > 0 ? best.w[i] * best.y[i] : 0.0;
    known_.squares += best.w[i] * best.w[i];
  }
  const double ties = static_cast<double>(best.spare), last = best.last_weight();
  if (ties > 0) {
    known_.Z += ties * last;
    known_.D += last > 0 ? ties * last * best.y[size - 1] : 0.0;
    known_.squares += ties * last * last;
  }
  if (best.complete || y2_ > kUnderflow) {
    set_bounds({}, 1, 1, INFINITY);
    level = Level::exact;
    return true;
  }
  if (take_first_pass() && others.low > kMuch) {  // then it is tighter than the blocks' bounds
    level = Level::rough;
    return true;
  }
  return bound_by_blocks();
}

// A block has at most kBlock other tokens, none with a larger logit than the block's maximum or the last of the best.
bool RowSums::bound_by_blocks() {
  const int64_t blocks = row_->padded_blocks();
  if (!block_weights_.reserve(blocks)) return false;
  hot().weights(row_->maxima(), blocks, row_->top(), 1 / selection_, block_weights_.data());
  const double last = best_->last_weight(), last_y = best_->y[best_->tokens.size - 1];
  double Z = 0, D = 0;
  for (int64_t b = 0; b < blocks; ++b) Z += std::min(block_weights_[b], last);
  const double most = last_y >= 1 ? last * last_y : exp(-1.0);  // y exp(-y) falls from y = 1 on
  for (int64_t b = 0; with_D_ && b < blocks; ++b) {
    const double y = std::min(surprise(row_->maxima()[b], row_->top(), selection_), kUnderflow);
    D += y >= 1 ? std::min(block_weights_[b] * y, most) : most;
  }
  const double size = static_cast<double>(kBlock) * kUp;
  others = {known_.Z / kUp, known_.Z * kUp + size * Z};
  this->D = {known_.D / kUp, known_.D * kUp + size * D};
  squares = {1 + known_.squares, (1 + known_.squares) * kUp + size * Z * last};
  return true;
}

void RowSums::refine() {
  if (level == Level::exact) return;
  const bool may = fits_float32();
  level = !may ? Level::exact : static_cast<Level>(static_cast<int>(level) + 1);
  if (level == Level::exact)
    set_bounds(sum(hot().exact_sums, kVeryFar), 1, 1, INFINITY);
  else if (level == Level::fine)
    set_bounds(sum(hot().fine_sums, kFar), kFineLeast, kFineMost, kFar);
  else if (!take_first_pass() && fits_rough(row_->top(), 1 / selection_))
    set_bounds(sum(hot().rough_sums, kFar), kRoughLeast, kRoughMost, kFar);
}

// Uses the first pass, which summed all tokens: subtracts the best ones, with weights computed the same way. False if
// that pass cannot be used.
bool RowSums::take_first_pass() {
  const double above = surprise(row_->centre(), row_->top(), selection_);
  const int64_t size = best_->tokens.size, blocks = (size + kBlock - 1) / kBlock;
  if (!row_->has_sums() || with_D_ || above > kMostAbove || !padded_.reserve(blocks * kBlock)) return false;
  std::copy(best_->tokens.logit.data(), best_->tokens.logit.data() + size, padded_.data());
  std::fill(padded_.data() + size, padded_.data() + blocks * kBlock, -INFINITY);
  const Weighing every = {row_->centre(), INFINITY, -INFINITY, 1 / selection_, false};
  WeightSums best;
  hot().rough_sums(padded_.data(), padded_.data(), blocks, every, best);
  const double unit = exp(-above), all = row_->weights() * unit, rest = all - best.Z * unit;
  const double error = kSumError * (all + 2 * row_->removed() * unit);  // removed weights were added, then subtracted
  const double ties = static_cast<double>(best_->spare) * best_->last_weight();  // both in the sum and in known_
  others = {std::max(known_.Z / kUp, (known_.Z - ties) / kUp + (rest - error) / kRoughMost),
            (known_.Z - ties) * kUp + std::max(0.0, rest + error) / kRoughLeast};
  squares = {1 + known_.squares, (1 + known_.squares) * kUp + best_->last_weight() * (others.high - known_.Z / kUp)};
  return true;
}

void RowSums::make_exact() {
  if (level == Level::exact) return;
  level = Level::fine;
  refine();
}

bool RowSums::fits_float32() const {
  return fits_fine(1 / selection_) && y2_ <= kLargestGap;
}

WeightSums RowSums::sum(Add add, double beyond) const {
  const double far = static_cast<double>(row_->top()) - selection_ * (y2_ + beyond);
  const float least = static_cast<float>(std::max(far, -3.4e38));
  const Weighing by = {row_->top(), best_->last_logit(), least, 1 / selection_, with_D_};
  WeightSums rest;
  row_->for_each_run([&](const float *logits, int64_t first, int64_t blocks) {
    add(logits, row_->maxima() + first, blocks, by, rest);
  });
  return rest;
}

// Each term of `rest` is its true value times a factor between these bounds; blocks beyond `far` are missing.
void RowSums::set_bounds(const WeightSums &rest, double least_factor, double most_factor, double far) {
  const bool exact = far == INFINITY;
  const double up = exact ? 1 : kUp, tokens = static_cast<double>(row_->vocab());
  const double y = exact ? 0 : y2_ + far, missing = exact ? 0 : tokens * exp(-y * (1 - 1e-6));
  others = {known_.Z / up + rest.Z / most_factor, known_.Z * up + rest.Z / least_factor + missing};
  D = {known_.D / up + rest.D / most_factor, known_.D * up + rest.D / least_factor + missing * y * 1.01};
  const double further = exact ? rest.squares : best_->last_weight() * (others.high - known_.Z / up);
  squares = {1 + known_.squares + (exact ? further : 0), (1 + known_.squares) * up + further};
}

}  // namespace topw
