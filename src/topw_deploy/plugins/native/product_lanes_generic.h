// Integers in compiler vectors (SSE2, NEON) for products. Included inside a namespace, after lanes_generic.h.

#if defined(__ARM_NEON)
constexpr int kMostRows = 4, kFewRows = 0, kTiledRows = 0;
#else
constexpr int kMostRows = 1, kFewRows = 0, kTiledRows = 0;
#endif
constexpr bool kTakesBytes = false;
typedef int32_t Ints __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));
typedef uint8_t Octets __attribute__((vector_size(16)));

inline Floats multiply(Floats a, Floats b) { return a * b; }
inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__ARM_NEON)
  return vfmaq_f32(c, a, b);
#else
  for (int i = 0; i < kLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}
inline Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }
inline Ints read(const int32_t *x) {
  Ints v;
  memcpy(&v, x, sizeof v);
  return v;
}
inline void write(int32_t *x, Ints v) { memcpy(x, &v, sizeof v); }
inline Ints every(int32_t x) { return Ints{x, x, x, x}; }
inline Ints shifted(Ints v, int bits) { return (Ints)((Words)v >> static_cast<uint32_t>(bits)); }
inline Ints masked(Ints v, int mask) { return v & mask; }
inline Ints low_nibbles(Ints v) { return v & 0x0f0f0f0f; }
inline Ints high_nibbles(Ints v) { return (Ints)((Octets)v >> 4); }
inline Ints times(Ints zeros, int32_t minus) { return zeros * minus; }
inline Ints plus_16_times(Ints sum, Ints v) { return sum + 16 * v; }

template <int units>
inline __attribute__((always_inline)) void interleave(const uint8_t *base, int64_t stride, Ints *v) {
#pragma GCC unroll 4
  for (int unit = 0; unit < units; ++unit, v += 4, base += kUnit) {
    Ints in[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) memcpy(&in[j], base + j * stride, sizeof in[j]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) v[i] = Ints{in[0][i], in[1][i], in[2][i], in[3][i]};
  }
}
