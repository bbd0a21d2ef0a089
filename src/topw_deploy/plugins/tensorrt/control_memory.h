// The kernels' control memory for one TensorRT execution context.
//
// The kernels leave control memory zero (topw_cuda.h), so memory that persists needs no clearing. TensorRT's workspace
// would need a memset node in every captured graph, because other layers overwrite it. Older blocks stay until the end,
// because captured graphs keep using them.
#ifndef TOPW_TENSORRT_CONTROL_MEMORY_H
#define TOPW_TENSORRT_CONTROL_MEMORY_H

#include "topw_cuda.h"

namespace topw {

class ControlMemory {
 public:
  ControlMemory() = default;
  ControlMemory(const ControlMemory &) = delete;
  ControlMemory &operator=(const ControlMemory &) = delete;

  // Any device may be current. Steps that use the memory must have ended.
  ~ControlMemory() {
    while (count_) topw_cuda_release(blocks_[--count_]);
  }

  // Reserves at least `bytes`. Allocates only if every block is smaller; CUDA refuses to allocate while the thread
  // captures a stream. If out of memory, returns NULL and sets *failed to a cudaError_t.
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
  void *blocks_[64];  // int64_t allows at most 63 doublings of a byte
};

}  // namespace topw

#endif
