// AVX2 with FMA: 8 floats; 8 doubles in two registers. Included inside a namespace, after <immintrin.h>.

constexpr int kLanes = 8;
using Floats = __m256;
using Flags = __m256;

inline Floats load(const float *x) { return _mm256_loadu_ps(x); }
inline void store(float *x, Floats v) { _mm256_storeu_ps(x, v); }
inline Floats all(float x) { return _mm256_set1_ps(x); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
// The nearest integers as the bits of floats.
inline Floats with_bits(Floats integers) { return _mm256_castsi256_ps(_mm256_cvtps_epi32(integers)); }
// v 2^n; n in the low bits of `shifted`.
inline Floats scaled(Floats v, Floats shifted) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), exponent));
}
// columns[i] = x[j * stride + i] for the kLanes rows j.
inline void load_columns(const float *x, int64_t stride, Floats *columns) {
  __m256 rows[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    rows[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(x + i * stride)),
                                   _mm_loadu_ps(x + (i + 4) * stride), 1);
  const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(rows[0], rows[1]));
  const __m256d b = _mm256_castps_pd(_mm256_unpackhi_ps(rows[0], rows[1]));
  const __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(rows[2], rows[3]));
  const __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(rows[2], rows[3]));
  columns[0] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c));
  columns[1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
  columns[2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d));
  columns[3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
}
inline float highest(Floats v) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps(half, half, 1)));
}
// The maxima of neighbouring lanes of `a` and of `b`, alternately.
inline __m256 larger_pairs(__m256 a, __m256 b) {
  return _mm256_max_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
}
// out[i] = highest(v[i]) for four vectors.
inline void store_highest(float *out, const Floats *v) {
  const __m256d first = _mm256_castps_pd(larger_pairs(v[0], v[1])), second = _mm256_castps_pd(larger_pairs(v[2], v[3]));
  const Floats all_four = _mm256_max_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(first, second)),
                                        _mm256_castpd_ps(_mm256_unpackhi_pd(first, second)));
  _mm_storeu_ps(out, _mm_max_ps(_mm256_castps256_ps128(all_four), _mm256_extractf128_ps(all_four, 1)));
}
// -inf where a bit of `word` is 0; bit `first` is the first lane's. The blend reads the sign bits.
inline Floats allow(Floats v, uint32_t word, int first) {
  const __m256i to_sign = _mm256_sub_epi32(_mm256_set1_epi32(31 - first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  const __m256i signs = _mm256_sllv_epi32(_mm256_set1_epi32(static_cast<int32_t>(word)), to_sign);
  return _mm256_blendv_ps(all(-__builtin_inff()), v, _mm256_castsi256_ps(signs));
}
inline Flags no_flags() { return _mm256_setzero_ps(); }
inline Flags unordered(Floats a, Floats b, Flags before) {
  return _mm256_or_ps(before, _mm256_cmp_ps(a, b, _CMP_UNORD_Q));
}
inline bool any(Flags flags) { return _mm256_movemask_ps(flags) != 0; }
inline unsigned not_less(Floats v, Floats bound) {
  return static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(v, bound, _CMP_NLT_UQ)));
}
// Per lane, how many values were not less than a bound.
using Counts = __m256i;
inline Counts no_counts() { return _mm256_setzero_si256(); }
inline Counts count_not_less(Floats v, Floats bound, Counts before) {
  return _mm256_sub_epi32(before, _mm256_castps_si256(_mm256_cmp_ps(v, bound, _CMP_NLT_UQ)));
}
inline int64_t total(Counts counts) {
  alignas(32) int32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i *>(lanes), counts);
  return int64_t{lanes[0]} + lanes[1] + lanes[2] + lanes[3] + lanes[4] + lanes[5] + lanes[6] + lanes[7];
}

struct Doubles {
  __m256d low, high;
};
inline Doubles zeros() { return {_mm256_setzero_pd(), _mm256_setzero_pd()}; }
inline Doubles every(double x) { return {_mm256_set1_pd(x), _mm256_set1_pd(x)}; }
inline Doubles widen(const float *x) {
  return {_mm256_cvtps_pd(_mm_loadu_ps(x)), _mm256_cvtps_pd(_mm_loadu_ps(x + 4))};
}
inline void narrow(float *x, Doubles a) {
  _mm_storeu_ps(x, _mm256_cvtpd_ps(a.low));
  _mm_storeu_ps(x + 4, _mm256_cvtpd_ps(a.high));
}
inline void put(double *x, Doubles a) {
  _mm256_storeu_pd(x, a.low);
  _mm256_storeu_pd(x + 4, a.high);
}
inline Doubles operator+(Doubles a, Doubles b) { return {_mm256_add_pd(a.low, b.low), _mm256_add_pd(a.high, b.high)}; }
inline Doubles operator-(Doubles a, Doubles b) { return {_mm256_sub_pd(a.low, b.low), _mm256_sub_pd(a.high, b.high)}; }
inline Doubles operator*(Doubles a, Doubles b) { return {_mm256_mul_pd(a.low, b.low), _mm256_mul_pd(a.high, b.high)}; }
inline Doubles at_least(Doubles a, double low) {
  const __m256d bound = _mm256_set1_pd(low);
  return {_mm256_max_pd(a.low, bound), _mm256_max_pd(a.high, bound)};
}
inline Doubles fused(Doubles a, Doubles b, Doubles c) {
  return {_mm256_fmadd_pd(a.low, b.low, c.low), _mm256_fmadd_pd(a.high, b.high, c.high)};
}
inline __m256d exponent_from_low_bits(__m256d a) {
  return _mm256_castsi256_pd(_mm256_slli_epi64(_mm256_castpd_si256(a), 52));
}
inline Doubles exponent_from_low_bits(Doubles a) {
  return {exponent_from_low_bits(a.low), exponent_from_low_bits(a.high)};
}
