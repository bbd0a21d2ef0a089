// One part of `geometry` alone, for test_geometry_distances.py: distances of rows to a set, measured by a team.

#include "geometry.cuh"

namespace topw {
namespace {

__global__ void measure(const Call call, const crop::Memory memory, const crop::Job job) {
  crop::Team team(call, 1);
  crop::Distances distances(call, memory, team);
  distances.run(job);
  crop::leave(call, team.count());
}

}  // namespace
}  // namespace topw

using namespace topw;

extern "C" {

TOPW_EXPORT const char *probe_error(void) { return emulator::error(); }

/* Distances of the tokens rows [row_count] to the set of the tokens cols [col_count], into distance [row_count]. Token n
 * of a table is place n of the pool. `pairs_room`: floats for sums of pairs, at least row_count * col_count. */
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
  for (int32_t n = 0; n < tokens; ++n) {
    memory.tokens[n] = token_key(0.0f, n);
    memory.fresh[n] = n;
  }
  memory.rows = rows;
  memory.cols = cols;

  Control control = {};
  Call call = {};
  call.options = {tokens, 1, metric, knn_k};
  call.table = *table;
  call.workspace.control = &control;
  const size_t shared = static_cast<size_t>(crop::tile_bytes(threads));
  const crop::Job job = {1, static_cast<int32_t>(tokens), row_count, col_count};
  const int failed = launch(Launch{blocks, threads, shared, true, nullptr}, measure, call, memory, job);
  for (int32_t n = 0; n < row_count; ++n) distance[n] = memory.distance[rows[n]];
  free(room);
  free(pairs);
  const bool left = control.open_count || control.geometry_ticket || control.teams[0][0];
  return failed ? failed : left ? -1 : 0;
}

}  // extern "C"
