// Global memory of leaders and their helpers.
//
// Sizes depend only on the shape. If there are few leaders, each has more room for sums of pairs and cuts work into
// smaller items, with the same results.
#ifndef TOPW_CUDA_TEAM_SCRATCH_H
#define TOPW_CUDA_TEAM_SCRATCH_H

#include "../native/host_device.h"
#include "topw_cuda.h"

namespace topw {

constexpr int kTeams = 32;  // most leaders at once

// A leader's control memory, zero between steps, in its own cache line.
struct alignas(128) Board {
  uint64_t claims;  // packed as in jobs.h
  uint32_t done;    // items
};

namespace crop {

// A pool's tokens: at least `bound`, at most `last_step` steps below the row's largest.
struct Cut {
  float bound;      // finite
  int32_t last_id;  // of the tokens at `bound`
  float top, rate;  // (top - logit) * rate is the step; 0: a single step
  int32_t last_step;
};

enum class Work : int32_t {
  count_steps, take_tokens, measure_lengths, compare_pairs, settle_rows, fill_bins, take_chosen, mark_chosen
};  // fmt: skip

// Tokens of a whole row, for rules that the best tokens do not decide (bins.h). A token's distance is |y - center| with
// y = (top - logit) / temperature, as a key of its bits.
enum class Chosen : int32_t { range, nearest, equally_near };
struct Choice {
  Chosen which;
  float top;
  uint64_t after, last;  // range: token keys in (after, last]; the others: token keys up to `last` at `distance`
  uint64_t distance;     // nearest: and all tokens at a smaller distance
  double temperature, center;
};

// Counts and weighs chosen tokens by eight bits of their key. A token weighs w = exp((l - top) / temperature), or with
// `terms` w (center - ln w), times `boost` and `scale`, rounded: sums of whole numbers are exact in any order.
struct Bins {
  Choice choice;
  bool by_distance;  // bits of the distance's key instead of the token's
  bool terms;
  float top;
  int32_t shift;
  uint64_t prefix;   // the key's bits from shift + 8 on
  double temperature, center;
  double boost, scale;  // 0: no weights
};

// Distance between pieces of a pair's sum that different blocks may add.
enum class Pieces : int32_t { slices, sections, one };

struct Job {
  Work work;
  int32_t row;         // of the batch
  int32_t listed;      // groups to read; -1: all
  int32_t tokens;      // of the pool
  int32_t rows, cols;  // positions in Memory::rows and Memory::cols
  Pieces pieces;
  Cut cut;
};

// One leader's memory. Positions index the pool; arrays are [pool] unless noted.
struct Memory {
  Job *job;
  uint32_t *found;        // number of tokens taken, then [kSteps] counts of count_steps and fill_bins
  Bins *bins;             // of the jobs on chosen tokens
  uint64_t *weights;      // [kSteps] sums of fill_bins
  uint64_t *taken;        // [kMostTaken] tokens' keys, unordered
  uint64_t *tokens;       // the pool: keys of tokens
  double *base, *p;       // lam times the log-weight, and weights in units of the largest
  double *sums[2];        // scratch of scans where shared memory is too small
  float *rough_base, *rough_p;           // both in float32
  float *distance;        // to the set, or a lower bound
  float *inverse_norm, *squared_length;  // of the token's row and point
  int32_t *rows, *cols, *order;          // lists of positions
  int32_t *groups;        // [groups of logits] those that may hold pool tokens
  uint8_t *state;
  float *pairs;           // sums of squares [pieces of the coordinates, rows, cols]
  int64_t pairs_room;     // floats
};

constexpr int kSteps = 256;
constexpr int64_t kMostTaken = 4096;
constexpr int64_t kPairs = 131072;       // pairs compared between two row tests
constexpr int64_t kPairsTogether = 524288;  // fewest floats for all leaders' pairs

TOPW_SHARED_CODE inline int64_t rounded_up(int64_t size, int64_t to) { return (size + to - 1) / to * to; }

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

// Places everything but `pairs`. Returns the bytes used.
TOPW_SHARED_CODE inline int64_t lay_out_memory(unsigned char *start, int64_t pool, int64_t groups, Memory *memory) {
  Taker from(start);
  memory->job = from.take<Job>(1);
  memory->found = from.take<uint32_t>(1 + kSteps);
  memory->bins = from.take<Bins>(1);
  memory->weights = from.take<uint64_t>(kSteps);
  memory->taken = from.take<uint64_t>(kMostTaken);
  memory->tokens = from.take<uint64_t>(pool);
  memory->base = from.take<double>(pool);
  memory->p = from.take<double>(pool);
  memory->sums[0] = from.take<double>(pool);
  memory->sums[1] = from.take<double>(pool);
  memory->rough_base = from.take<float>(pool);
  memory->rough_p = from.take<float>(pool);
  memory->distance = from.take<float>(pool);
  memory->inverse_norm = from.take<float>(pool);
  memory->squared_length = from.take<float>(pool);
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

// The memory of leader `team` of `teams` after `start`.
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

// Bytes of scratch memory for all leaders.
inline int64_t team_scratch_bytes(const topw_cuda_shape &shape) {
  crop::Memory memory = {};
  const int64_t pool = crop::pool_size(shape.options, shape.vocab), groups = (shape.vocab + 63) / 64;
  return crop::most_teams(shape.batch) * crop::lay_out_memory(nullptr, pool, groups, &memory) +
         crop::pairs_floats(shape.batch) * static_cast<int64_t>(sizeof(float));
}

}  // namespace topw
#endif
