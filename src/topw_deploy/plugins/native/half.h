// 16-bit floats to and from float32.
#ifndef TOPW_HALF_H
#define TOPW_HALF_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "host_device.h"

namespace topw {

TOPW_SHARED_CODE inline float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

TOPW_SHARED_CODE inline float from_bfloat16(uint16_t bits) { return float_of_bits(static_cast<uint32_t>(bits) << 16); }

// IEEE binary16: a multiplication rebiases the exponent exactly, subnormals included.
TOPW_SHARED_CODE inline float from_float16(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16, rest = (bits & 0x7fffu) << 13;
  const bool finite = (bits & 0x7c00u) != 0x7c00u;
  const float magnitude = finite ? float_of_bits(rest) * 0x1p112f : float_of_bits(rest | 0x7f800000u);
  return sign ? -magnitude : magnitude;
}

// Rounds to binary16 (ties to even), as float32.
TOPW_SHARED_CODE inline float round_to_float16(float value) {
  const float magnitude = fabsf(value);
  if (!(magnitude < 65520.0f)) return magnitude == magnitude ? copysignf(INFINITY, value) : value;
  // Adding this aligns binary16's last bit with float32's. Subnormals (below 2^-14) share one spacing.
  uint32_t bits;
  memcpy(&bits, &magnitude, sizeof bits);
  const uint32_t exponent = bits >> 23 < 113 ? 113 : bits >> 23;
  const float coarse = float_of_bits((exponent + 13) << 23);
  volatile float sum = magnitude + coarse;  // volatile: prevents simplification
  return copysignf(sum - coarse, value);
}

}  // namespace topw
#endif
