// 4- and 8-bit tables in the forms of onnxruntime's GatherBlockQuantized.
#ifndef TOPW_QUANTISED_H
#define TOPW_QUANTISED_H

#include <stddef.h>

#include "half.h"
#include "host_device.h"
#include "topw.h"

namespace topw {

// Parses the attribute `table_form`; false if unknown. Sets bits and block size for GatherBlockQuantized with
// gather_axis 0 and quantize_axis 1; 0 bits for Gather(axis=0).
bool read_table_form(const char *form, topw_blocks *blocks);

// Codes per stored element: two for 4 bits in uint8, else one.
TOPW_SHARED_CODE inline int64_t codes_per_element(int32_t dtype, const topw_blocks &blocks) {
  return dtype == TOPW_UINT8 && blocks.bits == 4 ? 2 : 1;
}

// Blocks of a row, and stored elements of a row's zero points.
TOPW_SHARED_CODE inline int64_t blocks_in_row(const topw_table &table) {
  return (table.hidden + table.blocks.block_size - 1) / table.blocks.block_size;
}

TOPW_SHARED_CODE inline int64_t zero_points_in_row(const topw_table &table) {
  const int64_t together = codes_per_element(table.dtype, table.blocks);
  return (blocks_in_row(table) + together - 1) / together;
}

TOPW_SHARED_CODE inline int32_t half_byte(const uint8_t *packed, int64_t index) {
  return index % 2 ? packed[index / 2] >> 4 : packed[index / 2] & 15;
}

TOPW_SHARED_CODE inline int32_t signed_half_byte(const uint8_t *packed, int64_t index) {
  const int32_t found = half_byte(packed, index);
  return found >= 8 ? found - 16 : found;
}

// The default zero point: mid-range for uint8, 0 for a 4-bit tensor.
TOPW_SHARED_CODE inline int32_t default_zero_point(int32_t dtype, const topw_blocks &blocks) {
  return dtype == TOPW_UINT8 ? 1 << (blocks.bits - 1) : 0;
}

TOPW_SHARED_CODE inline float scale_at(const topw_blocks &blocks, int64_t index) {
  return blocks.scale_type == TOPW_FLOAT32 ? static_cast<const float *>(blocks.scales)[index]
                                           : from_float16(static_cast<const uint16_t *>(blocks.scales)[index]);
}

// Element k of a row with `elements` stored elements.
TOPW_SHARED_CODE inline int32_t code_at(const topw_table &table, const void *stored, int64_t row, int64_t elements,
                                        int64_t k) {
  const uint8_t *bytes = static_cast<const uint8_t *>(stored);
  if (table.dtype == TOPW_INT4) return signed_half_byte(bytes, row * elements + k);
  if (table.dtype == TOPW_UINT4) return half_byte(bytes, row * elements + k);
  if (table.blocks.bits == 4) return half_byte(bytes + row * elements, k);
  return bytes[row * elements + k];
}

// Whether a quantised table's sizes and types fit together.
bool is_readable_quantised(const topw_table &table);

// Decodes a row to float32 [hidden]: (code - zero point) * scale, rounded as in GatherBlockQuantized.
void dequantise_row(const topw_table &table, int64_t token, float *decoded);

}  // namespace topw
#endif
