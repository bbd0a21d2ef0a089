// Tables of 4- and 8-bit codes: which of onnxruntime's GatherBlockQuantized forms are read, and how a row is made.
#ifndef TOPW_QUANTISED_H
#define TOPW_QUANTISED_H

#include <stddef.h>

#include "topw.h"

namespace topw {

// Reads the node's attribute `table_form`: false for a form that is not known. Sets the bits and the block size of a
// GatherBlockQuantized with gather_axis 0 and quantize_axis 1, and 0 bits for Gather(axis=0).
bool read_table_form(const char *form, topw_blocks *blocks);

// How many codes there are in a stored element: two of 4 bits to an uint8, one in all other types.
int64_t codes_per_element(int32_t dtype, const topw_blocks &blocks);

// Blocks in a row, and the stored elements that the zero points of a row take.
int64_t blocks_in_row(const topw_table &table);
int64_t zero_points_in_row(const topw_table &table);

// Whether the sizes and types of a quantised table fit together.
bool quantised_readable(const topw_table &table);

// The row of `token` as float32 into `room` [hidden]: (code - zero point) * scale, as GatherBlockQuantized rounds it.
void dequantise_row(const topw_table &table, int64_t token, float *room);

}  // namespace topw
#endif
