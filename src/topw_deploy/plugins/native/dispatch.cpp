// Which instruction set the hot loops use: the best that the processor has, or what one asks for.

#include <stdlib.h>
#include <string.h>

#include <atomic>

#include "hot.h"
#include "topw.h"

namespace topw {
namespace {

std::atomic<const Hot *> in_use{nullptr};

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// NULL if this processor or this build has no such set.
const Hot *named(const char *name) {
#if defined(__x86_64__)
  if (strcmp(name, kAvx512.name) == 0 && has_avx512()) return &kAvx512;
  if (strcmp(name, kAvx2.name) == 0 && has_avx2()) return &kAvx2;
#endif
  return strcmp(name, kGeneric.name) == 0 || strcmp(name, "generic") == 0 ? &kGeneric : nullptr;
}

const Hot *best() {
  const char *asked = getenv("TOPW_INSTRUCTION_SET");
  if (const Hot *found = asked ? named(asked) : nullptr) return found;
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
    chosen = best();  // two threads at once find the same
    in_use.store(chosen, std::memory_order_release);
  }
  return *chosen;
}

}  // namespace topw

extern "C" {

const char *topw_instruction_set(void) { return topw::hot().name; }

int topw_use_instruction_set(const char *name) {
  const topw::Hot *found = topw::named(name);
  if (!found) return 1;
  topw::in_use.store(found, std::memory_order_release);
  return 0;
}

}  // extern "C"
