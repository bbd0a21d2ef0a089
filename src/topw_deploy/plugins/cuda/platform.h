// The parts of CUDA that the kernels use, or with TOPW_EMULATE the emulator's, in C++.
//
// In place of CUDA's own:
//   TOPW_SHARED(Type, name);        a shared variable of a plain type
//   TOPW_OUT_OF_LINE                not inlined: loading a kernel's code takes time, too
//   dynamic_shared()                dynamic shared memory, aligned to 16 bytes
//   take_ticket(counter)            identifies the last block of a row
//   pause()                         in every loop that waits for another block: lets it run on a CPU
//   fence()                         before a block signals its writes, and after it sees a signal
//   nanoseconds(), trap()           a clock; abandons a launch
//   let_next_begin(), wait_for_previous()   overlap with an `early` next launch
//   launch(Launch{...}, kernel, arguments...)   instead of <<<>>>
// Warp functions take kEveryLane only: warps do not diverge there.
#ifndef TOPW_CUDA_PLATFORM_H
#define TOPW_CUDA_PLATFORM_H

#include <stddef.h>
#include <stdint.h>

namespace topw {

// How a kernel is launched.
struct Launch {
  unsigned blocks, threads;
  size_t shared;     // dynamic bytes
  bool early;  // may begin before the previous launch has ended
  void *stream;
};

constexpr int kWarp = 32;
constexpr unsigned kEveryLane = 0xffffffffu;
constexpr int kUnlaunchable = 1;   // cudaErrorInvalidValue
constexpr size_t kSharedByDefault = 48 * 1024;  // a block's limit by default
constexpr size_t kStaticAtMost = 16 * 1024;     // limit for a kernel's static variables
constexpr size_t kSharedOnRequest = 99 * 1024;  // limit on request from sm_80 on; sm_75: 64 KB

}  // namespace topw

#if defined(TOPW_EMULATE)
#include "emulator.h"
#else

#include <cuda_runtime.h>
#if !defined(__CUDACC_RTC__)
#include <stdio.h>
#include <stdlib.h>
#endif

#define TOPW_SHARED(Type, name) __shared__ Type name
#define TOPW_OUT_OF_LINE __noinline__

