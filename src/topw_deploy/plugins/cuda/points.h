// Rows of the embedding table as points of the metric, eight coordinates at a time (docs/graph.md, section 2).
#ifndef TOPW_CUDA_POINTS_H
#define TOPW_CUDA_POINTS_H

#include <math.h>

#include "../native/half.h"
#include "../native/quantised.h"
#include "block.h"
#include "team_scratch.h"

namespace topw::crop {

constexpr int kPiece = 8;             // coordinates of a row that are read at once: 16 bytes of the short types
constexpr double kSmallestNorm = 1e-12;

struct alignas(16) Sixteen {  // bytes, loaded by one instruction
  uint32_t words[4];
};

struct Piece {
  float at[kPiece];
};

__device__ __forceinline__ float float_of_short(uint16_t bits, int32_t dtype) {
  return dtype == TOPW_FLOAT16 ? from_float16(bits) : from_bfloat16(bits);
}

__device__ __forceinline__ bool whole_sixteens(const void *address) {
  return reinterpret_cast<uintptr_t>(address) % sizeof(Sixteen) == 0;
}

__device__ __forceinline__ Piece read_floats(const float *from, int32_t count) {
  Piece piece;
  if (count == kPiece && whole_sixteens(from)) {
    Sixteen halves[2];
    halves[0] = reinterpret_cast<const Sixteen *>(from)[0];
    halves[1] = reinterpret_cast<const Sixteen *>(from)[1];
#pragma unroll
    for (int i = 0; i < kPiece; ++i) piece.at[i] = float_of_bits(halves[i / 4].words[i % 4]);
    return piece;
  }
#pragma unroll
  for (int i = 0; i < kPiece; ++i) piece.at[i] = i < count ? from[i] : 0.0f;
  return piece;
}

__device__ __forceinline__ Piece read_shorts(const uint16_t *from, int32_t count, int32_t dtype) {
  Piece piece;
  if (count == kPiece && whole_sixteens(from)) {
    const Sixteen pairs = *reinterpret_cast<const Sixteen *>(from);
#pragma unroll
    for (int i = 0; i < kPiece; ++i)
      piece.at[i] = float_of_short(static_cast<uint16_t>(pairs.words[i / 2] >> (i % 2 * 16)), dtype);
    return piece;
  }
#pragma unroll
  for (int i = 0; i < kPiece; ++i) piece.at[i] = i < count ? float_of_short(from[i], dtype) : 0.0f;
  return piece;
}

// (code - zero point) * scale, as dequantise_row has it.
__device__ TOPW_OUT_OF_LINE inline Piece read_codes(const topw_table &table, int64_t token, int32_t k, int32_t count) {
  const topw_blocks &blocks = table.blocks;
  const int64_t in_row = blocks_in_row(table), zeros_in_row = zero_points_in_row(table);
  const int64_t elements = table.hidden / codes_per_element(table.dtype, blocks);
  Piece piece;
  int32_t zero = 0;
  float step = 0;
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    piece.at[i] = 0.0f;
    if (i >= count) continue;
    if (i == 0 || (k + i) % blocks.block_size == 0) {
      const int64_t block = (k + i) / blocks.block_size;
      zero = blocks.zero_points ? code_at(table, blocks.zero_points, token, zeros_in_row, block)
                                : middle(table.dtype, blocks);
      step = scale_at(blocks, token * in_row + block);
    }
    const float value = static_cast<float>(code_at(table, table.rows, token, elements, k + i) - zero) * step;
    piece.at[i] = blocks.scale_type == TOPW_FLOAT16 ? rounded_to_float16(value) : value;
  }
  return piece;
}

// Coordinates k to k + 7 of a token's row, 0 behind the last; k is a multiple of 8.
__device__ __forceinline__ Piece read_piece(const topw_table &table, int64_t token, int32_t k) {
  const int32_t left = static_cast<int32_t>(table.hidden) - k, count = left < kPiece ? left : kPiece;
  const int64_t from = token * table.hidden + k;
  if (table.blocks.bits != 0) return read_codes(table, token, k, count);
  if (table.dtype == TOPW_FLOAT32) return read_floats(static_cast<const float *>(table.rows) + from, count);
  return read_shorts(static_cast<const uint16_t *>(table.rows) + from, count, table.dtype);
}

// The coordinates of a token's point. For mahalanobis it is moved by the mean, which all distances are blind to.
__device__ __forceinline__ Piece read_point(const topw_table &table, int32_t metric, int64_t token, int32_t k,
                                            float inverse_norm) {
  const int32_t left = static_cast<int32_t>(table.hidden) - k, count = left < kPiece ? left : kPiece;
  Piece piece = read_piece(table, token, k);
  const Piece rate = read_floats(table.inverse_std + k, count);
  if (metric == TOPW_MAHALANOBIS) {
#pragma unroll
    for (int i = 0; i < kPiece; ++i) piece.at[i] = piece.at[i] * inverse_norm * rate.at[i];
    return piece;
  }
  const Piece mean = read_floats(table.mean + k, count);
#pragma unroll
  for (int i = 0; i < kPiece; ++i) piece.at[i] = (piece.at[i] - mean.at[i]) * rate.at[i] * inverse_norm;
  return piece;
}

// What the points of a token are divided by, and how long they are then.
struct Length {
  float inverse_norm;
  float squared;  // of the point as read_point answers it; NaN or inf where float32 could not say
};

// By one warp. Sums of 32 coordinates in float32, these in double: the same on every device.
__device__ inline Length measure_length(const topw_table &table, int32_t metric, int64_t token) {
  constexpr int kTogether = 4;  // pieces whose squares are added up in float32
  const int32_t d = static_cast<int32_t>(table.hidden);
  double norm = 0, length = 0;
  for (int32_t from = lane_index() * kPiece; from < d; from += kTogether * kWarp * kPiece) {
    float norm_here = 0, length_here = 0;
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      const int32_t k = from + n * kWarp * kPiece;
      if (k >= d) break;
      const int32_t count = d - k < kPiece ? d - k : kPiece;
      const Piece row = read_piece(table, token, k), rate = read_floats(table.inverse_std + k, count);
      const bool whitened = metric != TOPW_MAHALANOBIS;
      Piece mean = {};
      if (whitened) mean = read_floats(table.mean + k, count);
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        const float white = (row.at[i] - mean.at[i]) * rate.at[i], plain = whitened ? white : row.at[i];
        norm_here += plain * plain;
        length_here += white * white;
      }
    }
    norm += static_cast<double>(norm_here);
    length += static_cast<double>(length_here);
  }
  norm = sqrt(warp_reduce(norm, Plus()));
  length = warp_reduce(length, Plus());
  const bool vanishing = norm < kSmallestNorm;
  const double inverse = 1 / (vanishing ? kSmallestNorm : norm);
  const bool unit = metric != TOPW_MAHALANOBIS && norm < static_cast<double>(INFINITY) && !vanishing;
  return {static_cast<float>(inverse), unit ? 1.0f : static_cast<float>(length * inverse * inverse)};
}

}  // namespace topw::crop
#endif
