// The operator's scratch memory on the device, a workspace for every stream that ever came.
#ifndef TOPW_CUDA_ORT_DEVICE_MEMORY_H
#define TOPW_CUDA_ORT_DEVICE_MEMORY_H

#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <thread>

#include "topw_cuda.h"

#if !defined(TOPW_EMULATE)
#include <cuda_runtime_api.h>
#endif

namespace topw {

#if defined(TOPW_EMULATE)  // where the device is the host

inline int allocate_on_device(void **memory, size_t bytes) {
  *memory = aligned_alloc(256, bytes);
  return *memory ? 0 : 2;  // cudaErrorMemoryAllocation
}
inline int clear_on_device(void *memory, size_t bytes, void *) { return memset(memory, 0, bytes) ? 0 : 1; }
inline void free_on_device(void *memory) { free(memory); }

#else

inline int allocate_on_device(void **memory, size_t bytes) { return cudaMalloc(memory, bytes); }
inline int clear_on_device(void *memory, size_t bytes, void *stream) {
  return cudaMemsetAsync(memory, 0, bytes, static_cast<cudaStream_t>(stream));
}
inline void free_on_device(void *memory) { cudaFree(memory); }  // waits for what still runs

#endif

// Memory for calls of at most this shape on one stream.
struct DeviceWorkspace {
  topw_cuda_shape shape;
  void *stream, *memory;
  DeviceWorkspace *next;
};

// A larger call gets a larger workspace, at least twice as large as those before it: so all of them together are at most
// twice the largest. None is freed before the operator is, for a captured graph goes on writing to the one it knows.
class DeviceWorkspaces {
 public:
  // Held while a workspace is found and a step launched into it. Two threads may run a session on one stream, and the
  // launches of one's step must not come between those of the other's.
  class Turn {
   public:
    explicit Turn(DeviceWorkspaces &all) : busy_(all.busy_) {
      while (busy_.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
    }
    ~Turn() { busy_.clear(std::memory_order_release); }
    Turn(const Turn &) = delete;
    Turn &operator=(const Turn &) = delete;

   private:
    std::atomic_flag &busy_;
  };

  ~DeviceWorkspaces() {
    while (DeviceWorkspace *workspace = all_) {
      all_ = workspace->next;
      free_on_device(workspace->memory);
      free(workspace);
    }
  }

  // The workspace for a call of this shape, allocated where none fits. Null, and *failed a cudaError_t, without memory.
  // By whose turn it is.
  const DeviceWorkspace *find(const topw_cuda_shape &shape, void *stream, int *failed) {
    topw_cuda_shape wanted = shape;
    DeviceWorkspace *found = nullptr;
    for (DeviceWorkspace *workspace = all_; workspace; workspace = workspace->next) {
      if (workspace->stream != stream || workspace->shape.vocab != shape.vocab) continue;
      if (shape.batch <= workspace->shape.batch && shape.edits <= workspace->shape.edits) found = workspace;
      grow(&wanted.batch, workspace->shape.batch);
      grow(&wanted.edits, workspace->shape.edits);
    }
    if (!found && !topw_cuda_refusal(&wanted)) found = make(wanted, stream, failed);
    if (!found) found = make(shape, stream, failed);
    return found;
  }

 private:
  // What a dimension is allocated for that `had` was not, or was, enough for.
  static void grow(int64_t *wanted, int64_t had) {
    if (*wanted < had) *wanted = had;
    else if (*wanted > had && *wanted < 2 * had) *wanted = 2 * had;
  }

  DeviceWorkspace *make(const topw_cuda_shape &shape, void *stream, int *failed) {
    DeviceWorkspace *made = static_cast<DeviceWorkspace *>(malloc(sizeof(DeviceWorkspace)));
    if (!made) return *failed = 2, nullptr;  // cudaErrorMemoryAllocation
    *made = {shape, stream, nullptr, all_};
    *failed = allocate_on_device(&made->memory, static_cast<size_t>(topw_cuda_workspace_bytes(&shape)));
    if (!*failed) {
      *failed = clear_on_device(made->memory, static_cast<size_t>(topw_cuda_control_bytes(&shape)), stream);
      if (*failed) free_on_device(made->memory);
    }
    if (*failed) return free(made), nullptr;
    return all_ = made;
  }

  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
  DeviceWorkspace *all_ = nullptr;
};

}  // namespace topw

#endif
