#include "table.h"

#include <math.h>

#include <algorithm>

#include "half.h"
#include "quantised.h"

namespace topw {
namespace {

constexpr double kSmallestNorm = 1e-12;

}  // namespace

Table::Table(const topw_table &table, int32_t metric)
    : stored_(table),
      by_{table.mean, table.inverse_std, table.hidden, metric == TOPW_MAHALANOBIS} {}

bool Table::is_readable(const topw_table &table, int64_t vocab) {
  const bool plain = table.dtype == TOPW_FLOAT32 || table.dtype == TOPW_FLOAT16 || table.dtype == TOPW_BFLOAT16;
  const bool known = table.blocks.bits != 0 ? is_readable_quantised(table) : plain;
  return known && table.rows && table.mean && table.inverse_std && table.tokens >= vocab && table.hidden >= 1;
}

const float *Table::row(int64_t token, float *decoded) const {
  if (stored_.blocks.bits != 0) {
    dequantise_row(stored_, token, decoded);
    return decoded;
  }
  if (stored_.dtype == TOPW_FLOAT32) return static_cast<const float *>(stored_.rows) + token * by_.hidden;
  const uint16_t *bits = static_cast<const uint16_t *>(stored_.rows) + token * by_.hidden;
  if (stored_.dtype == TOPW_FLOAT16)
    std::transform(bits, bits + by_.hidden, decoded, from_float16);
  else
    std::transform(bits, bits + by_.hidden, decoded, from_bfloat16);
  return decoded;
}

double Table::norm(const float *row) const { return std::max(sqrt(hot().squared_norm(row, by_)), kSmallestNorm); }

}  // namespace topw
