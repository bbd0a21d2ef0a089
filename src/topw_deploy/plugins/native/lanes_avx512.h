// AVX-512: 16 floats; 8 doubles. Included inside a namespace, after <immintrin.h>.

constexpr int kLanes = 16;
using Floats = __m512;
using Flags = __mmask16;

inline Floats load(const float *x) { return _mm512_loadu_ps(x); }
inline void store(float *x, Floats v) { _mm512_storeu_ps(x, v); }
inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
// The nearest integers as the bits of floats.
inline Floats with_bits(Floats integers) { return _mm512_castsi512_ps(_mm512_cvtps_epi32(integers)); }
// v 2^n; n in the low bits of `shifted`.
inline Floats scaled(Floats v, Floats shifted) {
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(v), exponent));
}
// columns[i] = x[j * stride + i] for the kLanes rows j.
inline void load_columns(const float *x, int64_t stride, Floats *columns) {
  __m512 rows[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const float *at = x + i * stride;
    rows[i] = _mm512_castps128_ps512(_mm_loadu_ps(at));
    rows[i] = _mm512_insertf32x4(rows[i], _mm_loadu_ps(at + 4 * stride), 1);
    rows[i] = _mm512_insertf32x4(rows[i], _mm_loadu_ps(at + 8 * stride), 2);
    rows[i] = _mm512_insertf32x4(rows[i], _mm_loadu_ps(at + 12 * stride), 3);
  }
  const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(rows[0], rows[1]));
  const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(rows[0], rows[1]));
  const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(rows[2], rows[3]));
  const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(rows[2], rows[3]));
  columns[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
  columns[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
  columns[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
  columns[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
}
inline float highest(Floats v) { return _mm512_reduce_max_ps(v); }
// The maxima of neighbouring lanes of `a` and of `b`, alternately.
inline __m256 larger_pairs(__m256 a, __m256 b) {
  return _mm256_max_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
}
// out[i] = highest(v[i]) for four vectors.
inline void store_highest(float *out, const Floats *v) {
  __m256 half[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) half[i] = _mm256_max_ps(_mm512_castps512_ps256(v[i]), _mm512_extractf32x8_ps(v[i], 1));
  const __m256d first = _mm256_castps_pd(larger_pairs(half[0], half[1]));
  const __m256d second = _mm256_castps_pd(larger_pairs(half[2], half[3]));
  const __m256 all_four = _mm256_max_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(first, second)),
                                        _mm256_castpd_ps(_mm256_unpackhi_pd(first, second)));
  _mm_storeu_ps(out, _mm_max_ps(_mm256_castps256_ps128(all_four), _mm256_extractf128_ps(all_four, 1)));
}
// -inf where a bit of `word` is 0; bit `first` is the first lane's.
inline Floats allow(Floats v, uint32_t word, int first) {
  return _mm512_mask_mov_ps(all(-__builtin_inff()), static_cast<__mmask16>(word >> first), v);
}
inline Flags no_flags() { return 0; }
inline Flags unordered(Floats a, Floats b, Flags before) {
  return _kor_mask16(before, _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q));
}
inline bool any(Flags flags) { return flags != 0; }
inline unsigned not_less(Floats v, Floats bound) { return _mm512_cmp_ps_mask(v, bound, _CMP_NLT_UQ); }
// How many values were not less than a bound.
using Counts = int64_t;
inline Counts no_counts() { return 0; }
inline Counts count_not_less(Floats v, Floats bound, Counts before) {
  return before + __builtin_popcount(not_less(v, bound));
}
inline int64_t total(Counts counts) { return counts; }

struct Doubles {
  __m512d v;
};
inline Doubles zeros() { return {_mm512_setzero_pd()}; }
inline Doubles every(double x) { return {_mm512_set1_pd(x)}; }
inline Doubles widen(const float *x) { return {_mm512_cvtps_pd(_mm256_loadu_ps(x))}; }
inline void narrow(float *x, Doubles a) { _mm256_storeu_ps(x, _mm512_cvtpd_ps(a.v)); }
inline void put(double *x, Doubles a) { _mm512_storeu_pd(x, a.v); }
inline Doubles operator+(Doubles a, Doubles b) { return {_mm512_add_pd(a.v, b.v)}; }
inline Doubles operator-(Doubles a, Doubles b) { return {_mm512_sub_pd(a.v, b.v)}; }
inline Doubles operator*(Doubles a, Doubles b) { return {_mm512_mul_pd(a.v, b.v)}; }
inline Doubles at_least(Doubles a, double low) { return {_mm512_max_pd(a.v, _mm512_set1_pd(low))}; }
inline Doubles fused(Doubles a, Doubles b, Doubles c) { return {_mm512_fmadd_pd(a.v, b.v, c.v)}; }
inline Doubles exponent_from_low_bits(Doubles a) {
  return {_mm512_castsi512_pd(_mm512_slli_epi64(_mm512_castpd_si512(a.v), 52))};
}
