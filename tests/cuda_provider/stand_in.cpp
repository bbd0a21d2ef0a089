// A stand-in for CUDA's runtime: onnxruntime's CUDA provider opens sessions and runs them. Device memory is host
// memory, copies are copies, kernels do nothing. Calls forbidden during a capture are counted and refused. Other
// functions return 0: see make_stand_in.py.

#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <vector>

#undef cudaGetDeviceProperties
#define SAID extern "C" __attribute__((visibility("default")))

namespace {

struct Enqueued {
  void (*function)(void *);
  void *data;
};
using Graph = std::vector<Enqueued>;

std::atomic<long> launches, replays, captures, mistakes, to_device, to_host;
std::atomic<long> global_captures;  // running captures, in any thread, in the mode that restricts all threads
thread_local Graph *capturing = nullptr;
thread_local bool capturing_for_all = false;

// Whether the current call is forbidden during a capture.
bool forbidden() {
  const bool now = capturing != nullptr || global_captures > 0;
  if (now) ++mistakes;
  return now;
}
template <class Handle>
cudaError_t make(Handle *handle) {
  *handle = reinterpret_cast<Handle>(malloc(8));
  return cudaSuccess;
}
cudaError_t launched() {
  ++launches;
  return cudaSuccess;
}
cudaError_t copied(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
  if (kind == cudaMemcpyHostToDevice) ++to_device;
  if (kind == cudaMemcpyDeviceToHost) ++to_host;
  if (capturing && kind != cudaMemcpyDeviceToDevice) ++mistakes;  // a replay would copy later contents
  memmove(to, from, bytes);
  return cudaSuccess;
}

}  // namespace

SAID void stand_in_counts(long *counts) {
  const long now[] = {launches, replays, captures, mistakes, to_device, to_host};
  memcpy(counts, now, sizeof now);
}
// Runs `function` on every replay of the graph being captured. Returns 0 without a capture.
SAID int stand_in_capture(void (*function)(void *), void *data) {
  if (!capturing) return 0;
  capturing->push_back({function, data});
  return 1;
}

SAID cudaError_t cudaMalloc(void **memory, size_t bytes) {
  if (forbidden()) return cudaErrorStreamCaptureUnsupported;
  bytes = (bytes + 511) / 256 * 256;
  *memory = aligned_alloc(256, bytes);
  memset(*memory, 0, bytes);
  return cudaSuccess;
}
SAID cudaError_t cudaFree(void *memory) {
  if (forbidden()) return cudaErrorStreamCaptureUnsupported;
  free(memory);
  return cudaSuccess;
}
SAID cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned) { return cudaMalloc(memory, bytes); }
SAID cudaError_t cudaMallocHost(void **memory, size_t bytes) { return cudaMalloc(memory, bytes); }
SAID cudaError_t cudaFreeHost(void *memory) { return cudaFree(memory); }
SAID cudaError_t cudaMallocFromPoolAsync(void **memory, size_t bytes, cudaMemPool_t, cudaStream_t) {
  return cudaMalloc(memory, bytes);
}
SAID cudaError_t cudaFreeAsync(void *memory, cudaStream_t) { return cudaFree(memory); }
SAID cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
  return forbidden() ? cudaErrorStreamCaptureUnsupported : copied(to, from, bytes, kind);
}
SAID cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
  return copied(to, from, bytes, kind);
}
SAID cudaError_t cudaMemcpy2DAsync(void *to, size_t pitch, const void *from, size_t from_pitch, size_t width,
                                   size_t height, cudaMemcpyKind kind, cudaStream_t) {
  for (size_t row = 0; row < height; ++row)
    copied(static_cast<char *>(to) + row * pitch, static_cast<const char *>(from) + row * from_pitch, width, kind);
  return cudaSuccess;
}
SAID cudaError_t cudaMemset(void *memory, int value, size_t bytes) {
  memset(memory, value, bytes);
  return cudaSuccess;
}
SAID cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t) {
  return cudaMemset(memory, value, bytes);
}
SAID cudaError_t cudaMemGetInfo(size_t *unused, size_t *all) {
  *unused = *all = size_t{8} << 30;
  return cudaSuccess;
}
SAID cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *memory) {
  *attributes = {};
  attributes->type = cudaMemoryTypeDevice;
  attributes->devicePointer = const_cast<void *>(memory);
  return cudaSuccess;
}

SAID cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
SAID cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
SAID cudaError_t cudaDriverGetVersion(int *version) { return *version = 13000, cudaSuccess; }
SAID cudaError_t cudaRuntimeGetVersion(int *version) { return *version = 13000, cudaSuccess; }
SAID cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    default: *value = 49152;
  }
  return cudaSuccess;
}
SAID cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int) {
  *properties = {};
  strcpy(properties->name, "a stand-in");
  properties->major = 9;
  properties->totalGlobalMem = size_t{8} << 30;
  properties->sharedMemPerBlock = properties->sharedMemPerBlockOptin = 49152;
  properties->sharedMemPerMultiprocessor = 233472;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = properties->maxThreadsDim[0] = 1024;
  properties->maxGridSize[0] = 2147483647;
  properties->multiProcessorCount = 132;
  properties->maxThreadsPerMultiProcessor = 2048;
  return cudaSuccess;
}
SAID cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int, size_t,
                                                                        unsigned) {
  return *blocks = 2, cudaSuccess;
}
SAID cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}
SAID const char *cudaGetErrorString(cudaError_t) { return "an error of the stand-in"; }
SAID const char *cudaGetErrorName(cudaError_t) { return "error"; }

SAID cudaError_t cudaStreamCreate(cudaStream_t *stream) { return make(stream); }
SAID cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) { return make(stream); }
SAID cudaError_t cudaStreamSynchronize(cudaStream_t) {
  return forbidden() ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}
SAID cudaError_t cudaDeviceSynchronize() { return forbidden() ? cudaErrorStreamCaptureUnsupported : cudaSuccess; }
SAID cudaError_t cudaEventCreate(cudaEvent_t *event) { return make(event); }
SAID cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) { return make(event); }

SAID cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode mode) {
  capturing = new Graph;
  capturing_for_all = mode == cudaStreamCaptureModeGlobal;
  global_captures += capturing_for_all;
  return cudaSuccess;
}
SAID cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *graph) {
  ++captures;
  *graph = reinterpret_cast<cudaGraph_t>(capturing);
  capturing = nullptr;
  global_captures -= capturing_for_all;
  return cudaSuccess;
}
SAID cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
  *status = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
SAID cudaError_t cudaGraphInstantiate(cudaGraphExec_t *ready, cudaGraph_t graph, unsigned long long) {
  *ready = reinterpret_cast<cudaGraphExec_t>(graph);
  return cudaSuccess;
}
SAID cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
  ++replays;
  for (const Enqueued &work : *reinterpret_cast<Graph *>(graph)) work.function(work.data);
  return cudaSuccess;
}

SAID cudaError_t cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t) { return launched(); }
SAID cudaError_t __cudaLaunchKernel(void *, dim3, dim3, void **, size_t, cudaStream_t) { return launched(); }
SAID cudaError_t cudaLaunchCooperativeKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t) {
  return launched();
}
SAID cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *, void **) { return launched(); }
SAID cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void *data) {
  return function(data), cudaSuccess;
}
SAID void **__cudaRegisterFatBinary(void *) {
  static void *handle[4];
  return handle;
}
static thread_local struct {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
} configuration;
SAID unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}
SAID cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
  *static_cast<cudaStream_t *>(stream) = configuration.stream;
  return cudaSuccess;
}
