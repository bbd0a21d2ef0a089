// Table rows as points of the metric, eight coordinates at a time (docs/contract/graph.md, section 2).
#ifndef TOPW_CUDA_POINTS_H
#define TOPW_CUDA_POINTS_H

#include <math.h>

#include "../native/half.h"
#include "../native/quantised.h"
#include "block.h"

namespace topw::crop {

constexpr int kPiece = 8;  // coordinates per load: 16 bytes of the 16-bit types
constexpr double kSmallestNorm = 1e-12;

struct alignas(16) Sixteen {  // bytes, loaded by one instruction
  uint32_t words[4];
};

struct Piece {
  float at[kPiece];
};

// An undecoded piece: several loads are issued before any is decoded.
struct Raw {
  Sixteen halves[2];
};

__device__ __forceinline__ Piece floats_of(const Raw &raw) {
  Piece piece;
#pragma unroll
  for (int i = 0; i < kPiece; ++i) piece.at[i] = float_of_bits(raw.halves[i / 4].words[i % 4]);
  return piece;
}

__device__ __forceinline__ Raw sixteens_at(const float *from) {
  const Sixteen *const halves = reinterpret_cast<const Sixteen *>(from);
  return {{halves[0], halves[1]}};
}

__device__ __forceinline__ float float_of_short(uint16_t bits, int32_t dtype) {
  return dtype == TOPW_FLOAT16 ? from_float16(bits) : from_bfloat16(bits);
}

// Coordinates k to k + 7 of statistics, 0 after the last.
__device__ TOPW_OUT_OF_LINE inline Piece read_statistics(const float *from, int32_t k, int32_t hidden) {
  Piece piece;
#pragma unroll
  for (int i = 0; i < kPiece; ++i) piece.at[i] = k + i < hidden ? from[k + i] : 0.0f;
  return piece;
}

// Coordinates k to k + 7 of a row of codes, decoded as in dequantise_row. A piece is in one block.
__device__ TOPW_OUT_OF_LINE inline Piece read_codes(const topw_table &table, int64_t token, int32_t k) {
  const topw_blocks &blocks = table.blocks;
  const int32_t hidden = static_cast<int32_t>(table.hidden), block = k / blocks.block_size;
  const int64_t elements = hidden / static_cast<int32_t>(codes_per_element(table.dtype, blocks));
  const int32_t zero = blocks.zero_points
                           ? code_at(table, blocks.zero_points, token, zero_points_in_row(table), block)
                           : default_zero_point(table.dtype, blocks);
  const float step = scale_at(blocks, token * blocks_in_row(table) + block);
  Piece piece;
#pragma unroll 1
  for (int i = 0; i < kPiece; ++i) {
    const int32_t code = k + i < hidden ? code_at(table, table.rows, token, elements, k + i) : zero;
    float value = static_cast<float>(code - zero) * step;
    if (blocks.scale_type == TOPW_FLOAT16) value = round_to_float16(value);
#pragma unroll
    for (int n = 0; n < kPiece - 1; ++n) piece.at[n] = piece.at[n + 1];  // indices must be compile-time constants
    piece.at[kPiece - 1] = value;
  }
  return piece;
}

// Coordinates k to k + 7 of a row of floats of any type and alignment.
__device__ TOPW_OUT_OF_LINE inline Piece read_apart(const topw_table &table, int64_t token, int32_t k) {
  if (table.blocks.bits != 0) return read_codes(table, token, k);
  const int32_t hidden = static_cast<int32_t>(table.hidden);
  if (table.dtype == TOPW_FLOAT32)
    return read_statistics(static_cast<const float *>(table.rows) + token * hidden, k, hidden);
  const uint16_t *const from = static_cast<const uint16_t *>(table.rows) + token * hidden + k;
  Piece piece;
#pragma unroll
  for (int i = 0; i < kPiece; ++i) piece.at[i] = k + i < hidden ? float_of_short(from[i], table.dtype) : 0.0f;
  return piece;
}

// The divisor of a token's point, and its length.
struct Length {
  float inverse_norm;
  float squared;  // of Points::point's result; NaN or inf if float32 overflowed
};

class Points {
 public:
  __device__ Points(const topw_table &table, int32_t metric)
      : table_(table),
        whitened_(metric != TOPW_MAHALANOBIS),
        hidden_(static_cast<int32_t>(table.hidden)),
        whole_(table.blocks.bits == 0 && hidden_ % kPiece == 0 && sixteens(table.rows) && sixteens(table.mean) &&
               sixteens(table.inverse_std)) {}

  __device__ int32_t hidden() const { return hidden_; }

  // Coordinates k to k + 7 of a row, 0 after the last; k is a multiple of 8.
  __device__ __forceinline__ Raw fetch(int64_t token, int32_t k) const {
    if (whole_) {
      const int64_t from = token * hidden_ + k;
      if (table_.dtype == TOPW_FLOAT32) return sixteens_at(static_cast<const float *>(table_.rows) + from);
      return {{*reinterpret_cast<const Sixteen *>(static_cast<const uint16_t *>(table_.rows) + from), {}}};
    }
    const Piece piece = read_apart(table_, token, k);
    Raw raw;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) memcpy(&raw.halves[i / 4].words[i % 4], &piece.at[i], sizeof(float));
    return raw;
  }

