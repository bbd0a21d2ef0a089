#include "order.h"

#include <string.h>

namespace topw {
namespace {

constexpr int64_t kShort = 48;  // up to here insertion is faster

void insert(Sorter::Entry *entries, int64_t count) {
  for (int64_t i = 1; i < count; ++i) {
    const Sorter::Entry entry = entries[i];
    int64_t at = i;
    for (; at > 0 && entries[at - 1].key > entry.key; --at) entries[at] = entries[at - 1];
    entries[at] = entry;
  }
}

}  // namespace

uint64_t descending(double value) {
  value += 0.0;  // -0 becomes 0
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits >> 63 ? bits : bits ^ 0x7fffffffffffffffu;
}

uint64_t descending(float value) {
  value += 0.0f;
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits >> 31 ? bits : bits ^ 0x7fffffffu;
}

float value_of(uint64_t descending_float) {
  const uint32_t key = static_cast<uint32_t>(descending_float), bits = key >> 31 ? key : key ^ 0x7fffffffu;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

const Sorter::Entry *Sorter::sort(int64_t count) {
  Entry *from = entries_.data(), *to = spare_.data();
  if (count <= kShort) {
    insert(from, count);
    return from;
  }
  uint64_t same = ~uint64_t{0}, first = from[0].key;  // the bits that all keys share need no pass
  for (int64_t i = 1; i < count; ++i) same &= ~(from[i].key ^ first);
  for (int shift = 0; shift < 64; shift += 8) {
    if (((same >> shift) & 255) == 255) continue;
    int64_t starts[256] = {};
    for (int64_t i = 0; i < count; ++i) ++starts[(from[i].key >> shift) & 255];
    int64_t start = 0;
    for (int64_t &bucket : starts) {
      const int64_t size = bucket;
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
