// The hot loops: everything that touches many logits or coordinates.
//
// hot_avx512.cpp, hot_avx2.cpp and hot_generic.cpp compile hot_loops.inc; dispatch.cpp chooses. Results are
// bit-identical for every instruction set, except `closeness`, which only nominates (set_distances.h),
// `sum_of_weights`, which decides nothing, and the rough and fine sums, which bound the exact ones.
#ifndef TOPW_HOT_H
#define TOPW_HOT_H

#include <stdint.h>

#include "attention.h"

namespace topw {

constexpr int64_t kBlock = 128;   // logits per maximum; every array below is padded to whole blocks
constexpr int64_t kWord = 32;    // tokens per word of a mask
constexpr int64_t kWords = kBlock / kWord;
constexpr int64_t kColumns = 16;  // a block is 8 rows of 16 columns, with a finer maximum per column
constexpr int64_t kPanel = 32;    // members with interleaved coordinates, see `closeness`
constexpr int64_t kRowGroup = 12;  // `closeness` takes a multiple of this many rows
constexpr int64_t kDepth = 256;   // coordinates per partial sum

// Converts a table row r to a point: (r - mean) * inverse_std / norm, or (r / norm - mean) * inverse_std.
struct Normalisation {
  const float *mean, *inverse_std;  // [hidden]
  int64_t hidden;
  bool first;  // divide by the norm first (mahalanobis)
};

// Weights exp((x - top) * rate) of tokens whose logit x is below `below`, in blocks with a maximum of at least `far`.
struct Weighing {
  float top, below, far;
  double rate;
  bool with_D;  // whether to sum D too
};

// Whether float32 holds rate and rate * top well enough.
inline bool fits_fine(double rate) { return rate >= 1e-30 && rate <= 1e30; }
inline bool fits_rough(float top, double rate) {
  const double shift = static_cast<double>(top) * rate;
  return fits_fine(rate) && shift >= -60 && shift <= 60;
}

// Sums over tokens of w, w y and w^2; y = (top - x) * rate, w = exp(-y).
struct WeightSums {
  double Z = 0, D = 0, squares = 0;
};

// Over finite logits x: their number, and sums of x - centre and its square.
struct Moments {
  double count = 0, sum = 0, squares = 0;
};

struct Hot {
  const char *name;

  // Maxima of `blocks` blocks of logits; true if any is NaN.
  bool (*block_maxima)(const float *logits, int64_t blocks, float *maxima);
  // The same for the allowed logits; the others count as -inf, NaN included. allowed [blocks * kWords]: see topw.h.
  bool (*allowed_maxima)(const float *logits, int64_t blocks, const int32_t *allowed, float *maxima);
  // Copies a block, with -inf for tokens that are not allowed.
  void (*allow)(const float *block, const int32_t *allowed, float *copy);
  void (*column_maxima)(const float *block, float *maxima);
  // The largest of `count` values (a multiple of 16), ignoring NaN; -inf if none.
  float (*highest_of)(const float *values, int64_t count);
  // How many of `count` values (a multiple of 16) are at least `bound`.
  int64_t (*count_from)(const float *values, int64_t count, float bound);
  // Collects in order the values (`count`, a multiple of 16) not less than `bound`, and their places from `first`.
  // Returns their number. The outputs need room for 16 more.
  int64_t (*take_from)(const float *values, int64_t count, int32_t first, float bound, float *taken, int32_t *places);
  // Sum of exp((x - top) * rate) over a block, within 2e-7 relative; x <= top. -inf counts as 0.
  double (*sum_of_weights)(const float *block, float top, double rate);

  // Adds the sums over `blocks` blocks, whose maxima are `maxima`; -inf counts as 0. Each term of Z and D is
  // within the factors of row_sums.cpp, for weighings that fits_rough or fits_fine admits. `squares` is not summed.
  void (*rough_sums)(const float *logits, const float *maxima, int64_t blocks, const Weighing &, WeightSums &);
  void (*fine_sums)(const float *logits, const float *maxima, int64_t blocks, const Weighing &, WeightSums &);
  // All three sums, in double: within 1e-14 relative for y < 700; a larger y counts as 700.
  void (*exact_sums)(const float *logits, const float *maxima, int64_t blocks, const Weighing &, WeightSums &);
  // w[i] = exp((x_i - top) * rate), as in exact_sums. Reads and writes `count` values, rounded up to a multiple of 8.
  void (*weights)(const float *logits, int64_t count, float top, double rate, double *w);
  // Adds sums of x - centre and its square, in float32, within kMomentError of rule_crop.cpp; not finite if a logit is
  // -inf.
  void (*rough_moments)(const float *logits, int64_t blocks, float centre, Moments &);
  // The same in double for the finite logits, with their number.
  void (*exact_moments)(const float *logits, int64_t blocks, double centre, Moments &);
  // As block_maxima, and adds as rough_moments, in the same pass.
  bool (*maxima_and_moments)(const float *logits, int64_t blocks, float centre, float *maxima, Moments &);
  // As block_maxima, and adds as rough_sums to Z, in the same pass; no logit is left out, and x may exceed top.
  bool (*maxima_and_weights)(const float *logits, int64_t blocks, float top, double rate, float *maxima, double &Z);
  // The smallest finite logit; +inf if none.
  float (*lowest_of)(const float *logits, int64_t blocks);

  // |r|^2 if `by.first`, else |(r - mean) * inverse_std|^2.
  double (*squared_norm)(const float *row, const Normalisation &by);
  // Writes a row's point in float32, zero-padded to `padded`. Returns its squared length.
  double (*point)(const float *row, double norm, const Normalisation &by, float *x, int64_t padded);
  // Squared Euclidean distance and scalar product of two points, in double from table rows.
  double (*squared_distance)(const float *r, double r_norm, const float *s, double s_norm, const Normalisation &by);
  double (*scalar_product)(const float *r, double r_norm, const float *s, double s_norm, const Normalisation &by);

  // panel[k * panel_stride + j] = x[j * stride + k] for kPanel points and `depth` coordinates.
  void (*interleave)(const float *x, int64_t stride, int64_t depth, float *panel, int64_t panel_stride);
  // sums[i][j] += x_i . y_j for `rows` points x (float32, `stride` apart) and kPanel points y interleaved as panel[k *
  // kPanel + j]; `depth` <= kDepth coordinates.
  void (*closeness)(const float *x, int64_t rows, int64_t stride, const float *panel, int64_t depth, float *sums,
                    int64_t sums_stride);

  // The sums of a part's queries over the slots of a segment, at least one of which one of them sees.
  void (*attend)(const Attention &, const AttentionPart &, int64_t segment, AttentionSums &);
  // Adds the sums of a later segment.
  void (*add_segment)(const Attention &, int64_t count, const AttentionSums &later, AttentionSums &);
  // Writes the outputs of a part.
  void (*finish)(const Attention &, const AttentionPart &, const AttentionSums &);
};

const Hot &hot();  // for the instruction set in use

extern const Hot kGeneric;
#if defined(__x86_64__)
extern const Hot kAvx2, kAvx512;
#endif

}  // namespace topw
#endif
