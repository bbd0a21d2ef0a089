// The distance part of `geometry`, for test_geometry_distances.py: rows to a set, measured by cooperating blocks.

#include "geometry.cuh"

namespace topw {
namespace {

// The first block to arrive leads; the others help.
__global__ void measure(const Call call, const crop::Memory memory, const crop::Job given) {
  TOPW_SHARED(int32_t, word);
  TOPW_SHARED(crop::Claim, claim);
  Control *const control = call.workspace.control;
  crop::Job job = given;
  crop::Distances distances(call, memory);
  if (own_index() == 0) word = static_cast<int32_t>(atomicAdd(&control->leaders, 1u));
  __syncthreads();
  if (word == 0) {
    crop::Leader leader(&control->boards[0], memory.job, claim);
    const auto run = [&](crop::Work work) {
      job.work = work;
      leader.run(job, distances.items(job), [&](int32_t item) { distances.work(job, item); });
    };
    run(crop::Work::measure_lengths);
    job.pieces = distances.how_to_cut(job, static_cast<int32_t>(gridDim.x));
    run(crop::Work::compare_pairs);
    run(crop::Work::settle_rows);
    if (own_index() == 0) atomicAdd(&control->rows_done, 1u);
  } else {
    for (;;) {
      __syncthreads();
      if (own_index() == 0) claim = crop::claim_item(&control->boards[0]);
      __syncthreads();
      while (claim.item >= 0) {
        const crop::Job claimed = crop::load_written(memory.job);
        crop::work_off(&control->boards[0], claim, [&](int32_t item) { distances.work(claimed, item); });
      }
      if (__syncthreads_or(own_index() == 0 && crop::polled(&control->rows_done) > 0)) break;
      pause();
    }
  }
  crop::leave(call, 1);
}

}  // namespace
}  // namespace topw

using namespace topw;

extern "C" {

TOPW_EXPORT const char *probe_error(void) { return emulator::error(); }

/* Distances of tokens rows [row_count] to the set cols [col_count], into distance [row_count]. Token n of a table is
 * place n of the pool. `pairs_room`: floats for sums of pairs, at least row_count * col_count. */
TOPW_EXPORT int probe_distances(uint64_t seed, unsigned threads, unsigned blocks, int32_t metric, int32_t knn_k,
                                const topw_table *table, int32_t *rows, int32_t row_count, int32_t *cols,
                                int32_t col_count, int64_t pairs_room, float *distance) {
  emulator::settings = {seed, threads, blocks};
  const int64_t tokens = table->tokens;
  crop::Memory memory = {};
  const int64_t bytes = crop::lay_out_memory(nullptr, tokens, 1, &memory);
  unsigned char *const room = static_cast<unsigned char *>(aligned_alloc(128, static_cast<size_t>(bytes)));
  float *const pairs = static_cast<float *>(malloc(static_cast<size_t>(pairs_room) * sizeof(float)));
  crop::lay_out_memory(room, tokens, 1, &memory);
  memory.pairs = pairs;
  memory.pairs_room = pairs_room;
  for (int32_t n = 0; n < tokens; ++n) memory.tokens[n] = token_key(0.0f, n);
  memory.rows = rows;
  memory.cols = cols;

  Control control = {};
  Call call = {};
  call.options = {tokens, 1, metric, knn_k};
  call.table = *table;
  call.workspace.control = &control;
  const size_t shared = static_cast<size_t>(crop::tile_bytes(threads));
  crop::Job job = {};
  job.tokens = static_cast<int32_t>(tokens);
  job.rows = row_count, job.cols = col_count;
  const int failed = launch(Launch{blocks, threads, shared, false, nullptr}, measure, call, memory, job);
  for (int32_t n = 0; n < row_count; ++n) distance[n] = memory.distance[rows[n]];
  free(room);
  free(pairs);
  const Control zero = {};
  const bool left = memcmp(&control, &zero, sizeof zero) != 0;
  return failed ? failed : left ? -1 : 0;
}

}  // extern "C"
