// Emulates CUDA on a CPU, to run the kernels without a device: every thread is a fibre.
//
// Fibres run until they wait: at a barrier, at a warp function, or polling memory (`pause`). A seed determines which
// runs next, so a missing barrier changes results with the seed; odd seeds let a warp run ahead.
//
// Errors, reported with their source location, abandon the launch: a barrier not reached by all threads, or reached
// elsewhere; a warp function without all lanes; too much shared memory; a misaligned __ldg or __ldcg.
//
// Not emulated: time, caches, and write order between blocks, so a missing __threadfence goes unnoticed. One launch at
// a time per process.
#ifndef TOPW_CUDA_EMULATOR_H
#define TOPW_CUDA_EMULATOR_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <functional>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct dim3 {
  unsigned x, y, z;
};

namespace topw {
namespace emulator {

// Source location of a waiting thread.
struct Place {
  const char *file;
  int line;
};

struct Thread {
  dim3 threadIdx, blockIdx, blockDim, gridDim;
};

extern Thread *current;  // the running thread

enum class Vote { none, any, all, count };

int barrier(const Place &, int predicate, Vote);
void warp_barrier(const Place &, unsigned mask);
// Deposits `value`, waits for the warp, and returns what `lane` deposited.
uint64_t exchange(const Place &, unsigned mask, uint64_t value, int lane);
unsigned ballot(const Place &, unsigned mask, bool vote);
[[noreturn]] void misaligned(const Place &, size_t bytes);
void *shared_variable(const void *tag, size_t bytes, size_t alignment);
unsigned char *dynamic_shared();
void yield();

uint64_t nanoseconds();
[[noreturn]] void trap(const char *why);

// Runs a kernel. Returns 0, or kUnlaunchable with the reason in error().
int run(const Launch &, const std::function<void()> &kernel);
const char *error();

// As cudaFuncSetAttribute: raises a block's shared memory limit from kSharedByDefault to kSharedOnRequest.
void allow_shared(const void *kernel, size_t bytes);
size_t allowed_shared(const void *kernel);
void set_kernel(const void *kernel);

// Set by topw_emulate.
struct Settings {
  uint64_t seed = 1;
  unsigned threads = 0;   // per block; 0: as on a device
  unsigned blocks = 4;    // multiprocessors
  unsigned resident = 0;  // concurrent blocks; 0: one per multiprocessor
  uint64_t tick = 0;      // nanoseconds per pause
};
extern Settings settings;

template <class T>
uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a warp function takes at most 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  return bits;
}

template <class T>
T from_bits(uint64_t bits) {
  T value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

inline int lane() { return static_cast<int>(current->threadIdx.x % 32); }

template <class T>
T shuffle(const Place &place, unsigned mask, T value, int lane) {
  return from_bits<T>(exchange(place, mask, to_bits(value), lane));
}

}  // namespace emulator

inline unsigned char *dynamic_shared() { return emulator::dynamic_shared(); }
inline void pause() { emulator::yield(); }
inline void fence() {}
inline uint64_t nanoseconds() { return emulator::nanoseconds(); }
inline void trap(const char *why, unsigned) { emulator::trap(why); }
inline void let_next_begin() {}
inline void wait_for_previous() {}
inline uint64_t add_to(uint64_t *word, uint64_t value) {
  const uint64_t before = *word;
  *word = before + value;
  return before;
}
inline uint64_t exchange_with(uint64_t *word, uint64_t value) {
  const uint64_t before = *word;
  *word = value;
  return before;
}
template <class Kernel>
bool can_be_early(Kernel *) {
  return true;
}
inline uint32_t take_ticket(uint32_t *counter) { return (*counter)++; }

template <class... Parameters, class... Arguments>
int launch(const Launch &how, void (*kernel)(Parameters...), const Arguments &...arguments) {
  emulator::set_kernel(reinterpret_cast<const void *>(kernel));
  return emulator::run(how, [&] { kernel(arguments...); });
}

inline int multiprocessors() { return static_cast<int>(emulator::settings.blocks); }

template <class Kernel>
int allow_shared(Kernel *kernel, size_t bytes) {
  if (bytes + kStaticAtMost <= kSharedByDefault) return 0;
  emulator::allow_shared(reinterpret_cast<const void *>(kernel), bytes);
  return 0;
}

template <class Kernel>
int resident_blocks(Kernel *, unsigned, size_t) {
  return static_cast<int>(4 * emulator::settings.blocks);
}

// A kernel's threads, or topw_emulate's number.
inline unsigned threads_of_block(unsigned threads) {
  return emulator::settings.threads ? emulator::settings.threads : threads;
}
inline const char *error_text(int code) { return code == 0 ? "no error" : emulator::error(); }
inline int last_error() { return 0; }
inline int zero(void *memory, size_t bytes, void *) { return memset(memory, 0, bytes) ? 0 : 1; }
inline int allocate(size_t bytes, void **memory) {
  *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
  return *memory ? zero(*memory, bytes, nullptr) : 2;  // cudaErrorMemoryAllocation
}
inline int release(void *memory) { return free(memory), 0; }
inline int device_count() { return 1; }

}  // namespace topw