namespace topw {

__device__ __forceinline__ unsigned char *dynamic_shared() {
  extern __shared__ __align__(16) unsigned char topw_dynamic_shared[];
  return topw_dynamic_shared;
}

__device__ __forceinline__ void pause() {
#if defined(__CUDA_ARCH__)
  __nanosleep(20);
#endif
}

// Acquire-release fence for the block's writes, weaker than the sequentially consistent __threadfence().
__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// The error stays with the process, after the block's message.
__device__ __noinline__ inline void trap(const char *why, unsigned block) {
  printf("topw: block %u of %u gives up waiting for %s\n", block, gridDim.x, why);
  __trap();
}

// An early next launch begins once all blocks have called this or ended.
__device__ __forceinline__ void let_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// In an early launch: waits for the previous launch's end and writes.
__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ uint64_t add_to(uint64_t *word, uint64_t value) {
  return atomicAdd(reinterpret_cast<unsigned long long *>(word), value);
}
__device__ __forceinline__ uint64_t exchange_with(uint64_t *word, uint64_t value) {
  return atomicExch(reinterpret_cast<unsigned long long *>(word), value);
}

// Increments a global counter and returns its previous value. Writes of this thread's block before its last barrier are
// visible to threads with later tickets, and to their blocks after a barrier. Acquire-release suffices: two
// __threadfence() would cost about a microsecond more.
__device__ __forceinline__ uint32_t take_ticket(uint32_t *counter) {
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

template <class... Parameters, class... Arguments>
cudaError_t launch(const Launch &how, void (*kernel)(Parameters...), const Arguments &...arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(how.blocks);
  config.blockDim = dim3(how.threads);
  config.dynamicSmemBytes = how.shared;
  config.stream = static_cast<cudaStream_t>(how.stream);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = how.early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

inline int multiprocessors() {
  int device = 0, count = 1;
  if (cudaGetDevice(&device) == cudaSuccess) cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

// Caches device queries that every step repeats, for a thread's last few kernels.
template <class Kernel>
class Remembered {
 public:
  // Null: not cached.
  const int *find(int device, Kernel *kernel, size_t shared) const {
    for (const Entry &entry : entries_)
      if (entry.kernel == kernel && entry.device == device && entry.shared == shared) return &entry.answer;
    return nullptr;
  }
  int keep(int device, Kernel *kernel, size_t shared, int answer) {
    entries_[next_++ % kKept] = {kernel, device, shared, answer};
    return answer;
  }

 private:
  static constexpr unsigned kKept = 4;
  struct Entry {
    Kernel *kernel;
    int device;
    size_t shared;
    int answer;
  };
  Entry entries_[kKept] = {};
  unsigned next_ = 0;
};

// Raises the dynamic shared memory limit, if too small, to the device's maximum: it belongs to the kernel, so a smaller
// value could break another thread's pending launch.
template <class Kernel>
cudaError_t allow_shared(Kernel *kernel, size_t bytes) {
  static thread_local Remembered<Kernel> asked;
  if (bytes + kStaticAtMost <= kSharedByDefault) return cudaSuccess;
  int device = 0, most = 0;
  cudaError_t failed = cudaGetDevice(&device);
  if (failed || asked.find(device, kernel, 0)) return failed;
  cudaFuncAttributes found = {};
  failed = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (!failed) failed = cudaFuncGetAttributes(&found, kernel);
  if (!failed)
    failed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  most - static_cast<int>(found.sharedSizeBytes));
  if (!failed) asked.keep(device, kernel, 0, 1);
  return failed;
}

// How many of a kernel's blocks fit on the device; may be 0.
template <class Kernel>
int resident_blocks(Kernel *kernel, unsigned threads, size_t shared) {
  static thread_local Remembered<Kernel> known;
  int device = 0, of_each = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  if (const int *found = known.find(device, kernel, shared)) return *found;
  if (cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_each, kernel, static_cast<int>(threads), shared) != cudaSuccess)
    return 0;
  return known.keep(device, kernel, shared, of_each * multiprocessors());
}

// Whether a kernel may be launched early: its code has wait_for_previous, and the driver can capture such a launch
// (12.3). TOPW_CUDA_OVERLAP=0 disables it.
template <class Kernel>
bool can_be_early(Kernel *kernel) {
  static thread_local Remembered<Kernel> known;
  int device = 0, driver = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  if (const int *found = known.find(device, kernel, 0)) return *found != 0;
  cudaFuncAttributes found = {};
  const char *const overlap = getenv("TOPW_CUDA_OVERLAP");
  const bool can = cudaFuncGetAttributes(&found, kernel) == cudaSuccess && found.ptxVersion >= 90 &&
                   found.binaryVersion >= 90 && cudaDriverGetVersion(&driver) == cudaSuccess && driver >= 12030 &&
                   !(overlap && overlap[0] == '0');
  return known.keep(device, kernel, 0, can) != 0;
}

inline unsigned threads_of_block(unsigned threads) { return threads; }
inline const char *error_text(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
inline int last_error() { return cudaGetLastError(); }  // and clears it
inline int zero(void *memory, size_t bytes, void *stream) {
  return cudaMemsetAsync(memory, 0, bytes, static_cast<cudaStream_t>(stream));
}

// Keeps this thread's allocations from spoiling another thread's capture.
class BesideCaptures {
 public:
  BesideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~BesideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  BesideCaptures(const BesideCaptures &) = delete;
  BesideCaptures &operator=(const BesideCaptures &) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // later the previous mode
};

// Zeroed memory of the current device. Waits for its own stream: waiting for the device would end another thread's
// capture.
inline int allocate(size_t bytes, void **memory) {
  const BesideCaptures beside;
  cudaStream_t stream = nullptr;
  int failed = cudaMalloc(memory, bytes);
  if (!failed) {
    failed = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (!failed) failed = cudaMemsetAsync(*memory, 0, bytes, stream);
    if (!failed) failed = cudaStreamSynchronize(stream);
    if (stream) cudaStreamDestroy(stream);
    if (failed) cudaFree(*memory);
  }
  if (failed) last_error();  // already returned; later checks must not see it
  return failed;
}
inline int release(void *memory) {
  const BesideCaptures beside;
  return cudaFree(memory);
}

inline int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

}  // namespace topw

#endif
#endif
