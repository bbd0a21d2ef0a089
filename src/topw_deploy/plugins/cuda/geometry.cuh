// The second launch: answers the rows certify left open; ends at once if none are. May begin while certify runs.
#ifndef TOPW_CUDA_GEOMETRY_CUH
#define TOPW_CUDA_GEOMETRY_CUH

#include "alternation.h"
#include "finish.h"
#include "pool.h"
#include "rule_scan.cuh"
#include "whole_row.cuh"

namespace topw {

constexpr unsigned kGeometryThreads = 256;
constexpr unsigned kGeometryBlocks = 2;  // launched per multiprocessor, all resident

namespace crop {

constexpr int64_t kSumsInShared = 1277;  // tokens of a pool: more would exceed 48 KB per block

// Tokens a leading block can sort at once, including extras from the groups' maxima.
TOPW_SHARED_CODE inline int32_t sorted_at_once(int64_t pool) {
  int32_t capacity = 64;
  while (capacity < pool + pool / 2 && capacity < kMostPool) capacity *= 2;
  return capacity;
}

TOPW_SHARED_CODE inline int64_t sorting_bytes(int64_t pool) {
  return sorted_at_once(pool) * static_cast<int64_t>(sizeof(uint64_t) + sizeof(uint32_t));
}

// A leading block's dynamic shared memory; otherwise it holds distance tiles.
__device__ inline Room room_of(const Memory &memory, int64_t pool) {
  Room room = {};
  room.capacity = sorted_at_once(pool);
  room.keys = reinterpret_cast<uint64_t *>(dynamic_shared());
  room.items = reinterpret_cast<uint32_t *>(room.keys + room.capacity);
  double *const sums = reinterpret_cast<double *>(dynamic_shared() + sorting_bytes(pool));
  // sums[1] follows sums[0]: both together hold the power of 2 from `pool`.
  for (int n = 0; n < 2; ++n) room.sums[n] = pool <= kSumsInShared ? sums + n * pool : memory.sums[n];
  return room;
}

// The pool in Memory, and its sizes.
struct PoolSums {
  int32_t size, k0, K;  // k0: warm start; K: first maximiser without geometry
};

__device__ inline PoolSums weigh(const Parameters &P, float top, int32_t size, const Memory &memory, const Room &room,
                                 BlockScratch &scratch) {
  TOPW_SHARED(Cooling, selection);
  if (own_index() == 0) selection = cooling_of(P.selection);
  __syncthreads();
#pragma unroll 1
  for (int32_t i = own_index(); i < size; i += block_size()) {
    memory.tokens[i] = room.keys[i];
    const Weight of = weight_of(logit_of(room.keys[i]), top, selection, true);
    const double p = of.weight, base = P.lam * of.log;
    memory.base[i] = base;
    memory.p[i] = p;
    memory.rough_base[i] = static_cast<float>(base);
    memory.rough_p[i] = static_cast<float>(p);
    room.sums[0][i] = p;
    room.sums[1][i] = p * base;
  }
  block_scan(room.sums[0], room.sums[1], size, scratch);
  const double reached = P.init_top_p * room.sums[0][size - 1];
  int32_t k0 = size;
  if (P.init_top_p < 1)
#pragma unroll 1
    for (int32_t i = own_index(); i < k0; i += block_size())
      if (room.sums[0][i] >= reached) k0 = i + 1;
  k0 = block_reduce(k0, Smaller(), scratch);
  const int32_t K = first_maximiser(room.sums[0], room.sums[1], size, P.c, scratch).size;
  __syncthreads();
  return {size, k0, K};
}

// Answers a row with a rule other than Top-W: from its pool, or from all its tokens if the pool does not decide. It is a
// separate function so that its variables do not push those of Top-W out of registers.
__device__ TOPW_OUT_OF_LINE inline void answer_rule(const Call &call, int32_t row, const Memory &memory, Leader &leader,
                                                    BlockScratch &scratch) {
  TOPW_SHARED(FoundBin, found);
  TOPW_SHARED(Cooling, selection);
  const RowState state = load_written(call.workspace.rows + row);
  const int32_t most = static_cast<int32_t>(pool_size(call.options, call.inputs.vocab));
  const Room room = room_of(memory, most);
  const LogitRow logits(call, row);
  Job job = {};
  job.row = row;
  if (own_index() == 0) selection = cooling_of(state.parameters.selection);
  PoolTaker taker(logits, state.top, most, room.keys, room.capacity, job, memory, leader, scratch);
  const int32_t size = taker.run();
  RuleScan scan(state.plan, selection, state.top, {room.keys, size, size < most},
                reinterpret_cast<uint64_t *>(room.sums[0]), room.items, scratch);
  const Kept kept = scan.run();
  if (kept.size > 0) {
    const topw_report report = {TOPW_POOL, size, 0, 0, 0, 0};
    finish_row(call, row, state.parameters, state.top, kept, report, scan.room(), scratch);
    return;
  }
  RowSearch search(logits, job, memory, leader, found, scratch);
  WholeRow whole(call, row, state, {room.keys, room.capacity}, memory, search, scratch);
  whole.run();
}

// Answers a row from its pool, by its leading block.
__device__ inline void answer_row(const Call &call, int32_t row, const Memory &memory, int32_t helpers, Leader &leader,
                                  BlockScratch &scratch) {
  const RowState state = load_written(call.workspace.rows + row);
  const Parameters P = state.parameters;
  const int32_t most = static_cast<int32_t>(pool_size(call.options, call.inputs.vocab));
  const Room room = room_of(memory, most);
  const LogitRow logits(call, row);
  Job job = {};
  job.row = row;
  PoolTaker taker(logits, state.top, most, room.keys, room.capacity, job, memory, leader, scratch);
  const PoolSums pool = weigh(P, state.top, taker.run(), memory, room, scratch);

  topw_report report = {TOPW_POOL, pool.size, 0, 0, 0, 0};
  Kept kept = {room.keys, pool.K, P.scale >= 0 && pool.K <= pool.k0};  // T2
  if (!kept.certified) {
    job.tokens = pool.size;
    Distances distances(call, memory);
    Alternation alternation(call, P, memory, job, room, leader, distances, helpers, scratch);
    alternation.run(pool.k0);
    alternation.list_members();
    kept.size = alternation.kept;
#pragma unroll 1
    for (int32_t n = own_index(); n < kept.size; n += block_size()) room.keys[n] = memory.tokens[memory.cols[n]];
    __syncthreads();
    report.stage = P.scale >= 0 ? TOPW_GEOMETRY : TOPW_LITERAL;
    report.steps = static_cast<int32_t>(alternation.steps < INT32_MAX ? alternation.steps : INT32_MAX);
    report.distances = alternation.pairs;
    report.distances_avoided = alternation.literal > alternation.pairs ? alternation.literal - alternation.pairs : 0;
  }
  finish_row(call, row, P, state.top, kept, report, room.sums[0], scratch);
}

// State shared by the blocks of the launch.
class OpenRows {
 public:
  __device__ OpenRows(const Call &call, uint32_t open_rows)
      : call_(call), control_(call.workspace.control), open_(open_rows), teams_(leaders(open_rows)) {}