#define TOPW_OUT_OF_LINE __attribute__((noinline))
#define TOPW_PLACE (::topw::emulator::Place{__FILE__, __LINE__})
#define TOPW_SHARED(Type, name)    \
  static const char name##_tag = 0; \
  Type &name = *static_cast<Type *>(::topw::emulator::shared_variable(&name##_tag, sizeof(Type), alignof(Type)))

#define threadIdx (::topw::emulator::current->threadIdx)
#define blockIdx (::topw::emulator::current->blockIdx)
#define blockDim (::topw::emulator::current->blockDim)
#define gridDim (::topw::emulator::current->gridDim)

#define __syncthreads() static_cast<void>(::topw::emulator::barrier(TOPW_PLACE, 0, ::topw::emulator::Vote::none))
#define __syncthreads_or(p) ::topw::emulator::barrier(TOPW_PLACE, (p), ::topw::emulator::Vote::any)
#define __syncthreads_and(p) ::topw::emulator::barrier(TOPW_PLACE, (p), ::topw::emulator::Vote::all)
#define __syncthreads_count(p) ::topw::emulator::barrier(TOPW_PLACE, (p), ::topw::emulator::Vote::count)
#define __syncwarp(...) ::topw::emulator::warp_barrier(TOPW_PLACE, ::topw::kEveryLane)
#define __shfl_sync(mask, value, from) ::topw::emulator::shuffle(TOPW_PLACE, mask, value, (from) & 31)
#define __shfl_xor_sync(mask, value, bits) \
  ::topw::emulator::shuffle(TOPW_PLACE, mask, value, ::topw::emulator::lane() ^ (bits))
#define __shfl_up_sync(mask, value, by) ::topw::emulator::shuffle_up(TOPW_PLACE, mask, value, static_cast<int>(by))
#define __shfl_down_sync(mask, value, by) ::topw::emulator::shuffle_down(TOPW_PLACE, mask, value, static_cast<int>(by))
#define __ballot_sync(mask, vote) ::topw::emulator::ballot(TOPW_PLACE, mask, static_cast<bool>(vote))
#define __any_sync(mask, vote) static_cast<int>(__ballot_sync(mask, vote) != 0)
#define __all_sync(mask, vote) static_cast<int>(__ballot_sync(mask, vote) == (mask))
#define __ldcg(...) ::topw::emulator::loaded(TOPW_PLACE, __VA_ARGS__)
#define __ldg(...) ::topw::emulator::loaded(TOPW_PLACE, __VA_ARGS__)

namespace topw {
namespace emulator {

template <class T>
T shuffle_up(const Place &place, unsigned mask, T value, int by) {
  return shuffle(place, mask, value, lane() >= by ? lane() - by : lane());
}

template <class T>
T loaded(const Place &place, const T *address) {
  if (reinterpret_cast<uintptr_t>(address) % alignof(T) != 0) misaligned(place, sizeof(T));
  return *address;
}

template <class T>
T shuffle_down(const Place &place, unsigned mask, T value, int by) {
  return shuffle(place, mask, value, lane() + by < 32 ? lane() + by : lane());
}

}  // namespace emulator
}  // namespace topw

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits)); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }

template <class T>
T atomicAdd(T *address, T value) {
  const T before = *address;
  *address = before + value;
  return before;
}
template <class T>
T atomicMin(T *address, T value) {
  const T before = *address;
  if (value < before) *address = value;
  return before;
}
template <class T>
T atomicMax(T *address, T value) {
  const T before = *address;
  if (value > before) *address = value;
  return before;
}
template <class T>
T atomicOr(T *address, T value) {
  const T before = *address;
  *address = before | value;
  return before;
}
template <class T>
T atomicExch(T *address, T value) {
  const T before = *address;
  *address = value;
  return before;
}
template <class T>
T atomicCAS(T *address, T expected, T value) {
  const T before = *address;
  if (before == expected) *address = value;
  return before;
}

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};

#endif
