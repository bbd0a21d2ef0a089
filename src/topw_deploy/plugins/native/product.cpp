// The layout of rounded activations.

#include "product.h"

namespace topw {
namespace {

int64_t rounded_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

int64_t width_of(const Matrix &matrix) { return rounded_up(matrix.inputs, kWindow * 8 / matrix.bits); }
int64_t blocks_of(const Matrix &matrix) {
  const int64_t inputs = width_of(matrix);
  return rounded_up(inputs, matrix.block_size) / matrix.block_size;
}
int64_t padded_width(const Matrix &matrix) { return blocks_of(matrix) * matrix.block_size; }

}  // namespace

size_t rounded_size(const Matrix &matrix, int64_t rows) {
  return static_cast<size_t>((rows + kRowPadding) * padded_width(matrix) + rows * 12 * blocks_of(matrix));
}

Rounded place_rounded(const Matrix &matrix, int64_t rows, void *memory) {
  Rounded found;
  found.rows = rows;
  found.width = padded_width(matrix);
  found.blocks = blocks_of(matrix);
  found.values = static_cast<int8_t *>(memory);
  found.scales = reinterpret_cast<float *>(found.values + (rows + kRowPadding) * found.width);
  found.minus = reinterpret_cast<int32_t *>(found.scales + rows * found.blocks);
  found.totals = reinterpret_cast<float *>(found.minus + rows * found.blocks);
  return found;
}

}  // namespace topw
