// Block-wide reductions, prefix sums, sorting and selection.
//
// All threads of the block (a multiple of 32, up to 1024) call each function. Functions end with a barrier, after which
// the result is visible and the scratch free; they begin without one unless noted. Results, even sums of doubles, do
// not depend on the number of threads.
#ifndef TOPW_CUDA_BLOCK_H
#define TOPW_CUDA_BLOCK_H

#include <math.h>
#include <string.h>

#include "platform.h"

namespace topw {

constexpr int kMostWarps = 32;
constexpr int32_t kMostScanned = 4096;

struct BlockScratch {  // in shared memory
  double totals[2][kMostScanned / kWarp];
  double values[kMostWarps];
  int32_t places[kMostWarps];
  uint32_t bins[256];
  uint32_t chosen[4];
};

__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ __forceinline__ int warp_index() { return static_cast<int>(threadIdx.x) / kWarp; }
__device__ __forceinline__ int warps() { return static_cast<int>(blockDim.x) / kWarp; }
__device__ __forceinline__ int32_t own_index() { return static_cast<int32_t>(threadIdx.x); }
__device__ __forceinline__ int32_t block_size() { return static_cast<int32_t>(blockDim.x); }

struct Larger {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};
struct Smaller {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a < b ? a : b;
  }
};
struct Plus {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};

// Over all lanes, or each group of `width` (a power of 2) neighbours; every lane gets the result.
template <class T, class Operation>
__device__ __forceinline__ T warp_reduce(T value, Operation operation, int width = kWarp) {
  for (int step = width / 2; step > 0; step /= 2) value = operation(value, __shfl_xor_sync(kEveryLane, value, step));
  return value;
}

// Inclusive prefix sum over the lanes.
template <class T>
__device__ __forceinline__ T warp_scan(T value) {
  for (int step = 1; step < kWarp; step *= 2) {
    const T before = __shfl_up_sync(kEveryLane, value, step);
    if (lane_index() >= step) value += before;
  }
  return value;
}

// Every thread gets the result. The operation must tolerate repeated values; T: at most 8 bytes.
template <class T, class Operation>
__device__ __forceinline__ T block_reduce(T value, Operation operation, BlockScratch &scratch) {
  T *const of_warp = reinterpret_cast<T *>(scratch.values);
  value = warp_reduce(value, operation);
  if (lane_index() == 0) of_warp[warp_index()] = value;
  __syncthreads();
#pragma unroll 8
  for (int i = 0; i < warps(); ++i) value = operation(value, of_warp[i]);
  __syncthreads();
  return value;
}

// Calls use(i, load(i)) for i < count, with eight loads per thread in flight.
template <class Load, class Use>
__device__ __forceinline__ void load_together(int32_t count, Load load, Use use) {
  constexpr int kTogether = 8;
#pragma unroll 1
  for (int32_t first = own_index(); first < count; first += kTogether * block_size()) {
    decltype(load(0)) loaded[kTogether];
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      const int32_t i = first + n * block_size();
      loaded[n] = load(i < count ? i : first);
    }
#pragma unroll
    for (int n = 0; n < kTogether; ++n)
      if (first + n * block_size() < count) use(first + n * block_size(), loaded[n]);
  }
}

// The largest value, at the lowest place if tied.
struct Best {
  double value;
  int32_t place;
};

// Integers in the doubles' order, except -0 < 0. Small GPUs compare integers 32 times as fast as doubles.
__device__ __forceinline__ int64_t ordered(double value) {
  int64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits < 0 ? bits ^ INT64_MAX : bits;
}

__device__ __forceinline__ Best better(Best a, Best b) {
  const int64_t of_a = ordered(a.value), of_b = ordered(b.value);
  return of_b > of_a || (of_b == of_a && b.place < a.place) ? b : a;
}

__device__ TOPW_OUT_OF_LINE inline Best block_best(Best best, BlockScratch &scratch) {
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const Best other = {__shfl_xor_sync(kEveryLane, best.value, step), __shfl_xor_sync(kEveryLane, best.place, step)};
    best = better(best, other);
  }
  if (lane_index() == 0) {
    scratch.values[warp_index()] = best.value;
    scratch.places[warp_index()] = best.place;
  }
  __syncthreads();
