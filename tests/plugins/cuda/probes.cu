// Single-purpose kernels for test_emulator.py: errors that the emulator must detect.

#include "block.h"
#include "topw_cuda.h"

namespace topw {
namespace {

struct Values {
  int32_t of[1024];
};

__global__ void reverse(int32_t *out, bool with_barrier) {
  TOPW_SHARED(Values, values);
  values.of[threadIdx.x] = static_cast<int32_t>(threadIdx.x);
  if (with_barrier) __syncthreads();
  out[threadIdx.x] = values.of[blockDim.x - 1 - threadIdx.x];
}

__global__ void diverge(int32_t kind) {
  if (kind == 0) {  // half of the threads skip the barrier
    if (threadIdx.x < blockDim.x / 2) __syncthreads();
  } else if (kind == 1) {  // two barriers in different places
    if (threadIdx.x < blockDim.x / 2)
      __syncthreads();
    else
      __syncthreads();
  } else if (kind == 2) {  // a warp function without one thread
    if (threadIdx.x % kWarp != 5) __ballot_sync(kEveryLane, 1);
  } else if (kind == 3) {  // only part of the warp
    __ballot_sync(0xffffu, 1);
  } else {  // memory that nothing writes
    TOPW_SHARED(int32_t, never);
    never = 0;
    while (*static_cast<volatile int32_t *>(&never) == 0) pause();
  }
}

__global__ void load(const int32_t *from, float4 *out) {
  *out = __ldg(reinterpret_cast<const float4 *>(from));
}

struct Large {
  unsigned char bytes[kSharedByDefault + 1];
};

__global__ void take_too_much(int32_t *out) {
  TOPW_SHARED(Large, large);
  large.bytes[threadIdx.x] = 1;
  out[0] = large.bytes[0];
}

__global__ void take_dynamic(int32_t *out, int32_t bytes) {
  dynamic_shared()[static_cast<int32_t>(threadIdx.x) % bytes] = 1;
  out[threadIdx.x] = 1;
}

__global__ void write_behind(int32_t bytes) {
  if (threadIdx.x == 0) dynamic_shared()[bytes] = 1;
}

// Every block waits for all, `turns` times; `out` counts the threads that saw all arrive.
__global__ void meet(uint32_t *arrived, int32_t *out, int32_t turns) {
  for (int32_t turn = 1; turn <= turns; ++turn) {
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      atomicAdd(arrived, 1u);
      while (*static_cast<volatile uint32_t *>(arrived) < static_cast<uint32_t>(turn) * gridDim.x) pause();
    }
    __syncthreads();
    const uint32_t come = *static_cast<volatile uint32_t *>(arrived) / gridDim.x;
    atomicAdd(out + turn - 1, come == static_cast<uint32_t>(turn) ? 1 : 0);
    if (threadIdx.x == 0) {
      atomicAdd(arrived + 1, 1u);
      while (*static_cast<volatile uint32_t *>(arrived + 1) < static_cast<uint32_t>(turn) * gridDim.x) pause();
    }
  }
}

Launch how(unsigned blocks, unsigned threads, size_t shared = 0) {
  return Launch{blocks, threads, shared, false, nullptr};
}

}  // namespace
}  // namespace topw

using namespace topw;

extern "C" {

TOPW_EXPORT void probe_settings(uint64_t seed, uint32_t blocks) { emulator::settings = {seed, 0, blocks}; }
TOPW_EXPORT const char *probe_error(void) { return emulator::error(); }
TOPW_EXPORT int probe_reverse(unsigned threads, int32_t *out, int with_barrier) {
  return launch(how(1, threads), reverse, out, with_barrier != 0);
}
TOPW_EXPORT int probe_diverge(unsigned threads, int32_t kind) { return launch(how(2, threads), diverge, kind); }
TOPW_EXPORT int probe_load(const int32_t *from, float4 *out) { return launch(how(1, 32), load, from, out); }
TOPW_EXPORT int probe_static_shared(int32_t *out) { return launch(how(1, 32), take_too_much, out); }
TOPW_EXPORT int probe_dynamic_shared(int32_t *out, int32_t bytes, int32_t allowed) {
  allow_shared(take_dynamic, static_cast<size_t>(allowed));
  return launch(how(1, 32, static_cast<size_t>(bytes)), take_dynamic, out, bytes);
}
TOPW_EXPORT int probe_write_behind(int32_t bytes, int32_t at) {
  return launch(how(1, 32, static_cast<size_t>(bytes)), write_behind, at);
}
TOPW_EXPORT int probe_meet(unsigned blocks, uint32_t *arrived, int32_t *out, int32_t turns) {
  return launch(how(blocks, 64), meet, arrived, out, turns);
}
}  // extern "C"
