// Device scratch memory, a workspace per stream.
#ifndef TOPW_CUDA_ORT_DEVICE_MEMORY_H
#define TOPW_CUDA_ORT_DEVICE_MEMORY_H

#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <thread>

#include "topw_cuda.h"

namespace topw {

// Control and scratch memory for one stream and calls of at most this shape.
struct DeviceWorkspace {
  topw_cuda_shape shape;
  void *stream, *control;
  DeviceWorkspace *next;

  void *scratch() const { return static_cast<unsigned char *>(control) + topw_cuda_control_bytes(&shape); }
};

// A larger call gets a workspace at least twice the earlier size: the total is at most twice the largest. None is freed
// early: captured graphs keep using theirs.
class DeviceWorkspaces {
 public:
  // Lock over finding a workspace and launching: two threads' launches on one stream must not interleave.
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
      topw_cuda_release(workspace->control);
      free(workspace);
    }
  }

  // The workspace for this shape, allocated if none fits. Null without memory, with a cudaError_t in *failed. Requires
  // the lock.
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
  // The size to allocate for a dimension, given the old size `had`.
  static void grow(int64_t *wanted, int64_t had) {
    if (*wanted < had) *wanted = had;
    else if (*wanted > had && *wanted < 2 * had) *wanted = 2 * had;
  }

  DeviceWorkspace *make(const topw_cuda_shape &shape, void *stream, int *failed) {
    DeviceWorkspace *made = static_cast<DeviceWorkspace *>(malloc(sizeof(DeviceWorkspace)));
    if (!made) return *failed = 2, nullptr;  // cudaErrorMemoryAllocation
    *made = {shape, stream, nullptr, all_};
    *failed = topw_cuda_allocate(topw_cuda_control_bytes(&shape) + topw_cuda_workspace_bytes(&shape), &made->control);
    if (*failed) return free(made), nullptr;
    return all_ = made;
  }

  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
  DeviceWorkspace *all_ = nullptr;
};

}  // namespace topw

#endif
