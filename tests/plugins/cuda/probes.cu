// Single-purpose kernels for test_emulator.py and test_block.py: errors the emulator must detect, and block-wide
// operations.

#include "block.h"
#include "chunking.h"
#include "pairs.h"
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

__global__ void exchange(int32_t *out) {
  const int32_t own = static_cast<int32_t>(threadIdx.x);
  int32_t *const results = out + 8 * own;
  results[0] = __shfl_sync(kEveryLane, own, 3);
  results[1] = __shfl_xor_sync(kEveryLane, own, 5);
  results[2] = __shfl_up_sync(kEveryLane, own, 2);
  results[3] = __shfl_down_sync(kEveryLane, own, 2);
  results[4] = static_cast<int32_t>(__ballot_sync(kEveryLane, own % 3 == 0));
  results[5] = __syncthreads_count(own % 5 == 0);
  results[6] = __syncthreads_or(own == 7);
  results[7] = __syncthreads_and(own != 7);
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

__global__ void sort(uint64_t *keys, uint32_t *items, int32_t size) {
  uint64_t *const shared_keys = reinterpret_cast<uint64_t *>(dynamic_shared());
  uint32_t *const shared_items = reinterpret_cast<uint32_t *>(shared_keys + size);
  for (int32_t i = own_index(); i < size; i += block_size()) {
    shared_keys[i] = keys[i];
    if (items) shared_items[i] = items[i];
  }
  block_sort(shared_keys, items ? shared_items : nullptr, size);
  for (int32_t i = own_index(); i < size; i += block_size()) {
    keys[i] = shared_keys[i];
    if (items) items[i] = shared_items[i];
  }
}

__global__ void rank_sort(const uint64_t *keys, int32_t count, uint64_t *sorted) {
  block_rank_sort(keys, count, sorted);
}

__global__ void scan(double *first, double *second, int32_t count) {
  TOPW_SHARED(BlockScratch, scratch);
  block_scan(first, second, count, scratch);
}

__global__ void compact(const int32_t *kept, int32_t count, int32_t *places, int32_t *found) {
  TOPW_SHARED(BlockScratch, scratch);
  const int32_t n = block_compact(
      count, [&](int32_t i) { return kept[i] != 0; }, [&](int32_t i, int32_t place) { places[place] = i; }, scratch);
  if (own_index() == 0) *found = n;
}

__global__ void select(const uint32_t *keys, int32_t count, int32_t wanted, int32_t enough, uint32_t *bound) {
  TOPW_SHARED(BlockScratch, scratch);
  *bound = block_select(count, [&](int32_t i) { return keys[i]; }, wanted, enough, scratch);
}

__global__ void best(const double *values, int32_t count, int32_t *place) {
  TOPW_SHARED(BlockScratch, scratch);
  Best found = {-static_cast<double>(INFINITY), INT32_MAX};
  for (int32_t i = own_index(); i < count; i += block_size()) found = better(found, {values[i], i});
  found = block_best(found, scratch);
  const int32_t largest = block_reduce(own_index(), Larger(), scratch);
  const int32_t smallest = block_reduce(own_index(), Smaller(), scratch);
  if (own_index() == 0) *place = found.place;
  __syncthreads();
  const int32_t first = *place;
  __syncthreads();
  if (largest != block_size() - 1 || smallest != 0 || found.place != first) *place = -1;  // a thread read too late
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
TOPW_EXPORT int probe_exchange(unsigned threads, int32_t *out) { return launch(how(1, threads), exchange, out); }
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
TOPW_EXPORT int probe_sort(unsigned threads, uint64_t *keys, uint32_t *items, int32_t size) {
  return launch(how(1, threads, static_cast<size_t>(size) * 12), sort, keys, items, size);
}
TOPW_EXPORT int probe_rank_sort(unsigned threads, const uint64_t *keys, int32_t count, uint64_t *sorted) {
  return launch(how(1, threads), rank_sort, keys, count, sorted);
}
TOPW_EXPORT int probe_scan(unsigned threads, double *first, double *second, int32_t count) {
  return launch(how(1, threads), scan, first, second, count);
}
TOPW_EXPORT int probe_compact(unsigned threads, const int32_t *kept, int32_t count, int32_t *places, int32_t *found) {
  return launch(how(1, threads), compact, kept, count, places, found);
}
TOPW_EXPORT int probe_select(unsigned threads, const uint32_t *keys, int32_t count, int32_t wanted, int32_t enough,
                             uint32_t *bound) {
  return launch(how(1, threads), select, keys, count, wanted, enough, bound);
}
TOPW_EXPORT int probe_best(unsigned threads, const double *values, int32_t count, int32_t *place) {
  return launch(how(1, threads), best, values, count, place);
}

/* Log-weights and weights [count] of logits [count] in units of `top`. */
TOPW_EXPORT void probe_weights(const float *logits, int32_t count, float top, double temperature, int bounded,
                               double *logs, double *weights) {
  const Cooling by = cooling_of(temperature);
  for (int32_t i = 0; i < count; ++i) {
    const Weight of = weight_of(logits[i], top, by, bounded != 0);
    logs[i] = of.log, weights[i] = of.weight;
  }
}
TOPW_EXPORT void probe_chunks(int64_t groups, int64_t batch, int64_t step, int64_t multiprocessors, int64_t resident,
                              int64_t *found) {
  const Chunking cut = cut_into_chunks({groups, batch, step}, {multiprocessors, resident});
  found[0] = cut.groups, found[1] = cut.chunks;
}

}  // extern "C"
