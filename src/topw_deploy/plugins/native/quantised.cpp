#include "quantised.h"

#include <stdlib.h>
#include <string.h>

#include "half.h"

namespace topw {
namespace {

constexpr char kGather[] = "Gather(axis=0)", kBlockwise[] = "com.microsoft.GatherBlockQuantized(";

// Parses `name=number` at *text and advances past it and a comma. False for anything else.
bool read_attribute(const char **text, const char *name, long *number) {
  const size_t length = strlen(name);
  if (strncmp(*text, name, length) != 0 || (*text)[length] != '=') return false;
  char *end = nullptr;
  *number = strtol(*text + length + 1, &end, 10);
  if (end == *text + length + 1) return false;
  *text = *end == ',' ? end + 1 : end;
  return true;
}

// `code_at(stored, row, per_row, k)`: element k of a row of codes or zero points.
template <class CodeAt>
void dequantise(const topw_table &table, int64_t token, float *decoded, CodeAt code_at) {
  const topw_blocks &blocks = table.blocks;
  const int64_t in_row = blocks_in_row(table), zeros_in_row = zero_points_in_row(table);
  const int64_t elements = table.hidden / codes_per_element(table.dtype, blocks);
  const uint8_t *codes = static_cast<const uint8_t *>(table.rows);
  const uint8_t *zeros = static_cast<const uint8_t *>(blocks.zero_points);
  for (int64_t block = 0; block < in_row; ++block) {
    const int32_t zero = zeros ? code_at(zeros, token, zeros_in_row, block) : default_zero_point(table.dtype, blocks);
    const float step = scale_at(blocks, token * in_row + block);
    const int64_t start = block * blocks.block_size, end = start + blocks.block_size;
    const int64_t stop = end < table.hidden ? end : table.hidden;
    for (int64_t k = start; k < stop; ++k)
      decoded[k] = static_cast<float>(code_at(codes, token, elements, k) - zero) * step;
  }
}

// Two 4-bit codes per byte: looks up precomputed products.
void dequantise_pairs(const topw_table &table, int64_t token, float *decoded) {
  const topw_blocks &blocks = table.blocks;
  const int64_t in_row = blocks_in_row(table), zeros_in_row = zero_points_in_row(table);
  const uint8_t *codes = static_cast<const uint8_t *>(table.rows) + token * (table.hidden / 2);
  const uint8_t *zeros = static_cast<const uint8_t *>(blocks.zero_points);
  if (zeros) zeros += token * zeros_in_row;
  for (int64_t block = 0; block < in_row; ++block) {
    const int32_t zero = zeros ? half_byte(zeros, block) : default_zero_point(table.dtype, blocks);
    const float step = scale_at(blocks, token * in_row + block);
    float value_of_code[16];
    for (int32_t code = 0; code < 16; ++code) value_of_code[code] = static_cast<float>(code - zero) * step;
    const int64_t start = block * blocks.block_size, end = start + blocks.block_size;
    const int64_t stop = end < table.hidden ? end : table.hidden;
    for (int64_t k = start; k < stop; k += 2) {
      const uint8_t pair = codes[k / 2];
      decoded[k] = value_of_code[pair & 15];
      decoded[k + 1] = value_of_code[pair >> 4];
    }
  }
}

}  // namespace

bool read_table_form(const char *form, topw_blocks *blocks) {
  *blocks = {};
  if (strcmp(form, kGather) == 0) return true;
  if (strncmp(form, kBlockwise, sizeof kBlockwise - 1) != 0) return false;
  const char *text = form + sizeof kBlockwise - 1;
  long bits = 4, size = 128, gather_axis = 0, quantise_axis = 1;  // GatherBlockQuantized's defaults
  read_attribute(&text, "bits", &bits);  // alphabetical, all optional
  read_attribute(&text, "block_size", &size);
  read_attribute(&text, "gather_axis", &gather_axis);
  read_attribute(&text, "quantize_axis", &quantise_axis);
  const bool rows = gather_axis == 0 && (quantise_axis == 1 || quantise_axis == -1);
  const bool sizes = (bits == 4 || bits == 8) && size >= 16 && size <= 65536 && (size & (size - 1)) == 0;
  if (strcmp(text, ")") != 0 || !rows || !sizes) return false;
  blocks->bits = static_cast<int32_t>(bits);
  blocks->block_size = static_cast<int32_t>(size);
  return true;
}

bool is_readable_quantised(const topw_table &table) {
  const topw_blocks &blocks = table.blocks;
  const bool four = table.dtype == TOPW_UINT4 || table.dtype == TOPW_INT4;
  const bool fits = table.dtype == TOPW_UINT8 ? blocks.bits == 4 || blocks.bits == 8 : four && blocks.bits == 4;
  const bool scales = blocks.scales && (blocks.scale_type == TOPW_FLOAT32 || blocks.scale_type == TOPW_FLOAT16);
  const bool even = blocks.block_size >= 2 && blocks.block_size % 2 == 0;  // both codes of a pair are in one block
  return fits && scales && even && table.hidden % codes_per_element(table.dtype, blocks) == 0;
}

void dequantise_row(const topw_table &table, int64_t token, float *decoded) {
  // A uint8 row starts at a byte; a 4-bit tensor is packed without gaps.
  const auto byte = [](const uint8_t *stored, int64_t row, int64_t per_row, int64_t k) -> int32_t {
    return stored[row * per_row + k];
  };
  const auto packed = [](const uint8_t *stored, int64_t row, int64_t per_row, int64_t k) {
    return half_byte(stored, row * per_row + k);
  };
  const auto packed_signed = [](const uint8_t *stored, int64_t row, int64_t per_row, int64_t k) {
    return signed_half_byte(stored, row * per_row + k);
  };
  if (table.dtype == TOPW_INT4)
    dequantise(table, token, decoded, packed_signed);
  else if (table.dtype == TOPW_UINT4)
    dequantise(table, token, decoded, packed);
  else if (table.blocks.bits == 4)
    dequantise_pairs(table, token, decoded);
  else
    dequantise(table, token, decoded, byte);
  if (table.blocks.scale_type == TOPW_FLOAT16)
    for (int64_t k = 0; k < table.hidden; ++k) decoded[k] = round_to_float16(decoded[k]);
}

}  // namespace topw
