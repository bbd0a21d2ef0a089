#include "order.h"

namespace topw {
namespace {

constexpr int64_t kShort = 48;  // up to here insertion sort is faster

void insertion_sort(Sorter::Entry *entries, int64_t count) {
  for (int64_t i = 1; i < count; ++i) {
    const Sorter::Entry entry = entries[i];
    int64_t at = i;
    for (; at > 0 && entries[at - 1].key > entry.key; --at) entries[at] = entries[at - 1];
    entries[at] = entry;
  }
}

}  // namespace

const Sorter::Entry *Sorter::sort(int64_t count) {
  Entry *from = entries_.data(), *to = spare_.data();
  if (count <= kShort) {
    insertion_sort(from, count);
    return from;
  }
  uint64_t same = ~uint64_t{0}, first = from[0].key;  // skip bits shared by all keys
  for (int64_t i = 1; i < count; ++i) same &= ~(from[i].key ^ first);
  for (int shift = 0; shift < 64; shift += 8) {
    if (((same >> shift) & 255) == 255) continue;
    int32_t starts[256] = {};
    for (int64_t i = 0; i < count; ++i) ++starts[(from[i].key >> shift) & 255];
    int32_t start = 0;
    for (int32_t &bucket : starts) {
      const int32_t size = bucket;
      bucket = start;
      start += size;
    }
    for (int64_t i = 0; i < count; ++i) to[starts[(from[i].key >> shift) & 255]++] = from[i];
    Entry *const swapped = from;
    from = to;
    to = swapped;
  }
  return from;
}

}  // namespace topw
