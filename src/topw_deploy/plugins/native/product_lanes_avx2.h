// Integers of AVX2 for products. Included inside a namespace, after lanes_avx2.h.

constexpr int kMostRows = 4, kFewRows = 0, kTiledRows = 0;
using Ints = __m256i;

inline Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats to_floats(Ints v) { return _mm256_cvtepi32_ps(v); }
inline Ints read(const int32_t *x) { return _mm256_loadu_si256(reinterpret_cast<const Ints *>(x)); }
inline void write(int32_t *x, Ints v) { _mm256_storeu_si256(reinterpret_cast<Ints *>(x), v); }
inline Ints every(int32_t x) { return _mm256_set1_epi32(x); }
inline Ints shifted(Ints v, int bits) { return _mm256_srl_epi32(v, _mm_cvtsi32_si128(bits)); }
inline Ints masked(Ints v, int mask) { return _mm256_and_si256(v, _mm256_set1_epi32(mask)); }
inline Ints low_nibbles(Ints v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
inline Ints high_nibbles(Ints v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }
inline Ints times(Ints zeros, int32_t minus) { return _mm256_madd_epi16(zeros, _mm256_set1_epi32(minus)); }
inline Ints plus_16_times(Ints sum, Ints v) { return _mm256_add_epi32(sum, _mm256_slli_epi32(v, 4)); }
inline Ints four_of(const int8_t *x) {
  int32_t four;
  memcpy(&four, x, sizeof four);
  return _mm256_set1_epi32(four);
}

template <int units>
inline __attribute__((always_inline)) void interleave(const uint8_t *base, int64_t stride, Ints *v) {
#pragma GCC unroll 4
  for (int unit = 0; unit < units; ++unit, v += 4, base += kUnit) {
    // First, the two parts of in[j] are the units of outputs j and 4 + j.
    Ints in[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j)
      in[j] = _mm256_loadu2_m128i(reinterpret_cast<const __m128i *>(base + (4 + j) * stride),
                                  reinterpret_cast<const __m128i *>(base + j * stride));
    // Then, each part transposes its four words of four outputs.
    const Ints a = _mm256_unpacklo_epi32(in[0], in[1]), b = _mm256_unpackhi_epi32(in[0], in[1]);
    const Ints c = _mm256_unpacklo_epi32(in[2], in[3]), d = _mm256_unpackhi_epi32(in[2], in[3]);
    v[0] = _mm256_unpacklo_epi64(a, c);
    v[1] = _mm256_unpackhi_epi64(a, c);
    v[2] = _mm256_unpacklo_epi64(b, d);
    v[3] = _mm256_unpackhi_epi64(b, d);
  }
}
