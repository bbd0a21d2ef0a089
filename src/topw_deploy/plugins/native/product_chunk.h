// A tile's weights in a chunk of inputs, as the loops of every instruction set read them.
#ifndef TOPW_PRODUCT_CHUNK_H
#define TOPW_PRODUCT_CHUNK_H

#include <stdint.h>
#include <string.h>

#include "product.h"

namespace topw {

constexpr int64_t kChunkBlocks = kDirectInputs / kSmallestBlock;
constexpr int64_t kPadding = 8;  // blocks: those of the last window may be missing

// The arrays have a column for each output of the tile.
struct Chunk {
  int64_t first, blocks;  // the chunk's blocks
  int64_t output, step;   // the tile's first output, and from each output to the next
  int64_t stride;         // bytes from an output's codes to those of the next
  const uint8_t *codes;   // in the matrix, or a copy
  const uint8_t *ahead;   // what prefetch_codes requests for the first window
  int64_t left, jump;     // bytes to the row's end from there, and from there to the next tile's codes
  bool is_tiled = false;  // whether add_tiles computes the rows
  alignas(64) float scales[kChunkBlocks + kPadding][kTile];
  alignas(64) int32_t zeros[kChunkBlocks + kPadding][kTile];
  alignas(64) float offsets[kChunkBlocks + kPadding][kTile];
};

// Copies of a chunk's arrays for tiles at the matrix's end. Elsewhere, reads beyond an output's end stay in the matrix.
struct Copies {
  alignas(64) uint8_t codes[kTile][kDirectInputs + kWindow];
  alignas(64) uint8_t floats[kTile][4 * kChunkBlocks + kUnit];
  alignas(64) uint8_t zeros[kTile][kChunkBlocks + kUnit];
};

constexpr int64_t kAhead = 512;  // bytes from a read to the next request; measured

// Requests the codes that lie kAhead bytes behind window number `window`, maybe in the next tile. Into the second cache
// only: the outputs' codes may all have the same place in the first.
inline __attribute__((always_inline)) void prefetch_codes(const Chunk &chunk, int64_t window) {
  const int64_t at = window * kWindow;
  const uint8_t *from = chunk.ahead + at + (at < chunk.left ? 0 : chunk.jump);
#pragma GCC unroll 16
  for (int64_t i = 0; i < kTile; ++i) __builtin_prefetch(from + i * chunk.stride, 0, 2);
}

}  // namespace topw
#endif
