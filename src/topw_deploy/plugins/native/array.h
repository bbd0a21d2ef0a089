// Scratch memory that grows and is kept: malloc without exceptions, aligned for the widest vectors.
#ifndef TOPW_ARRAY_H
#define TOPW_ARRAY_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

namespace topw {

// An array of plain values whose contents do not survive growth.
template <class T>
class Array {
 public:
  Array() = default;
  Array(const Array &) = delete;
  Array &operator=(const Array &) = delete;
  ~Array() { free(memory_); }

  // Room for `count` values; false if memory ran out, and then there is room for none.
  [[nodiscard]] bool reserve(int64_t count) {
    if (count <= size_) return true;
    free(memory_);
    memory_ = nullptr;
    values_ = nullptr;
    size_ = 0;
    if (static_cast<uint64_t>(count) > (SIZE_MAX / 2 - kAlignment) / sizeof(T)) return false;
    memory_ = malloc(static_cast<size_t>(count) * sizeof(T) + kAlignment);
    if (!memory_) return false;
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory_);
    values_ = reinterpret_cast<T *>((address + kAlignment - 1) / kAlignment * kAlignment);
    size_ = count;
    return true;
  }

  T *data() const { return values_; }
  T &operator[](int64_t i) const { return values_[i]; }

 private:
  static constexpr size_t kAlignment = 64;
  void *memory_ = nullptr;
  T *values_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace topw
#endif