#pragma unroll 4
  for (int i = 0; i < warps(); ++i) best = better(best, {scratch.values[i], scratch.places[i]});
  __syncthreads();
  return best;
}

namespace scanning {

// In-place prefix sums of each 32 elements, and their totals.
__device__ __forceinline__ void tiles(double *values, int32_t count, double *totals) {
#pragma unroll 1
  for (int32_t first = warp_index() * kWarp; first < count; first += block_size()) {
    const int32_t i = first + lane_index();
    const double sum = warp_scan(i < count ? values[i] : 0.0);
    if (i < count) values[i] = sum;
    if (lane_index() == kWarp - 1) totals[first / kWarp] = sum;
  }
}

// One warp: replaces each total by the sum of the earlier ones.
__device__ __forceinline__ void carries(double *totals, int32_t count) {
  double carry = 0;
#pragma unroll 1
  for (int32_t first = 0; first < count; first += kWarp) {
    const int32_t i = first + lane_index();
    const double sum = warp_scan(i < count ? totals[i] : 0.0);
    const double before = __shfl_up_sync(kEveryLane, sum, 1);
    if (i < count) totals[i] = lane_index() == 0 ? carry : carry + before;
    carry += __shfl_sync(kEveryLane, sum, kWarp - 1);
  }
}

}  // namespace scanning

// In-place inclusive prefix sums of one or two arrays [count], count <= kMostScanned, in an order that depends only on
// `count`. Needs no barrier before it if each thread wrote the elements own_index() + n * block_size().
__device__ TOPW_OUT_OF_LINE inline void block_scan(double *first, double *second, int32_t count,
                                                   BlockScratch &scratch) {
  const int32_t tiles = (count + kWarp - 1) / kWarp;
#pragma unroll 1
  for (int i = 0; i < (second ? 2 : 1); ++i) scanning::tiles(i ? second : first, count, scratch.totals[i]);
  __syncthreads();
  if (tiles == 1) return;
#pragma unroll 1
  for (int i = warp_index(); i < (second ? 2 : 1); i += warps()) scanning::carries(scratch.totals[i], tiles);
  __syncthreads();
#pragma unroll 1
  for (int32_t i = kWarp + own_index(); i < count; i += block_size()) {
    first[i] += scratch.totals[0][i / kWarp];
    if (second) second[i] += scratch.totals[1][i / kWarp];
  }
  __syncthreads();
}

__device__ __forceinline__ int32_t power_of_two_from(int32_t count) {
  int32_t size = 2;
  while (size < count) size *= 2;
  return size;
}

// Bitonic sort by (key, item) ascending, in place in shared memory. `size`: a power of 2, at least 2; pad with the
// largest key. `items`: NULL if keys are distinct. Begins with a barrier.
__device__ TOPW_OUT_OF_LINE inline void block_sort(uint64_t *keys, uint32_t *items, int32_t size) {
  __syncthreads();
  for (int32_t run = 2; run <= size; run *= 2) {
    for (int32_t step = run / 2; step > 0; step /= 2) {
#pragma unroll 2
      for (int32_t pair = own_index(); pair < size / 2; pair += block_size()) {
        const int32_t low = 2 * pair - (pair & (step - 1)), high = low + step;
        const bool ascending = (low & run) == 0;
        const uint64_t a = keys[low], b = keys[high];
        const bool greater = a != b ? a > b : items && items[low] > items[high];
        if (greater == ascending && (a != b || items)) {
          keys[low] = b;
          keys[high] = a;
          if (items) {
            const uint32_t item = items[low];
            items[low] = items[high];
            items[high] = item;
          }
        }
      }
      // For steps up to 32, a warp's 64 entries are its own.
      const int32_t next = step > 1 ? step / 2 : run;
      if (step > kWarp || next > kWarp)
        __syncthreads();
      else
        __syncwarp();
    }
  }
  __syncthreads();
}