  __device__ __forceinline__ Piece decode(const Raw &raw) const {
    if (!whole_ || table_.dtype == TOPW_FLOAT32) return floats_of(raw);
    Piece piece;
    if (table_.dtype == TOPW_BFLOAT16) {
#pragma unroll
      for (int i = 0; i < kPiece; ++i) piece.at[i] = from_bfloat16(short_of(raw, i));
      return piece;
    }
#pragma unroll
    for (int i = 0; i < kPiece; ++i) piece.at[i] = from_float16(short_of(raw, i));
    return piece;
  }

  __device__ __forceinline__ Piece rate(int32_t k) const { return statistics(table_.inverse_std, k); }
  __device__ __forceinline__ Piece mean(int32_t k) const { return statistics(table_.mean, k); }

  // The point of a row. mahalanobis omits the mean, which cancels in distances.
  __device__ __forceinline__ Piece point(Piece piece, int32_t k, float inverse_norm) const {
    const Piece of_white = rate(k);
    if (!whitened_) {
#pragma unroll
      for (int i = 0; i < kPiece; ++i) piece.at[i] = piece.at[i] * inverse_norm * of_white.at[i];
      return piece;
    }
    const Piece middle = mean(k);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) piece.at[i] = (piece.at[i] - middle.at[i]) * of_white.at[i] * inverse_norm;
    return piece;
  }

  // By one warp. Adds 32 coordinates in float32, then in double: the same on every device.
  __device__ Length measure(int64_t token) const {
    constexpr int kTogether = 4;  // pieces whose squares are added in float32
    double norm = 0, length = 0;
#pragma unroll 1
    for (int32_t from = lane_index() * kPiece; from < hidden_; from += kTogether * kWarp * kPiece) {
      Raw raw[kTogether];
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        const int32_t k = from + n * kWarp * kPiece;
        raw[n] = {};
        if (k < hidden_) raw[n] = fetch(token, k);
      }
      float norm_here = 0, length_here = 0;
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        const int32_t k = from + n * kWarp * kPiece;
        if (k < hidden_) add_squares(decode(raw[n]), k, norm_here, length_here);
      }
      norm += static_cast<double>(norm_here);
      length += static_cast<double>(length_here);
    }
    norm = sqrt(warp_reduce(norm, Plus()));
    length = warp_reduce(length, Plus());
    const bool vanishing = norm < kSmallestNorm;
    const double inverse = 1 / (vanishing ? kSmallestNorm : norm);
    const bool unit = whitened_ && norm < static_cast<double>(INFINITY) && !vanishing;
    return {static_cast<float>(inverse), unit ? 1.0f : static_cast<float>(length * inverse * inverse)};
  }

  // Inverse norm, squared distance and product, in double, by one warp.
  __device__ double inverse_norm_in_double(int64_t token) const {
    double sum = 0;
#pragma unroll 1
    for (int32_t k = lane_index() * kPiece; k < hidden_; k += kWarp * kPiece) {
      const Piece row = decode(fetch(token, k)), of_white = rate(k), middle = mean(k);
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        const double plain = static_cast<double>(row.at[i]);
        const double white = (plain - static_cast<double>(middle.at[i])) * static_cast<double>(of_white.at[i]);
        sum += whitened_ ? white * white : plain * plain;
      }
    }
    const double norm = sqrt(warp_reduce(sum, Plus()));
    return 1 / (norm < kSmallestNorm ? kSmallestNorm : norm);
  }

  __device__ void compare_in_double(int64_t one, int64_t other, double &squares, double &product) const {
    const double inverse_one = inverse_norm_in_double(one), inverse_other = inverse_norm_in_double(other);
    squares = product = 0;
#pragma unroll 1
    for (int32_t k = lane_index() * kPiece; k < hidden_; k += kWarp * kPiece) {
      const Piece x = decode(fetch(one, k)), y = decode(fetch(other, k)), of_white = rate(k), middle = mean(k);
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        const double moved = whitened_ ? static_cast<double>(middle.at[i]) : 0.0;
        const double per = static_cast<double>(of_white.at[i]);
        const double a = (static_cast<double>(x.at[i]) - moved) * inverse_one * per;
        const double b = (static_cast<double>(y.at[i]) - moved) * inverse_other * per;
        squares += (a - b) * (a - b);
        product += a * b;
      }
    }
    squares = warp_reduce(squares, Plus());
    product = warp_reduce(product, Plus());
  }

 private:
  __device__ static bool sixteens(const void *address) {
    return reinterpret_cast<uintptr_t>(address) % sizeof(Sixteen) == 0;
  }

  __device__ __forceinline__ static uint16_t short_of(const Raw &raw, int i) {
    return static_cast<uint16_t>(raw.halves[0].words[i / 2] >> (i % 2 * 16));
  }

  __device__ __forceinline__ Piece statistics(const float *from, int32_t k) const {
    return whole_ ? floats_of(sixteens_at(from + k)) : read_statistics(from, k, hidden_);
  }

  __device__ __forceinline__ void add_squares(const Piece &row, int32_t k, float &norm, float &length) const {
    const Piece of_white = rate(k);
    Piece middle = {};
    if (whitened_) middle = mean(k);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      const float white = (row.at[i] - middle.at[i]) * of_white.at[i], plain = whitened_ ? white : row.at[i];
      norm += plain * plain;
      length += white * white;
    }
  }

  const topw_table &table_;
  bool whitened_;  // before normalisation
  int32_t hidden_;
  bool whole_;     // every piece is complete and 16-byte aligned
};

}  // namespace topw::crop
#endif
