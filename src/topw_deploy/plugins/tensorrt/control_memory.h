// Control memory of the kernels for one execution context of TensorRT; control.py is the same for Python, and says why.
#ifndef TOPW_TENSORRT_CONTROL_MEMORY_H
#define TOPW_TENSORRT_CONTROL_MEMORY_H

#include "topw_cuda.h"

namespace topw {

// Blocks of the current device, of which the newest serves. Each is at least twice as large as the one before, and none
// is freed before the object is: a graph that was captured with an older block goes on using it. One context runs one
// step at a time, so all its steps may share a block; two contexts may run at once and need one object each.
class ControlMemory {
 public:
  ControlMemory() = default;
  ControlMemory(const ControlMemory &) = delete;
  ControlMemory &operator=(const ControlMemory &) = delete;

  // Whichever device is current. The owner's steps must have ended.
  ~ControlMemory() {
    while (count_) topw_cuda_release(blocks_[--count_]);
  }

  // At least `bytes`. Allocates only where every block is smaller; CUDA refuses that to a thread that captures a stream.
  // NULL, and *failed a cudaError_t, where no memory can be had.
  void *reserve(int64_t bytes, int *failed) {
    *failed = 0;
    if (bytes > size_) {
      if (bytes < 2 * size_) bytes = 2 * size_;
      if ((*failed = topw_cuda_allocate(bytes, &blocks_[count_]))) return nullptr;
      ++count_;
      size_ = bytes;
    }
    return count_ ? blocks_[count_ - 1] : nullptr;
  }

 private:
  int64_t size_ = 0;  // bytes of the newest block
  int count_ = 0;
  void *blocks_[64];  // 63 doublings of a byte are all that an int64_t can count
};

}  // namespace topw

#endif