  __device__ int32_t teams() const { return teams_; }

  __device__ Memory memory_of(int32_t team) const {
    return memory_of_team(call_.workspace.team_scratch, call_.inputs.batch,
                          pool_size(call_.options, call_.inputs.vocab), call_.groups, team, teams_);
  }

  // Answers open rows until none is left. The first blocks to arrive lead.
  __device__ void lead(int32_t &word, Claim &claim, BlockScratch &scratch) const {
    const uint32_t team = next(&control_->leaders, word);
    if (team >= static_cast<uint32_t>(teams_)) return;
    const Memory memory = memory_of(static_cast<int32_t>(team));
    Leader leader(&control_->boards[team], memory.job, claim);
    const int32_t helpers = static_cast<int32_t>(gridDim.x) / teams_;
    for (uint32_t n; (n = next(&control_->next_row, word)) < open_;) {
      const int32_t row = __ldcg(call_.workspace.open_rows + n);
      if (is_top_w(call_.inputs, row))
        answer_row(call_, row, memory, helpers, leader, scratch);
      else
        answer_rule(call_, row, memory, leader, scratch);
      __syncthreads();
      if (own_index() == 0) atomicAdd(&control_->rows_done, 1u);
    }
  }

  // Works on all leaders' jobs until every row is answered.
  __device__ void help(int32_t &team, Claim &claim, BlockScratch &scratch) const {
    for (Patience patience;;) {
      __syncthreads();
      if (own_index() == 0) team = find_job(claim, patience);
      __syncthreads();
      if (team < 0) return;
      const Memory memory = memory_of(team);
      while (claim.item >= 0) work_on(memory, &control_->boards[team], claim, scratch);
    }
  }

 private:
  // Increments a counter; all threads of the block get the old value.
  __device__ static uint32_t next(uint32_t *counter, int32_t &word) {
    if (own_index() == 0) word = static_cast<int32_t>(atomicAdd(counter, 1u));
    __syncthreads();
    const uint32_t value = static_cast<uint32_t>(word);
    __syncthreads();
    return value;
  }

