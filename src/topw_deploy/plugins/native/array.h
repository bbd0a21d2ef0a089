// Scratch arrays that only grow: malloc without exceptions, aligned for the widest vectors.
#ifndef TOPW_ARRAY_H
#define TOPW_ARRAY_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

namespace topw {

template <class T>
class Array {
 public:
  Array() = default;
  Array(const Array &) = delete;
  Array &operator=(const Array &) = delete;
  ~Array() { free(memory_); }

  // Growing loses the contents. False if out of memory.
  [[nodiscard]] bool reserve(int64_t count) { return count <= size_ || move_to(count, 0); }

  // Keeps the first `used` values. False if out of memory.
  [[nodiscard]] bool extend(int64_t used, int64_t count) {
    return count <= size_ || move_to(count > 2 * size_ ? count : 2 * size_, used);
  }

  T *data() const { return values_; }
  T &operator[](int64_t i) const { return values_[i]; }

 private:
  static constexpr size_t kAlignment = 64;

  bool move_to(int64_t count, int64_t used) {
    if (static_cast<uint64_t>(count) > (SIZE_MAX / 2 - kAlignment) / sizeof(T)) return false;
    void *memory = malloc(static_cast<size_t>(count) * sizeof(T) + kAlignment);
    if (!memory) return false;
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory);
    T *values = reinterpret_cast<T *>((address + kAlignment - 1) / kAlignment * kAlignment);
    if (used > 0) memcpy(values, values_, static_cast<size_t>(used) * sizeof(T));
    free(memory_);
    memory_ = memory;
    values_ = values;
    size_ = count;
    return true;
  }

  void *memory_ = nullptr;
  T *values_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace topw
#endif
