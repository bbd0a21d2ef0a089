// The emulated kernels, with counts of allocations and of control memory that a step leaves non-zero.

#include <stdint.h>

#define topw_cuda_allocate topw_cuda_allocate_here
#define topw_cuda_release topw_cuda_release_here
#define topw_cuda_launch topw_cuda_launch_now
#include "launch.cu"
#undef topw_cuda_allocate
#undef topw_cuda_release
#undef topw_cuda_launch

int allocated = 0, released = 0, unclean = 0;
bool is_full = false;  // the device is out of memory
const void *last_control = nullptr;

extern "C" {

TOPW_EXPORT int topw_cuda_allocate(int64_t bytes, void **memory) {
  if (is_full) return 2;  // cudaErrorMemoryAllocation
  ++allocated;
  return topw_cuda_allocate_here(bytes, memory);
}

TOPW_EXPORT int topw_cuda_release(void *memory) {
  ++released;
  return topw_cuda_release_here(memory);
}

TOPW_EXPORT int topw_cuda_launch(const topw_cuda_shape *shape, const topw_table *table, const topw_inputs *inputs,
                                 const topw_outputs *outputs, void *control, void *workspace, void *stream) {
  const int failed = topw_cuda_launch_now(shape, table, inputs, outputs, control, workspace, stream);
  last_control = control;
  for (int64_t index = 0; index < topw_cuda_control_bytes(shape); ++index)
    unclean += static_cast<const unsigned char *>(control)[index] != 0;
  return failed;
}

}  // extern "C"
