// The portable hot loops: SSE2 on x86-64, NEON on arm64.

#include <math.h>
#include <string.h>

#include "hot.h"
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace topw {
namespace {

#include "lanes_generic.h"

#include "hot_loops.inc"

#include "hot_sums.inc"

#include "attention_loops.inc"

}  // namespace

#if defined(__ARM_NEON)
const Hot kGeneric = TOPW_HOT_LOOPS("neon");
#else
const Hot kGeneric = TOPW_HOT_LOOPS("generic");
#endif

}  // namespace topw