// Sorts distinct keys by counting smaller ones: fastest up to a few hundred. keys, sorted [count]: disjoint, in shared
// memory. Begins with a barrier.
__device__ __forceinline__ void block_rank_sort(const uint64_t *keys, int32_t count, uint64_t *sorted) {
  __syncthreads();
#pragma unroll 1
  for (int32_t i = own_index(); i < count; i += block_size()) {
    const uint64_t key = keys[i];
    int32_t rank = 0;
#pragma unroll 8
    for (int32_t j = 0; j < count; ++j) rank += keys[j] < key;
    sorted[rank] = key;
  }
  __syncthreads();
}

// Calls emit(i, place) for i < count with keep(i), place = 0, 1, ... Returns their number.
template <class Keep, class Emit>
__device__ __forceinline__ int32_t block_compact(int32_t count, Keep keep, Emit emit, BlockScratch &scratch) {
  int32_t before = 0;
  for (int32_t first = 0; first < count; first += block_size()) {
    const int32_t i = first + own_index();
    const bool kept = i < count && keep(i);
    const unsigned votes = __ballot_sync(kEveryLane, kept);
    if (lane_index() == 0) scratch.places[warp_index()] = __popc(votes);
    __syncthreads();
    int32_t place = before + __popc(votes & ((1u << lane_index()) - 1));
    for (int w = 0; w < warps(); ++w) {
      if (w < warp_index()) place += scratch.places[w];
      before += scratch.places[w];
    }
    __syncthreads();
    if (kept) emit(i, place);
  }
  __syncthreads();
  return before;
}

// A bound that at least `wanted` keys and, ties permitting, at most `enough` do not exceed; for enough = wanted, the
// `wanted`-th smallest. 1 <= wanted <= count, enough. Radix select: one pass per 8 differing bits.
template <class Key>
__device__ __forceinline__ uint32_t block_select(int32_t count, Key key, int32_t wanted, int32_t enough,
                                                 BlockScratch &scratch) {
  uint32_t lowest = 0xffffffffu, highest = 0;
#pragma unroll 1
  for (int32_t i = own_index(); i < count; i += block_size()) {
    const uint32_t k = key(i);
    lowest = k < lowest ? k : lowest;
    highest = k > highest ? k : highest;
  }
  lowest = block_reduce(lowest, Smaller(), scratch);
  highest = block_reduce(highest, Larger(), scratch);
  if (lowest == highest) return lowest;

  int shift = 32 - __clz(static_cast<int>(lowest ^ highest)) - 8, width = 8;  // position and width of a bin's number
  if (shift < 0) shift = 0;
  uint64_t prefix = static_cast<uint64_t>(lowest) >> (shift + width);  // of the wanted key
  uint32_t below = 0;  // keys below this prefix
  for (;;) {
#pragma unroll 1
    for (int32_t b = own_index(); b < 256; b += block_size()) scratch.bins[b] = 0;
    __syncthreads();
#pragma unroll 1
    for (int32_t i = own_index(); i < count; i += block_size()) {
      const uint64_t k = key(i);
      if (k >> (shift + width) == prefix) atomicAdd(&scratch.bins[(k >> shift) & ((1u << width) - 1)], 1u);
    }
    __syncthreads();
    if (warp_index() == 0) {  // each lane has eight neighbouring bins
      const int first = 8 * lane_index();
      uint32_t sum = 0;
#pragma unroll
      for (int b = first; b < first + 8; ++b) sum += scratch.bins[b];
      uint32_t reached = below + warp_scan(sum) - sum;
      if (reached < static_cast<uint32_t>(wanted) && reached + sum >= static_cast<uint32_t>(wanted)) {
        int bin = first;
        for (; reached + scratch.bins[bin] < static_cast<uint32_t>(wanted); ++bin) reached += scratch.bins[bin];
        scratch.chosen[0] = static_cast<uint32_t>(bin);
        scratch.chosen[1] = reached;
        scratch.chosen[2] = reached + scratch.bins[bin];
      }
    }
    __syncthreads();
    prefix = prefix << width | scratch.chosen[0];
    below = scratch.chosen[1];
    const bool done = shift == 0 || scratch.chosen[2] <= static_cast<uint32_t>(enough);
    __syncthreads();
    const uint64_t last = (prefix + 1) << shift;  // the first key after the bin
    if (done) return static_cast<uint32_t>(last - 1);
    width = shift < 8 ? shift : 8;
    shift -= width;
  }
}

}  // namespace topw
#endif
