// Radix sort: stable and linear.
#ifndef TOPW_ORDER_H
#define TOPW_ORDER_H

#include <stdint.h>
#include <string.h>

#include "array.h"

namespace topw {

// A key that sorts values in descending order; -0 equals 0.
inline uint64_t descending_key(double value) {
  value += 0.0;  // -0 becomes 0
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits >> 63 ? bits : bits ^ 0x7fffffffffffffffu;
}

inline uint64_t descending_key(float value) {
  value += 0.0f;
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits >> 31 ? bits : bits ^ 0x7fffffffu;
}

// A key that sorts values >= 0 in ascending order; -0 equals 0.
inline uint64_t ascending_key(double value) {
  value += 0.0;
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of_key(uint64_t descending_float) {
  const uint32_t key = static_cast<uint32_t>(descending_float), bits = key >> 31 ? key : key ^ 0x7fffffffu;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

class Sorter {
 public:
  struct Entry {
    uint64_t key;
    int32_t item;
  };

  // False if out of memory.
  [[nodiscard]] bool reserve(int64_t count) { return entries_.reserve(count) && spare_.reserve(count); }
  void set(int64_t i, uint64_t key, int32_t item) const { entries_[i] = {key, item}; }
  // The first `count` entries by ascending key; stable.
  const Entry *sort(int64_t count);

 private:
  Array<Entry> entries_, spare_;
};

}  // namespace topw
#endif
