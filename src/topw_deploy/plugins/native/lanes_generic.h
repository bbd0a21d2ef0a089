// Compiler vectors (SSE2, NEON): 4 floats; 8 doubles in four registers. Included inside a namespace, after <string.h>.

constexpr int kLanes = 4;
typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Flags __attribute__((vector_size(16)));
typedef uint32_t Bits __attribute__((vector_size(16)));
typedef double Pair __attribute__((vector_size(16)));
typedef int64_t PairBits __attribute__((vector_size(16)));

inline Floats load(const float *x) {
  Floats v;
  memcpy(&v, x, sizeof v);
  return v;
}
inline void store(float *x, Floats v) { memcpy(x, &v, sizeof v); }
inline Floats all(float x) { return Floats{x, x, x, x}; }
inline Floats add(Floats a, Floats b) { return a + b; }
inline Floats subtract(Floats a, Floats b) { return a - b; }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__ARM_NEON)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}
// The integer parts as the bits of floats.
inline Floats with_bits(Floats integers) { return (Floats)__builtin_convertvector(integers, Flags); }
// v 2^n; n in the low bits of `shifted`.
inline Floats scaled(Floats v, Floats shifted) { return (Floats)((Bits)v + ((Bits)shifted << 23)); }
// columns[i] = x[j * stride + i] for the kLanes rows j.
inline void load_columns(const float *x, int64_t stride, Floats *columns) {
  for (int i = 0; i < 4; ++i) columns[i] = Floats{x[i], x[stride + i], x[2 * stride + i], x[3 * stride + i]};
}
inline float highest(Floats v) {
  const float left = v[0] > v[1] ? v[0] : v[1], right = v[2] > v[3] ? v[2] : v[3];
  return left > right ? left : right;
}
// out[i] = highest(v[i]) for four vectors.
inline void store_highest(float *out, const Floats *v) {
  for (int i = 0; i < 4; ++i) out[i] = highest(v[i]);
}
constexpr float kNo = -__builtin_inff(), kYes = __builtin_inff();
// Four bits of a mask as upper bounds.
const Floats kMost[16] = {
    {kNo, kNo, kNo, kNo},   {kYes, kNo, kNo, kNo},   {kNo, kYes, kNo, kNo},   {kYes, kYes, kNo, kNo},
    {kNo, kNo, kYes, kNo},  {kYes, kNo, kYes, kNo},  {kNo, kYes, kYes, kNo},  {kYes, kYes, kYes, kNo},
    {kNo, kNo, kNo, kYes},  {kYes, kNo, kNo, kYes},  {kNo, kYes, kNo, kYes},  {kYes, kYes, kNo, kYes},
    {kNo, kNo, kYes, kYes}, {kYes, kNo, kYes, kYes}, {kNo, kYes, kYes, kYes}, {kYes, kYes, kYes, kYes}};
// -inf where a bit of `word` is 0; bit `first` is the first lane's. An allowed NaN becomes +inf, also invalid.
inline Floats allow(Floats v, uint32_t word, int first) {
  const Floats most = kMost[word >> first & 15];
  return v < most ? v : most;
}
inline Flags no_flags() { return Flags{0, 0, 0, 0}; }
inline Flags unordered(Floats a, Floats b, Flags before) { return before | (a != a) | (b != b); }
inline bool any(Flags flags) { return (flags[0] | flags[1] | flags[2] | flags[3]) != 0; }
inline unsigned not_less(Floats v, Floats bound) {
  const Flags less = v < bound;
  const Flags bits = ~less & Flags{1, 2, 4, 8};
  return static_cast<unsigned>(bits[0] | bits[1] | bits[2] | bits[3]);
}
// Per lane, how many values were not less than a bound.
using Counts = Flags;
inline Counts no_counts() { return no_flags(); }
inline Counts count_not_less(Floats v, Floats bound, Counts before) { return before - ~(v < bound); }
inline int64_t total(Counts counts) { return int64_t{counts[0]} + counts[1] + counts[2] + counts[3]; }

struct Doubles {
  Pair part[4];
};
inline Doubles every(double x) {
  const Pair v = {x, x};
  return {{v, v, v, v}};
}
inline Doubles zeros() { return every(0); }
inline Doubles widen(const float *x) {
  return {{Pair{x[0], x[1]}, Pair{x[2], x[3]}, Pair{x[4], x[5]}, Pair{x[6], x[7]}}};
}
inline void narrow(float *x, Doubles a) {
  for (int i = 0; i < 8; ++i) x[i] = static_cast<float>(a.part[i / 2][i % 2]);
}
inline void put(double *x, Doubles a) { memcpy(x, a.part, sizeof a.part); }
inline Doubles operator+(Doubles a, Doubles b) {
  return {{a.part[0] + b.part[0], a.part[1] + b.part[1], a.part[2] + b.part[2], a.part[3] + b.part[3]}};
}
inline Doubles operator-(Doubles a, Doubles b) {
  return {{a.part[0] - b.part[0], a.part[1] - b.part[1], a.part[2] - b.part[2], a.part[3] - b.part[3]}};
}
inline Doubles operator*(Doubles a, Doubles b) {
  return {{a.part[0] * b.part[0], a.part[1] * b.part[1], a.part[2] * b.part[2], a.part[3] * b.part[3]}};
}
inline Doubles at_least(Doubles a, double low) {
  const Pair bound = {low, low};
  for (Pair &v : a.part) v = v > bound ? v : bound;
  return a;
}
inline Doubles fused(Doubles a, Doubles b, Doubles c) { return a * b + c; }
inline Doubles exponent_from_low_bits(Doubles a) {
  for (Pair &v : a.part) v = (Pair)((PairBits)v << 52);
  return a;
}
