// Teams of blocks: each takes open rows of its own, its first block leads, the others do what it asks for.
//
// All blocks of the launch are resident, so a block may wait for others. Barriers count up in the control part of the
// workspace; the last block to leave puts everything there back to zero for the next launch.
#ifndef TOPW_CUDA_TEAMS_H
#define TOPW_CUDA_TEAMS_H

#include "block.h"
#include "workspace.h"

namespace topw::crop {

class Team {
 public:
  // Block b is of team b % count.
  __device__ Team(const Call &call, uint32_t open_rows)
      : count_(static_cast<int32_t>(fewest(open_rows, fewest(gridDim.x, kTeams)))),
        index_(static_cast<int32_t>(blockIdx.x) % count_),
        rank_(static_cast<int32_t>(blockIdx.x) / count_),
        size_((static_cast<int32_t>(gridDim.x) - index_ + count_ - 1) / count_),
        arrived_(&call.workspace.control->teams[index_][0]) {}

  __device__ int32_t count() const { return count_; }
  __device__ int32_t index() const { return index_; }
  __device__ int32_t rank() const { return rank_; }  // 0 leads
  __device__ int32_t size() const { return size_; }  // blocks

  // All threads of all blocks of the team arrive, and what was written before can be read behind it, past the first
  // level of cache (__ldcg) where another block wrote it.
  __device__ void barrier() {
    __syncthreads();
    if (size_ == 1) return;
    expected_ += static_cast<uint32_t>(size_);
    if (threadIdx.x == 0) {
      __threadfence();
      atomicAdd(arrived_, 1u);
      while (*static_cast<volatile uint32_t *>(arrived_) < expected_) pause();
      __threadfence();
    }
    __syncthreads();
  }

 private:
  __device__ static uint32_t fewest(uint32_t a, uint32_t b) { return a < b ? a : b; }

  int32_t count_, index_, rank_, size_;
  uint32_t *arrived_;
  uint32_t expected_ = 0;
};

// The last thing that a block does. Behind it nothing of the control part may be touched.
__device__ inline void leave(const Call &call, int32_t teams) {
  Control *const control = call.workspace.control;
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(&control->geometry_ticket, 1u) + 1 < gridDim.x) return;
  for (int32_t team = 0; team < teams; ++team) control->teams[team][0] = 0;
  control->geometry_ticket = 0;
  control->open_count = 0;
}

}  // namespace topw::crop
#endif
