// Products with a weight in blocks of 4 or 8 bits, as in onnxruntime's MatMulNBits, for any number of rows.
//
// Activations are rounded to 8 bits, with a scale per row and block. A block's integers are summed exactly, and blocks
// are added in ascending order with fused multiply-adds. So a row's result depends neither on the other rows, nor on
// threads, nor on the instruction set.
#ifndef TOPW_PRODUCT_H
#define TOPW_PRODUCT_H

#include <stddef.h>
#include <stdint.h>

namespace topw {

constexpr int64_t kRowPadding = 16;  // rows that may be read or computed behind the last
constexpr int64_t kTile = 16;  // outputs that are computed together
constexpr int64_t kSmallestBlock = 16, kLargestBlock = 256;  // inputs
constexpr int64_t kUnit = 16, kWindow = 4 * kUnit;           // bytes of an output's codes that are read together
constexpr int64_t kDirectInputs = 2048, kUnpackedInputs = 512;  // inputs of a chunk, see product_loops.inc

// A weight is (code - zero point) * scale, plus an offset. All arrays are borrowed.
struct Matrix {
  int64_t outputs, inputs, block_size;
  int bits;                    // 4 or 8
  const uint8_t *codes;        // [outputs, blocks, block_size * bits / 8], the low half of a byte first
  const float *scales;         // [outputs, blocks]
  const uint8_t *zero_points;  // [outputs, ceil(blocks * bits / 8)], packed like codes; null: 2^(bits - 1)
  const float *offsets;        // [outputs, blocks]; null: 0
  const float *bias;           // [outputs]; null: 0

  int64_t blocks() const { return (inputs + block_size - 1) / block_size; }
  int64_t block_bytes() const { return block_size * bits / 8; }
  int64_t zero_bytes() const { return (blocks() * bits + 7) / 8; }
  int64_t tiles() const { return (outputs + kTile - 1) / kTile; }
};

// Rounded activations, padded with zeros to whole windows.
struct Rounded {
  int64_t rows, width, blocks;
  int8_t *values;   // [rows + kRowPadding, width]; for 4-bit codes, of each 8 inputs the even ones first
  float *scales;    // [rows, blocks]
  int32_t *minus;   // [rows, blocks]: minus the sum of the values, times 2^(bits - 1) if there are no zero points
  float *totals;    // [rows, blocks]: sums of the activations, if there are offsets
};

size_t rounded_size(const Matrix &, int64_t rows);  // bytes that place_rounded needs
Rounded place_rounded(const Matrix &, int64_t rows, void *memory);

struct Product {
  const char *name;
  // Rounds the activations x [inputs] of row `row`. NaN or infinity makes all outputs of the row NaN.
  void (*round_row)(const Matrix &, const float *x, const Rounded &, int64_t row);
  // Writes the outputs of tiles `first` to `last` - 1 into y [rows, outputs].
  void (*multiply)(const Matrix &, const Rounded &, int64_t first, int64_t last, float *y);
};

const Product &product();  // for the instruction set in use

extern const Product kProductGeneric;
#if defined(__x86_64__)
extern const Product kProductAvx2, kProductAvx512;
#if __GNUC__ >= 11 || __clang_major__ >= 12
#define TOPW_AVX_VNNI
extern const Product kProductAvxVnni;
#if defined(__linux__)
#define TOPW_AMX
extern const Product kProductAmx;
#endif
#endif
#elif defined(__aarch64__)
extern const Product kProductDot;
#endif

}  // namespace topw
#endif