  // Claims an item. Returns its leader's number, or -1 when all rows are answered. By one thread.
  __device__ int32_t find_job(Claim &claim, Patience &patience) const {
    for (uint64_t last = 0;;) {
      const bool all_done = polled(&control_->rows_done) >= open_;
      uint64_t sum = 0;
      const int32_t team = offering(sum);
      if (team >= 0) {
        claim = claim_item(&control_->boards[team]);
        if (claim.item < 0) continue;
        patience.renew();
        return team;
      }
      if (all_done) return -1;
      if (sum != last) patience.renew();
      last = sum;
      patience.wait("open rows that nobody answers");
    }
  }

  // A leader whose job has items left, or -1; sum: over all boards. Blocks start with different leaders.
  __device__ int32_t offering(uint64_t &sum) const {
    constexpr int32_t kTogether = 8;  // loads in flight
    int32_t found = -1;
#pragma unroll 1
    for (int32_t first = 0; first < teams_ && found < 0; first += kTogether) {
      uint64_t claims[kTogether];
#pragma unroll
      for (int32_t n = 0; n < kTogether; ++n) claims[n] = polled(&control_->boards[board(first + n)].claims);
#pragma unroll
      for (int32_t n = 0; n < kTogether; ++n) {
        sum += claims[n];
        if (found < 0 && claimed_in(claims[n]) < items_in(claims[n])) found = board(first + n);
      }
    }
    return found;
  }

  __device__ int32_t board(int32_t n) const {
    return (static_cast<int32_t>(blockIdx.x) + (n < teams_ ? n : 0)) % teams_;
  }

  // Works on all items of the claimed job that this block can claim.
  __device__ void work_on(const Memory &memory, Board *board, Claim &claim, BlockScratch &scratch) const {
    const Job job = load_written(memory.job);
    const LogitRow logits(call_, job.row);
    if (job.work >= Work::fill_bins) return work_on_bins(memory, board, claim, scratch);
    if (job.work == Work::take_tokens || job.work == Work::count_steps) {
      PoolReader reader(logits, job, memory, scratch);
      work_off(board, claim, [&](int32_t item) {
        if (job.work == Work::take_tokens)
          reader.take(item);
        else
          reader.count(item);
      });
      return;
    }
    Distances distances(call_, memory);
    work_off(board, claim, [&](int32_t item) { distances.work(job, item); });
  }

  // With variables of its own, as answer_rule.
  __device__ TOPW_OUT_OF_LINE void work_on_bins(const Memory &memory, Board *board, Claim &claim,
                                                BlockScratch &scratch) const {
    const Job job = load_written(memory.job);
    const LogitRow logits(call_, job.row);
    BinReader reader(logits, job, memory, scratch);
    work_off(board, claim, [&](int32_t item) {
      if (job.work == Work::fill_bins)
        reader.fill(item);
      else if (job.work == Work::take_chosen)
        reader.take_chosen(item);
      else
        reader.mark(item, call_.outputs.keep_mask + job.row * call_.inputs.vocab);
    });
  }

  const Call &call_;
  Control *control_;
  uint32_t open_;
  int32_t teams_;
};

}  // namespace crop

// Bytes of dynamic shared memory for a block of `threads`.
inline size_t geometry_shared_bytes(const topw_cuda_shape &shape, unsigned threads) {
  const int64_t pool = crop::pool_size(shape.options, shape.vocab);
  int64_t leading = crop::sorting_bytes(pool);
  if (pool <= crop::kSumsInShared) leading += 2 * pool * static_cast<int64_t>(sizeof(double));
  const int64_t tiles = shape.options.metric == TOPW_UNIFORM ? 0 : crop::tile_bytes(threads);
  const int64_t helping = tiles > crop::kBinBytes ? tiles : crop::kBinBytes;
  return static_cast<size_t>(leading > helping ? leading : helping);
}

__global__ void __launch_bounds__(kGeometryThreads, kGeometryBlocks) geometry(const __grid_constant__ Call call) {
  wait_for_previous();
  const uint32_t listed = __ldcg(&call.workspace.control->open_count);
  if (listed == 0) return;
  const uint32_t batch = static_cast<uint32_t>(call.inputs.batch), open_rows = listed < batch ? listed : batch;
  TOPW_SHARED(BlockScratch, scratch);
  TOPW_SHARED(int32_t, word);
  TOPW_SHARED(crop::Claim, claim);
  const crop::OpenRows rows(call, open_rows);
  rows.lead(word, claim, scratch);
  rows.help(word, claim, scratch);
  crop::leave(call, rows.teams());
}

}  // namespace topw
#endif
