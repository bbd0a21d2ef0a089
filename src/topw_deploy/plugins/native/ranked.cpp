#include "ranked.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include <algorithm>

namespace topw {
namespace {

// The bits of a float as an integer, in the floats' order.
int32_t ordered_bits(float value) {
  int32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits < 0 ? bits ^ 0x7fffffff : bits;
}

float float_of_ordered_bits(int32_t place) {
  const int32_t bits = place < 0 ? place ^ 0x7fffffff : place;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

constexpr double kCrowded = 3;                    // tokens per block
constexpr int64_t kFirstStep = int64_t{1} << 22;  // half of the floats between two powers of 2
constexpr int64_t kEveryFloat = int64_t{1} << 32;
constexpr int64_t kSpare = 12;  // one extra token per this many, for the estimate's error

int64_t padded_size(int64_t size) { return (size + 15) / 16 * 16; }

}  // namespace

// Bisects the floats. The steps down from the largest value double first, because the bound is near it, and half of all
// floats are closer to 0 than any logit.
float value_reached_by(const float *values, int64_t size, int64_t count, int64_t enough) {
  int64_t low = ordered_bits(-FLT_MAX), high = ordered_bits(hot().highest_of(values, size));
  for (int64_t step = kFirstStep; low < high; step = std::min(2 * step, kEveryFloat)) {
    const int64_t middle = std::max(low + (high - low + 1) / 2, high - step);
    const int64_t reached = hot().count_from(values, size, float_of_ordered_bits(static_cast<int32_t>(middle)));
    if (reached >= count)
      low = middle;
    else
      high = middle - 1;
    if (reached >= count && reached <= enough) break;
  }
  return float_of_ordered_bits(static_cast<int32_t>(low));
}

float value_reached_by_tokens(const EditedRow &row, int64_t count) {
  const double blocks = static_cast<double>(row.blocks()), to_each = static_cast<double>(count) / blocks;
  if (to_each > kCrowded) return -INFINITY;
  const int64_t hit = std::max<int64_t>(1, static_cast<int64_t>(blocks * (1 - exp(-to_each))));
  return value_reached_by(row.maxima(), row.padded_blocks(), hit, hit + hit / 16);
}

bool Ranked::take_from(const EditedRow &row, float bound, int64_t most) {
  const float from = std::max(bound, -FLT_MAX);
  if (!blocks_.reserve(row.padded_blocks() + 16) || !maxima_.reserve(row.padded_blocks() + 16)) return false;
  const int64_t found = hot().take_from(row.maxima(), row.padded_blocks(), 0, from, maxima_.data(), blocks_.data());
  if (!id.reserve(found * kBlock + 16) || !logit.reserve(found * kBlock + 16)) return false;
  size = 0;
  for (int64_t i = 0; i < found && size <= most; ++i) {
    const int32_t b = blocks_[i], first = b * static_cast<int32_t>(kBlock);
    size += hot().take_from(row.block(b), kBlock, first, from, logit.data() + size, id.data() + size);
  }
  return true;
}

// The first bound assumes tokens spread at random over the blocks. If it fails, use the `count`-th largest maximum of
// many small groups, which at least `count` tokens reach.
bool Ranked::take_at_least(const EditedRow &row, int64_t count) {
  const float likely = value_reached_by_tokens(row, count + count / kSpare);
  if (likely > -INFINITY) {
    if (!take_from(row, likely, kCutFrom * count)) return false;
    const bool all_finite = likely <= -FLT_MAX;
    if ((size >= count || all_finite) && size <= kCutFrom * count) return true;
  }
  float bound = -FLT_MAX;
  const int64_t columns = row.blocks() * kColumns;
  if (columns > 2 * count) {
    if (!columns_.reserve(columns)) return false;
    for (int64_t b = 0; b < row.blocks(); ++b) hot().column_maxima(row.block(b), &columns_[b * kColumns]);
    bound = value_reached_by(columns_.data(), columns, count, count + count / 4);
  }
  return take_from(row, bound);
}

void Ranked::keep_from(float bound) {
  int64_t kept = 0;
  for (int64_t i = 0; i < size; ++i)
    if (logit[i] >= bound) {
      logit[kept] = logit[i];
      id[kept++] = id[i];
    }
  size = kept;
}

bool Ranked::cut(int64_t count, int64_t *spare) {
  if (spare) *spare = 0;
  if (size <= count) return true;
  if (!maxima_.reserve(padded_size(size))) return false;
  std::copy(logit.data(), logit.data() + size, maxima_.data());
  std::fill(maxima_.data() + size, maxima_.data() + padded_size(size), -INFINITY);
  const float last = value_reached_by(maxima_.data(), padded_size(size), count, count);
  int64_t equals = count, below = 0;  // `equals`: how many tokens equal to `last` to keep
  for (int64_t i = 0; i < size; ++i) {
    equals -= logit[i] > last;
    below += logit[i] < last;
  }
  if (spare) *spare = size - below - count;
  int64_t kept = 0;
  for (int64_t i = 0; i < size && kept < count; ++i)
    if (logit[i] > last || (logit[i] == last && equals-- > 0)) {
      logit[kept] = logit[i];
      id[kept++] = id[i];
    }
  size = kept;
  return true;
}

bool Ranked::rank(Sorter &sorter) {
  if (!sorter.reserve(size)) return false;
  for (int64_t i = 0; i < size; ++i) sorter.set(i, descending_key(logit[i]), id[i]);
  const Sorter::Entry *sorted = sorter.sort(size);
  for (int64_t i = 0; i < size; ++i) {
    logit[i] = float_of_key(sorted[i].key);
    id[i] = sorted[i].item;
  }
  return true;
}

}  // namespace topw
