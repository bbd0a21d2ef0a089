// Chooses the hot loops' instruction set: the best available or the requested one.

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <stdlib.h>
#include <string.h>
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>

#include "hot.h"
#include "product.h"
#include "topw.h"

namespace topw {
namespace {

// The loops for a processor.
struct Set {
  const Hot &hot;
  const Product &product;
};

std::atomic<const Set *> in_use{nullptr};
std::atomic<const Product *> product_in_use{nullptr};  // null: that of the set

#if defined(__x86_64__)
// Linux saves the tiles of a process only after this request.
bool may_use_tiles() {
#if defined(TOPW_AMX)
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, the state's number
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

// Uses cpuid: __builtin_cpu_supports needs a table that some runtimes (zig's) leave empty.
struct Features {
  bool avx2 = false, avx512 = false, avx_vnni = false, avx512_vnni = false, amx = false;

  Features() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return;
    const bool fma = c & bit_FMA;
    unsigned saved, high;  // registers saved by the operating system
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    constexpr unsigned kYmm = 0x6, kZmm = 0xe6, kWanted = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    constexpr unsigned kAvx512Vnni = 1u << 11, kAmx = 3u << 24, kAvxVnni = 1u << 4;  // of c, of d; of a in subleaf 1
    avx2 = fma && (b & bit_AVX2) && (saved & kYmm) == kYmm;
    avx512 = avx2 && (b & kWanted) == kWanted && (saved & kZmm) == kZmm;
    avx512_vnni = avx512 && (c & kAvx512Vnni);
    amx = avx512_vnni && (d & kAmx) == kAmx && may_use_tiles();
    avx_vnni = avx2 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & kAvxVnni);
  }
};

constexpr Set kWithAvx2{kAvx2, kProductAvx2}, kWithAvx512{kAvx512, kProductAvx2}, kWithVnni{kAvx512, kProductAvx512};
#if defined(TOPW_AVX_VNNI)
constexpr Set kWithAvxVnni{kAvx2, kProductAvxVnni};
#else
constexpr Set kWithAvxVnni = kWithAvx2;
#endif
#if defined(TOPW_AMX)
constexpr Set kWithAmx{kAvx512, kProductAmx};
#else
constexpr Set kWithAmx = kWithVnni;
#endif
#elif defined(__aarch64__)
constexpr Set kWithDot{kGeneric, kProductDot};

bool has_dot() {
#if defined(__linux__)
  constexpr unsigned long kDot = 1ul << 20;  // HWCAP_ASIMDDP
  return getauxval(AT_HWCAP) & kDot;
#else
  return true;  // on every Mac
#endif
}
#endif
constexpr Set kWithNothing{kGeneric, kProductGeneric};

// The loops of an instruction set, or the best for null; null if the processor or the build lacks it.
const Set *find_set(const char *name) {
#if defined(__x86_64__)
  const Features has;
  if (has.avx512 && (!name || strcmp(name, kAvx512.name) == 0))
    return has.amx ? &kWithAmx : has.avx512_vnni ? &kWithVnni : &kWithAvx512;
  if (has.avx2 && (!name || strcmp(name, kAvx2.name) == 0)) return has.avx_vnni ? &kWithAvxVnni : &kWithAvx2;
#elif defined(__aarch64__)
  if (has_dot() && (!name || strcmp(name, kGeneric.name) == 0)) return &kWithDot;
#endif
  return !name || strcmp(name, kGeneric.name) == 0 || strcmp(name, "generic") == 0 ? &kWithNothing : nullptr;
}

// The product of that name, null if the processor or the build lacks it.
const Product *find_product(const char *name) {
  const Product *found[] = {&kProductGeneric, nullptr, nullptr, nullptr, nullptr};
#if defined(__x86_64__)
  const Features has;
  if (has.avx2) found[1] = &kProductAvx2;
  if (has.avx_vnni) found[2] = &kWithAvxVnni.product;
  if (has.avx512_vnni) found[3] = &kProductAvx512;
  if (has.amx) found[4] = &kWithAmx.product;
#elif defined(__aarch64__)
  if (has_dot()) found[1] = &kProductDot;
#endif
  for (const Product *product : found)
    if (product && strcmp(product->name, name) == 0) return product;
  return nullptr;
}

const Set &chosen_set() {
  const Set *chosen = in_use.load(std::memory_order_acquire);
  if (!chosen) {  // concurrent threads choose the same
    const char *requested = getenv("TOPW_INSTRUCTION_SET");
    chosen = requested ? find_set(requested) : nullptr;
    if (!chosen) chosen = find_set(nullptr);
    in_use.store(chosen, std::memory_order_release);
  }
  return *chosen;
}

}  // namespace

const Hot &hot() { return chosen_set().hot; }
const Product &product() {
  const Product *chosen = product_in_use.load(std::memory_order_acquire);
  return chosen ? *chosen : chosen_set().product;
}

}  // namespace topw

extern "C" {

const char *topw_instruction_set(void) { return topw::hot().name; }

int topw_use_instruction_set(const char *name) {
  const topw::Set *found = name ? topw::find_set(name) : nullptr;
  if (!found) return 1;
  topw::in_use.store(found, std::memory_order_release);
  return 0;
}

int topw_use_product(const char *name) {
  const topw::Product *found = name ? topw::find_product(name) : nullptr;
  if (name && !found) return 1;
  topw::product_in_use.store(found, std::memory_order_release);
  return 0;
}

}  // extern "C"
