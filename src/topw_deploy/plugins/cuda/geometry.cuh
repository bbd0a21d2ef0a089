// The second launch: the rows that certify left open, by teams of blocks. One cooperative launch, which is over at once
// where there are none.
#ifndef TOPW_CUDA_GEOMETRY_CUH
#define TOPW_CUDA_GEOMETRY_CUH

#include "alternation.h"
#include "finish.h"
#include "pool.h"

namespace topw {

constexpr unsigned kGeometryThreads = 512;

namespace crop {

constexpr int64_t kSumsInShared = 1277;  // tokens of a pool: more would not leave a block within 48 KB

// Tokens that a leading block can sort at a time, with room for what the groups' maxima bring beside the pool.
TOPW_SHARED_CODE inline int32_t sorted_at_once(int64_t pool) {
  int32_t capacity = 64;
  while (capacity < pool + pool / 2 && capacity < kMostPool) capacity *= 2;
  return capacity;
}

TOPW_SHARED_CODE inline int64_t sorting_bytes(int64_t pool) {
  return sorted_at_once(pool) * static_cast<int64_t>(sizeof(uint64_t) + sizeof(uint32_t));
}

// What a leading block has in dynamic shared memory, where the tiles of distances lie at other times.
__device__ inline Room room_of(const Memory &memory, int64_t pool) {
  Room room = {};
  room.capacity = sorted_at_once(pool);
  room.keys = reinterpret_cast<uint64_t *>(dynamic_shared());
  room.items = reinterpret_cast<uint32_t *>(room.keys + room.capacity);
  double *const sums = reinterpret_cast<double *>(dynamic_shared() + sorting_bytes(pool));
  for (int n = 0; n < 2; ++n) room.sums[n] = pool <= kSumsInShared ? sums + n * pool : memory.sums[n];
  return room;
}

// The pool of a row, as Memory holds it, and what its sums say.
struct PoolSums {
  int32_t size, k0, K;  // of the warm start; the first maximiser without geometry
};

__device__ inline PoolSums weigh(const Parameters &P, float top, int32_t size, const Memory &memory, const Room &room,
                                 BlockScratch &scratch) {
#pragma unroll 1
  for (int32_t i = own_index(); i < size; i += block_size()) {
    memory.tokens[i] = room.keys[i];
    const double a = log_weight(logit_of(room.keys[i]), top, P.selection), p = weight(a);
    memory.a[i] = a;
    memory.p[i] = p;
    room.sums[0][i] = p;
    room.sums[1][i] = p * (P.lam * a);
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

// A row from its pool to its answer, by a team's first block.
__device__ inline void answer_row(const Call &call, int64_t row, const Memory &memory, Team &team, Distances &distances,
                                  BlockScratch &scratch) {
  const RowState &state = call.workspace.rows[row];
  const Parameters P = state.parameters;
  const int32_t most = static_cast<int32_t>(pool_size(call.options, call.inputs.vocab));
  const Room room = room_of(memory, most);
  const LogitRow logits(call, row);
  PoolTaker taker(logits, state.top, most, room.keys, room.capacity, memory.groups, scratch);
  const PoolSums pool = weigh(P, state.top, taker.run(), memory, room, scratch);

  topw_report report = {TOPW_POOL, pool.size, 0, 0, 0, 0};
  Kept kept = {room.keys, pool.K, P.scale >= 0 && pool.K <= pool.k0};  // T2
  if (!kept.certified) {
    Alternation alternation(call, P, memory, pool.size, room, team, distances, scratch);
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

// What a block does that does not lead: its share of every job, until it is sent home.
__device__ inline void follow(const Memory &memory, Team &team, Distances &distances) {
  for (;;) {
    team.barrier();
    const Job job = {__ldcg(&memory.job->kind), __ldcg(&memory.job->fresh), __ldcg(&memory.job->rows),
                     __ldcg(&memory.job->cols)};
    if (job.kind == 0) return;
    distances.run(job);
  }
}

}  // namespace crop

// Bytes of dynamic shared memory.
inline size_t geometry_shared_bytes(const topw_cuda_shape &shape) {
  const int64_t pool = crop::pool_size(shape.options, shape.vocab);
  int64_t leading = crop::sorting_bytes(pool);
  if (pool <= crop::kSumsInShared) leading += 2 * pool * static_cast<int64_t>(sizeof(double));
  const int64_t tiles = shape.options.metric == TOPW_UNIFORM ? 0 : crop::tile_bytes(kGeometryThreads);
  return static_cast<size_t>(leading > tiles ? leading : tiles);
}

__global__ void __launch_bounds__(kGeometryThreads, 1) geometry(const __grid_constant__ Call call) {
  const uint32_t open_rows = __ldcg(&call.workspace.control->open_count);
  if (open_rows == 0) return;
  TOPW_SHARED(BlockScratch, scratch);
  crop::Team team(call, open_rows);
  const crop::Memory memory =
      crop::memory_of_team(call.workspace.team_scratch, call.inputs.batch,
                           crop::pool_size(call.options, call.inputs.vocab), call.groups, team.index(), team.count());
  crop::Distances distances(call, memory, team);
  if (team.rank() == 0) {
    for (uint32_t n = static_cast<uint32_t>(team.index()); n < open_rows; n += static_cast<uint32_t>(team.count())) {
      crop::answer_row(call, __ldcg(call.workspace.open_rows + n), memory, team, distances, scratch);
      __syncthreads();  // the next row uses the same memory
    }
    if (own_index() == 0) memory.job->kind = 0;
    team.barrier();
  } else {
    crop::follow(memory, team, distances);
  }
  crop::leave(call, team.count());
}

}  // namespace topw
#endif
