// Sorting by radix: stable, linear, and the same for a handful of tokens and for a vocabulary.
#ifndef TOPW_ORDER_H
#define TOPW_ORDER_H

#include <stdint.h>

#include "array.h"

namespace topw {

// A key by which ascending unsigned order is descending order of the value; -0 and 0 have the same key.
uint64_t descending(double value);
uint64_t descending(float value);
float value_of(uint64_t descending_float);

class Sorter {
 public:
  struct Entry {
    uint64_t key;
    int32_t item;
  };

  // Room for `count` entries; false if memory ran out.
  [[nodiscard]] bool reserve(int64_t count) { return entries_.reserve(count) && spare_.reserve(count); }
  void set(int64_t i, uint64_t key, int32_t item) const { entries_[i] = {key, item}; }
  // The first `count` entries by key, ascending; equal keys stay in their order.
  const Entry *sort(int64_t count);

 private:
  Array<Entry> entries_, spare_;
};

}  // namespace topw
#endif
