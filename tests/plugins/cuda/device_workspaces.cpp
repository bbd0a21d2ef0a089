// ort_device_memory.h for ctypes, over kernels that serve 100 rows and need a byte per row plus a page.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "ort_device_memory.h"

extern "C" {

TOPW_EXPORT const char *topw_cuda_refusal(const topw_cuda_shape *shape) {
  return shape->batch > 100 ? "too many rows" : nullptr;
}
TOPW_EXPORT int64_t topw_cuda_workspace_bytes(const topw_cuda_shape *shape) {
  return shape->edits > 1000 ? INT64_MAX / 2 / 256 * 256 : 4096 + 256 * shape->batch;
}
TOPW_EXPORT int64_t topw_cuda_control_bytes(const topw_cuda_shape *) { return 256; }
TOPW_EXPORT int topw_cuda_allocate(int64_t bytes, void **memory) {
  *memory = bytes < 1 << 30 ? aligned_alloc(256, static_cast<size_t>(bytes)) : nullptr;
  return *memory ? memset(*memory, 0, static_cast<size_t>(bytes)), 0 : 2;
}
TOPW_EXPORT int topw_cuda_release(void *memory) { return free(memory), 0; }

TOPW_EXPORT void *probe_create(void) { return new topw::DeviceWorkspaces; }
TOPW_EXPORT void probe_destroy(void *all) { delete static_cast<topw::DeviceWorkspaces *>(all); }

// Returns the memory's address for such a call and its most rows and edits; 0 if there is none.
TOPW_EXPORT uint8_t *probe_find(void *all, int64_t batch, int64_t edits, int64_t vocab, intptr_t stream,
                                int64_t *most_rows, int64_t *most_edits) {
  topw_cuda_shape shape = {};
  shape.batch = batch, shape.edits = edits, shape.vocab = vocab;
  int failed = 0;
  const topw::DeviceWorkspace *found =
      static_cast<topw::DeviceWorkspaces *>(all)->find(shape, reinterpret_cast<void *>(stream), &failed);
  if (failed || !found) return nullptr;
  *most_rows = found->shape.batch, *most_edits = found->shape.edits;
  return static_cast<uint8_t *>(found->control);
}
}
