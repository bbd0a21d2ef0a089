// One row from logits to token.
#ifndef TOPW_ROW_H
#define TOPW_ROW_H

#include "array.h"
#include "topw.h"

struct topw_workspace {
  topw::Array<float> logits;
  topw::Array<int32_t> order, kept;
  topw::Array<int32_t> by_phi;
  topw::Array<double> a, p, phi, dist, x, y;
  topw::Array<uint8_t> member, next;
};

namespace topw {

// False if memory ran out; then nothing was answered.
bool sample_row(const topw_options &, const topw_table *, const topw_inputs &, int64_t row, topw_workspace &,
                const topw_outputs &);

}  // namespace topw
#endif
