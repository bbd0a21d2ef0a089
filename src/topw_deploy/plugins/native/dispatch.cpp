// Chooses the hot loops' instruction set: the best available or the requested one.

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <stdlib.h>
#include <string.h>

#include <atomic>

#include "hot.h"
#include "topw.h"

namespace topw {
namespace {

std::atomic<const Hot *> in_use{nullptr};

#if defined(__x86_64__)
// Uses cpuid: __builtin_cpu_supports needs a table that some runtimes (zig's) leave empty.
struct Features {
  bool avx2 = false, avx512 = false;

  Features() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return;
    const bool fma = c & bit_FMA;
    unsigned saved, high;  // registers saved by the operating system
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    constexpr unsigned kYmm = 0x6, kZmm = 0xe6, kWanted = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    avx2 = fma && (b & bit_AVX2) && (saved & kYmm) == kYmm;
    avx512 = avx2 && (b & kWanted) == kWanted && (saved & kZmm) == kZmm;
  }
};

bool has_avx2() { return Features().avx2; }
bool has_avx512() { return Features().avx512; }
#endif

// The loops of an instruction set; NULL if the processor or the build lacks it.
const Hot *find_set(const char *name) {
#if defined(__x86_64__)
  if (strcmp(name, kAvx512.name) == 0 && has_avx512()) return &kAvx512;
  if (strcmp(name, kAvx2.name) == 0 && has_avx2()) return &kAvx2;
#endif
  return strcmp(name, kGeneric.name) == 0 || strcmp(name, "generic") == 0 ? &kGeneric : nullptr;
}

const Hot *choose_set() {
  const char *requested = getenv("TOPW_INSTRUCTION_SET");
  if (const Hot *found = requested ? find_set(requested) : nullptr) return found;
#if defined(__x86_64__)
  if (has_avx512()) return &kAvx512;
  if (has_avx2()) return &kAvx2;
#endif
  return &kGeneric;
}

}  // namespace

const Hot &hot() {
  const Hot *chosen = in_use.load(std::memory_order_acquire);
  if (!chosen) {
    chosen = choose_set();  // concurrent threads choose the same
    in_use.store(chosen, std::memory_order_release);
  }
  return *chosen;
}

}  // namespace topw

extern "C" {

const char *topw_instruction_set(void) { return topw::hot().name; }

int topw_use_instruction_set(const char *name) {
  const topw::Hot *found = topw::find_set(name);
  if (!found) return 1;
  topw::in_use.store(found, std::memory_order_release);
  return 0;
}

}  // extern "C"
