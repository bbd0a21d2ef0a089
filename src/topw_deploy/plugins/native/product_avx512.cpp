// Products for AVX-512 with VNNI, and with the tiles of AMX.

#include <string.h>

#include "product_chunk.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(                                                                       \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,amx-tile,amx-int8"))), \
    apply_to = function)
#else
#pragma GCC diagnostic ignored "-Wuninitialized"  // gcc 12 warns about its own _mm512_undefined (bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma")
#if defined(TOPW_AMX)
#pragma GCC target("amx-tile,amx-int8")  // only add_tiles uses them
#endif
#endif

namespace topw {
namespace {

#include "lanes_avx512.h"

constexpr int kMostRows = 8, kFewRows = 4;
#if defined(TOPW_AMX)
constexpr int kTiledRows = 16;
#else
constexpr int kTiledRows = 0;
#endif
constexpr bool kTakesBytes = true;
using Ints = __m512i;

inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }
inline Ints read(const int32_t *x) { return _mm512_loadu_si512(x); }
inline void write(int32_t *x, Ints v) { _mm512_storeu_si512(x, v); }
inline Ints every(int32_t x) { return _mm512_set1_epi32(x); }
inline Ints shifted(Ints v, int bits) { return _mm512_srl_epi32(v, _mm_cvtsi32_si128(bits)); }
inline Ints masked(Ints v, int mask) { return _mm512_and_si512(v, _mm512_set1_epi32(mask)); }
inline Ints low_nibbles(Ints v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline Ints high_nibbles(Ints v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
inline Ints times(Ints zeros, int32_t minus) { return _mm512_madd_epi16(zeros, _mm512_set1_epi32(minus)); }

template <int n>
inline Ints dot(Ints sum, const Ints *codes, const int8_t *x) {
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i) {
    int32_t four;
    memcpy(&four, x + 4 * i, sizeof four);
    sum = _mm512_dpbusd_epi32(sum, codes[i], _mm512_set1_epi32(four));
  }
  return sum;
}

template <int units>
inline __attribute__((always_inline)) void interleave(const uint8_t *base, int64_t stride, Ints *v) {
  // First, the 128-bit part i of v[4 u + j] has unit u of output 4 i + j.
#pragma GCC unroll 4
  for (int part = 0; part < 4; ++part)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j)
#pragma GCC unroll 4
      for (int unit = 0; unit < units; ++unit) {
        const uint8_t *from = base + (4 * part + j) * stride + unit * kUnit;
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
        Ints &to = v[4 * unit + j];
        to = part == 0 ? _mm512_castsi128_si512(bytes)
                       : _mm512_mask_broadcast_i32x4(to, static_cast<__mmask16>(15 << 4 * part), bytes);
      }
  // Then, each part transposes its four words of four outputs.
#pragma GCC unroll 4
  for (int unit = 0; unit < units; ++unit, v += 4) {
    const Ints a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
    const Ints c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
    v[0] = _mm512_unpacklo_epi64(a, c);
    v[1] = _mm512_unpackhi_epi64(a, c);
    v[2] = _mm512_unpacklo_epi64(b, d);
    v[3] = _mm512_unpackhi_epi64(b, d);
  }
}

#include "product_loops.inc"

// The sum of each 128-bit part of 16 vectors, which belong to the outputs of a tile; part i of the 16 is in sums[i].
// With fewer sums than 4, neighbouring parts are added: 2 and 2, or all.
inline __attribute__((always_inline)) void add_parts(const Ints *four_outputs, int count, Ints *sums) {
  const Ints *v = four_outputs;  // v[i]: the sums of outputs 4 i to 4 i + 3 in each part
  const Ints a = _mm512_shuffle_i32x4(v[0], v[1], 0x88), b = _mm512_shuffle_i32x4(v[0], v[1], 0xdd);
  const Ints c = _mm512_shuffle_i32x4(v[2], v[3], 0x88), d = _mm512_shuffle_i32x4(v[2], v[3], 0xdd);
  if (count == 4) {
    sums[0] = _mm512_add_epi32(sums[0], _mm512_shuffle_i32x4(a, c, 0x88));
    sums[1] = _mm512_add_epi32(sums[1], _mm512_shuffle_i32x4(b, d, 0x88));
    sums[2] = _mm512_add_epi32(sums[2], _mm512_shuffle_i32x4(a, c, 0xdd));
    sums[3] = _mm512_add_epi32(sums[3], _mm512_shuffle_i32x4(b, d, 0xdd));
    return;
  }
  const Ints left = _mm512_add_epi32(a, b), right = _mm512_add_epi32(c, d);
  const Ints even = _mm512_shuffle_i32x4(left, right, 0x88), odd = _mm512_shuffle_i32x4(left, right, 0xdd);
  sums[0] = _mm512_add_epi32(sums[0], even);
  sums[count - 1] = _mm512_add_epi32(sums[count - 1], odd);
}

// For few rows, interleaving the codes would cost more than their products. So codes are multiplied as they are, a
// window of one output at a time, and then the lanes are added up. windows: of a block, at least 1.
template <int rows, int bits, int per_window, int windows>
void add_few(const Matrix &matrix, const Chunk &chunk, const Rounded &rounded, int64_t row, float *sums) {
  const ChunkRows<rows> in(matrix, chunk, rounded, row);
  const Ints evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const Ints odds = _mm512_add_epi32(evens, every(1));
  constexpr int kVectors = 8 / bits;  // of a window's activations
  Floats sum[rows];
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) sum[r] = load(sums + r * kTile);
  const int64_t stride = chunk.stride;
  const uint8_t *codes = chunk.codes;
  int64_t number = 0;  // of the window
  for (int64_t block = 0; block < chunk.blocks; block += per_window, number += windows) {
    Ints x[rows][windows][kVectors];
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
      for (int w = 0; w < windows; ++w) {
        const int8_t *from = in.x[r] + (number + w) * kVectors * kWindow;
        const Ints first = _mm512_loadu_si512(from);
        if constexpr (bits == 8) {
          x[r][w][0] = first;
        } else {
          const Ints second = _mm512_loadu_si512(from + kWindow);
          x[r][w][0] = _mm512_permutex2var_epi32(first, evens, second);
          x[r][w][1] = _mm512_permutex2var_epi32(first, odds, second);
        }
      }
    Ints integers[rows][per_window], four_outputs[rows][4];
#pragma GCC unroll 4
    for (int w = 0; w < windows; ++w) prefetch_codes(chunk, number + w);
    const uint8_t *window = codes + number * kWindow;
#pragma GCC unroll 4
    for (int group = 0; group < 4; ++group, window += 4 * stride) {
      Ints v[rows][4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
        for (int w = 0; w < windows; ++w) {
          const Ints bytes = _mm512_loadu_si512(window + i * stride + w * kWindow);
#pragma GCC unroll 4
          for (int r = 0; r < rows; ++r) {
            const Ints before = w == 0 ? _mm512_setzero_si512() : v[r][i];
            if constexpr (bits == 8) {
              v[r][i] = _mm512_dpbusd_epi32(before, bytes, x[r][w][0]);
            } else {
              v[r][i] = _mm512_dpbusd_epi32(before, low_nibbles(bytes), x[r][w][0]);
              v[r][i] = _mm512_dpbusd_epi32(v[r][i], high_nibbles(bytes), x[r][w][1]);
            }
          }
        }
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
        const Ints *u = v[r];
        const Ints a = _mm512_add_epi32(_mm512_unpacklo_epi32(u[0], u[1]), _mm512_unpackhi_epi32(u[0], u[1]));
        const Ints b = _mm512_add_epi32(_mm512_unpacklo_epi32(u[2], u[3]), _mm512_unpackhi_epi32(u[2], u[3]));
        four_outputs[r][group] = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < per_window; ++i)
        integers[r][i] = start_of_block(matrix, chunk, block + i, 0, in.minus[r][block + i]);
      add_parts(four_outputs[r], per_window, integers[r]);
#pragma GCC unroll 4
      for (int i = 0; i < per_window; ++i)
        sum[r] = add_block(matrix, chunk, block + i, 0, in, r, integers[r][i], sum[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) store(sums + r * kTile, sum[r]);
}

template <int rows, int bits, int per_window>
void add_few(const Matrix &matrix, const Chunk &chunk, const Rounded &rounded, int64_t row, float *sums) {
  const int64_t bytes = matrix.block_bytes();
  if (per_window > 1 || bytes == kWindow) return add_few<rows, bits, per_window, 1>(matrix, chunk, rounded, row, sums);
  if (bytes == 2 * kWindow) return add_few<rows, bits, 1, 2>(matrix, chunk, rounded, row, sums);
  add_few<rows, bits, 1, 4>(matrix, chunk, rounded, row, sums);
}

#if defined(TOPW_AMX)
constexpr int64_t kTiledInputs = 64;  // at most, of a tile

// Tile 0 has the integers of the rows and 16 outputs, tile 1 activations, tile 2 unpacked codes.
template <int rows>
void add_tiles(const Matrix &matrix, const Chunk &chunk, const Ints *unpacked, const Rounded &rounded, int64_t row,
               float *sums) {
  const ChunkRows<rows> in(matrix, chunk, rounded, row);
  const int64_t inputs = matrix.block_size < kTiledInputs ? matrix.block_size : kTiledInputs;
  const int64_t bytes = matrix.block_bytes(), together = bytes < kWindow ? kWindow / bytes : 1;
  const int64_t blocks = (chunk.blocks + together - 1) / together * together;  // a block of zeros ends -0
  const int8_t *x = in.x[0];
  Floats sum[rows];
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) sum[r] = load(sums + r * kTile);
  for (int64_t block = 0; block < blocks; ++block) {
    alignas(64) int32_t integers[rows][kTile];
    _tile_zero(0);
    for (int64_t at = 0; at < matrix.block_size; at += inputs, x += inputs, unpacked += inputs / 4) {
      __asm__ volatile("" ::: "memory");  // gcc's intrinsics do not say that they read memory
      _tile_loadd(1, x, static_cast<size_t>(rounded.width));
      _tile_loadd(2, unpacked, sizeof(Ints));
      _tile_dpbsud(0, 1, 2);
    }
    _tile_stored(0, integers, sizeof(Ints));
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      const Ints start = start_of_block(matrix, chunk, block, 0, in.minus[r][block]);
      sum[r] = add_block(matrix, chunk, block, 0, in, r, _mm512_add_epi32(start, read(integers[r])), sum[r]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) store(sums + r * kTile, sum[r]);
}

void multiply_tiled(const Matrix &matrix, const Rounded &in, int64_t first, int64_t last, float *y) {
  Chunk chunk;
  chunk.is_tiled = in.rows > kMostRows;
  if (!chunk.is_tiled) return multiply(matrix, in, first, last, chunk, y);
  struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } sizes;
  const int64_t inputs = matrix.block_size < kTiledInputs ? matrix.block_size : kTiledInputs;
  sizes.rows[0] = sizes.rows[1] = kTiledRows;
  sizes.rows[2] = static_cast<uint8_t>(inputs / 4);
  sizes.row_bytes[0] = sizes.row_bytes[2] = sizeof(Ints);
  sizes.row_bytes[1] = static_cast<uint16_t>(inputs);
  __asm__ volatile("" ::"r"(&sizes) : "memory");
  _tile_loadconfig(&sizes);
  multiply(matrix, in, first, last, chunk, y);
  _tile_release();
}
#endif

}  // namespace

const Product kProductAvx512 = {"avx512_vnni", round_row, multiply};
#if defined(TOPW_AMX)
const Product kProductAmx = {"amx", round_row, multiply_tiled};
#endif

}  // namespace topw

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
