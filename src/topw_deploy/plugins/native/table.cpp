#include "table.h"

#include <math.h>
#include <string.h>

#include <algorithm>

namespace topw {
namespace {

constexpr double kSmallestNorm = 1e-12;

float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

float from_bfloat16(uint16_t bits) { return from_bits(static_cast<uint32_t>(bits) << 16); }

// IEEE binary16: the exponent is rebiased by a multiplication, which is exact and takes subnormals along.
float from_float16(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16, rest = (bits & 0x7fffu) << 13;
  const bool finite = (bits & 0x7c00u) != 0x7c00u;
  const float magnitude = finite ? from_bits(rest) * 0x1p112f : from_bits(rest | 0x7f800000u);
  return sign ? -magnitude : magnitude;
}

}  // namespace

Table::Table(const topw_table &table, int32_t metric)
    : rows_(table.rows),
      dtype_(table.dtype),
      by_{table.mean, table.inverse_std, table.hidden, metric == TOPW_MAHALANOBIS} {}

bool Table::readable(const topw_table &table, int64_t vocab) {
  const bool known = table.dtype == TOPW_FLOAT32 || table.dtype == TOPW_FLOAT16 || table.dtype == TOPW_BFLOAT16;
  return known && table.rows && table.mean && table.inverse_std && table.tokens >= vocab && table.hidden >= 1;
}

const float *Table::row(int64_t token, float *room) const {
  if (dtype_ == TOPW_FLOAT32) return static_cast<const float *>(rows_) + token * by_.hidden;
  const uint16_t *bits = static_cast<const uint16_t *>(rows_) + token * by_.hidden;
  if (dtype_ == TOPW_FLOAT16)
    std::transform(bits, bits + by_.hidden, room, from_float16);
  else
    std::transform(bits, bits + by_.hidden, room, from_bfloat16);
  return room;
}

double Table::norm(const float *row) const { return std::max(sqrt(hot().squared_norm(row, by_)), kSmallestNorm); }

}  // namespace topw
