// The global memory that geometry's teams work in, and the shared memory of their blocks.
//
// Sizes depend on the shape alone. A step with few open rows has few teams, which then have more room for sums of pairs
// and cut their work into smaller pieces; what is answered does not depend on that.
#ifndef TOPW_CUDA_TEAM_SCRATCH_H
#define TOPW_CUDA_TEAM_SCRATCH_H

#include "../native/host_device.h"
#include "topw_cuda.h"

namespace topw {

constexpr int kTeams = 32;      // at most
constexpr int kTeamWords = 32;  // of control memory for each, zero between steps: 128 bytes, a cache line

namespace crop {

// A team's job: what its first block asks all of them to do.
struct Job {
  int32_t kind;               // 0: go home
  int32_t fresh, rows, cols;  // how many positions in the pool these lists hold
};

// One team's memory. Positions are places in the pool, [pool] unless another length is said.
struct Memory {
  Job *job;
  uint64_t *tokens;       // the pool: keys of tokens
  double *a, *p;          // log-weights and weights in units of the largest
  double *sums[2];        // scratch of scans where shared memory is too small for it
  float *distance;        // to the set, or a lower bound
  float *inverse_norm, *squared_length;  // of the token's row and point
  int32_t *fresh, *rows, *cols, *order;  // lists of positions
  int32_t *groups;        // [groups of logits] those that may hold tokens of the pool
  uint8_t *state;
  float *pairs;           // sums of squares: [pieces of the coordinates, rows, cols]
  int64_t pairs_room;     // floats
};

constexpr int64_t kPairs = 131072;       // pairs of tokens compared between two tests of who may still enter
constexpr int64_t kPairsTogether = 524288;  // floats for all teams' pairs, at least

TOPW_SHARED_CODE inline int64_t rounded_up(int64_t size, int64_t to) { return (size + to - 1) / to * to; }

// Moves through memory, piece by piece.
class Taker {
 public:
  TOPW_SHARED_CODE explicit Taker(unsigned char *start) : start_(start) {}
  template <class T>
  TOPW_SHARED_CODE T *take(int64_t count) {
    const int64_t here = at_;
    at_ += rounded_up(count * static_cast<int64_t>(sizeof(T)), 128);
    return reinterpret_cast<T *>(start_ ? start_ + here : nullptr);
  }
  TOPW_SHARED_CODE int64_t bytes() const { return at_; }

 private:
  unsigned char *start_;
  int64_t at_ = 0;
};

// Everything but `pairs`; `pool` and `groups` are how many there are. How many bytes that takes.
TOPW_SHARED_CODE inline int64_t lay_out_memory(unsigned char *start, int64_t pool, int64_t groups, Memory *memory) {
  Taker from(start);
  memory->job = from.take<Job>(1);
  memory->tokens = from.take<uint64_t>(pool);
  memory->a = from.take<double>(pool);
  memory->p = from.take<double>(pool);
  memory->sums[0] = from.take<double>(pool);
  memory->sums[1] = from.take<double>(pool);
  memory->distance = from.take<float>(pool);
  memory->inverse_norm = from.take<float>(pool);
  memory->squared_length = from.take<float>(pool);
  memory->fresh = from.take<int32_t>(pool);
  memory->rows = from.take<int32_t>(pool);
  memory->cols = from.take<int32_t>(pool);
  memory->order = from.take<int32_t>(pool);
  memory->groups = from.take<int32_t>(groups);
  memory->state = from.take<uint8_t>(pool);
  return from.bytes();
}

TOPW_SHARED_CODE inline int64_t most_teams(int64_t batch) { return batch < kTeams ? batch : kTeams; }

TOPW_SHARED_CODE inline int64_t pairs_floats(int64_t batch) {
  const int64_t needed = most_teams(batch) * kPairs;
  return needed > kPairsTogether ? needed : kPairsTogether;
}

TOPW_SHARED_CODE inline int64_t pool_size(const topw_options &options, int64_t vocab) {
  return options.top_m < vocab ? options.top_m : vocab;
}

// Where the memory of team `team` of `teams` lies behind `start`.
TOPW_SHARED_CODE inline Memory memory_of_team(unsigned char *start, int64_t batch, int64_t pool, int64_t groups,
                                              int64_t team, int64_t teams) {
  Memory memory = {};
  const int64_t bytes = lay_out_memory(nullptr, pool, groups, &memory);
  lay_out_memory(start + team * bytes, pool, groups, &memory);
  memory.pairs_room = pairs_floats(batch) / teams;
  memory.pairs = reinterpret_cast<float *>(start + most_teams(batch) * bytes) + team * memory.pairs_room;
  return memory;
}

}  // namespace crop

// Bytes of scratch memory for all teams.
inline int64_t team_scratch_bytes(const topw_cuda_shape &shape) {
  crop::Memory memory = {};
  const int64_t pool = crop::pool_size(shape.options, shape.vocab), groups = (shape.vocab + 63) / 64;
  return crop::most_teams(shape.batch) * crop::lay_out_memory(nullptr, pool, groups, &memory) +
         crop::pairs_floats(shape.batch) * static_cast<int64_t>(sizeof(float));
}

}  // namespace topw
#endif
