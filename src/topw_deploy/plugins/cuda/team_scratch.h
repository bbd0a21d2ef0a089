// How much global memory a team of `geometry` works in. Owned by geometry.cuh.
#ifndef TOPW_CUDA_TEAM_SCRATCH_H
#define TOPW_CUDA_TEAM_SCRATCH_H

#include "topw_cuda.h"

namespace topw {

constexpr int kTeams = 32;      // at most
constexpr int kTeamWords = 32;  // of control memory for each, zero between steps: 128 bytes, a cache line

// Bytes of scratch memory for one team.
inline int64_t team_scratch_bytes(const topw_cuda_shape &) { return 0; }

}  // namespace topw
#endif
