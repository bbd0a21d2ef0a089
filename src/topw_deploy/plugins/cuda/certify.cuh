// The first launch: reads all logits and answers every certifiable row. A row's last block continues with the row.
#ifndef TOPW_CUDA_CERTIFY_CUH
#define TOPW_CUDA_CERTIFY_CUH

#include "candidates.cuh"
#include "chunk.cuh"
#include "statistics.cuh"

namespace topw {

constexpr unsigned kCertifyThreads = 256;
constexpr unsigned kCertifyBlocks = 4;  // per multiprocessor, limited by registers; some have threads for only three

enum class Way : int32_t { invalid, keep_best, settle, open, rule };

struct RowPlan {  // in shared memory, from one thread to all
  Parameters P;
  RulePlan rule;  // unless Top-W
  Cooling selection;
  double gap;
  float edge;
  Way way;
};

// Reads the parameters: in the last warp, which waits for the fewest maxima.
__device__ __forceinline__ int32_t parameter_thread() { return block_size() - kWarp; }

// By parameter_thread, while the maxima load.
__device__ inline void take_parameters(const Call &call, int64_t row, const GivenParameters &given, RowPlan &plan) {
  const bool top_w = is_top_w(call.inputs, row), valid = plan.P.take(given) && (top_w || valid_rule(call.inputs, row));
  plan.way = !valid ? Way::invalid
             : plan.P.greedy ? Way::keep_best
             : !top_w ? Way::rule
             : (plan.P.c <= 0 && plan.P.scale >= 0) ? Way::keep_best
             : plan.P.scale < 0 ? Way::open : Way::settle;
  // The kept mass is at most the vocabulary's.
  plan.selection = cooling_of(plan.P.selection);
  if (plan.way == Way::settle) plan.gap = plan.P.lam > 0 ? plan.P.c / plan.P.lam * (1 + call.log_vocab) : 0;
}

__device__ inline void decide(float top, const Call &call, int64_t row, RowPlan &plan) {
  const float infinity = static_cast<float>(INFINITY);
  if (!(top < infinity) || top == -infinity) plan.way = Way::invalid;
  plan.edge = plan.way == Way::settle && plan.P.lam > 0 ? bound_below(top, plan.P, plan.gap) : -infinity;
  RowState &state = call.workspace.rows[row];
  state.parameters = plan.P;
  state.top = top;
}

__device__ inline void answer_invalid(const Call &call, int64_t row) {
  const topw_outputs &out = call.outputs;
  out.next_token[row] = -1;
  out.logprob[row] = 0;
  out.kept[row] = 0;
  out.certified[row] = 0;
  if (out.mass) out.mass[row] = 0;
  if (out.reports) out.reports[row] = {TOPW_INVALID, 0, 0, 0, 0, 0};
}

// The largest logit, lowest id if tied: a greedy row, or beta <= lam, where J never rises.
template <class Logit>
__device__ void keep_best(const LogitRow &logits, float top, const float *maxima, uint64_t *key,
                                 BlockScratch &scratch) {
  int32_t group = INT32_MAX;
#pragma unroll 1
  for (int32_t g = own_index(); g < logits.groups() && group == INT32_MAX; g += block_size())
    if (maxima[g] == top) group = g;
  group = block_reduce(group, Smaller(), scratch);
  if (warp_index() == 0) {
    const float2 two = LogitRow::value_of(logits.template load_two<Logit>(group, lane_index()));
    int32_t id = group * kGroup + lane_index();
    const bool first = two.x == top && logits.allows(id);
    const bool second = two.y == top && logits.allows(id + kGroup / 2);
    id = warp_reduce(first ? id : second ? id + kGroup / 2 : INT32_MAX, Smaller());
    if (lane_index() == 0) *key = token_key(top, id);
  }
  __syncthreads();
}

// Loads the row's maxima into shared memory, all loads before any use. Returns the largest.
__device__ inline float load_maxima(const Call &call, int64_t row, float *maxima) {
  constexpr int kTogether = 4;
  const float4 *const from = reinterpret_cast<const float4 *>(call.workspace.maxima + row * call.padded_groups);
  const int32_t fours = static_cast<int32_t>(call.padded_groups / 4);
  float largest = -static_cast<float>(INFINITY);
#pragma unroll 1
  for (int32_t first = own_index(); first < fours; first += kTogether * block_size()) {
    float4 loaded[kTogether];
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      const int32_t i = first + n * block_size();
      loaded[n] = __ldcg(from + (i < fours ? i : first));
    }
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      const float4 four = loaded[n];
      const int32_t i = first + n * block_size();
      if (i < fours) reinterpret_cast<float4 *>(maxima)[i] = four;
      largest = Larger()(largest, Larger()(Larger()(four.x, four.y), Larger()(four.z, four.w)));
    }
  }
  return largest;
}

// Makes the plan of the row's rule, for this launch and the second one. Ends with a barrier.
__device__ inline void plan_rule(const Call &call, int64_t row, float top, RowPlan &plan) {
  if (warp_index() == 0) {
    const Rule rule = known_rule(call.inputs, row);
    const RowNumbers numbers = added_units(call, row, plan.P, top, needs_of(rule));
    if (lane_index() == 0) {
      make_plan(rule, plan.P, top, numbers, plan.rule);
      call.workspace.rows[row].plan = plan.rule;
    }
  }
  __syncthreads();
}

// Leaves a row to the second launch. By one thread.
__device__ inline void open_row(const Call &call, int64_t row) {
  const uint32_t place = atomicAdd(&call.workspace.control->open_count, 1u);
  if (place < static_cast<uint32_t>(call.inputs.batch))  // else this launch was repeated without the second
    call.workspace.open_rows[place] = static_cast<int32_t>(row);
}

// Finishes a row with a rule other than Top-W. It is a separate function so that its variables do not push those of
// Top-W out of registers.
template <class Logit>
__device__ TOPW_OUT_OF_LINE void finish_or_open_rule(const Call &call, int64_t row, float top, RowPlan &plan,
                                                     float *maxima, CandidateLists &lists, BlockScratch &scratch) {
  CandidateRoom &room = *reinterpret_cast<CandidateRoom *>(dynamic_shared());
  const LogitRow logits(call, row);
  plan_rule(call, row, top, plan);
  Candidates<Logit> candidates(call, logits, plan.P, plan.selection, top, room, maxima, lists, scratch);
  Kept kept = {room.keys, 1, true};
  double *sums = reinterpret_cast<double *>(room.spare);
  if (plan.rule.limit == Limit::first) {
    keep_best<Logit>(logits, top, maxima, room.keys, scratch);
  } else {
    const auto crop = candidates.keep_by(plan.rule);
    kept = crop.kept;
    sums = crop.room;
  }
  if (kept.size > 0) {
    const topw_report report = {TOPW_CANDIDATES, candidates.found(), 0, 0, 0, 0};
    finish_row(call, row, plan.P, top, kept, report, sums, scratch);
  } else if (own_index() == 0) {
    open_row(call, row);
  }
}

// Finishes a row. Called by its last block.
template <class Logit>
__device__ void finish_or_open(const Call &call, int64_t row, const GivenParameters &given, CandidateLists &lists) {
  TOPW_SHARED(RowPlan, plan);
  TOPW_SHARED(BlockScratch, scratch);
  CandidateRoom &room = *reinterpret_cast<CandidateRoom *>(dynamic_shared());
  float *const maxima = reinterpret_cast<float *>(dynamic_shared() + sizeof(CandidateRoom));

  if (own_index() == parameter_thread()) take_parameters(call, row, given, plan);
  const float top = block_reduce(load_maxima(call, row, maxima), Larger(), scratch);
  if (own_index() == 0) decide(top, call, row, plan);
  __syncthreads();
  const LogitRow logits(call, row);
  const Way way = plan.way;
  if (way == Way::invalid) {
    if (own_index() == 0) answer_invalid(call, row);
    return;
  }
  if (way == Way::rule) return finish_or_open_rule<Logit>(call, row, top, plan, maxima, lists, scratch);
  Candidates<Logit> candidates(call, logits, plan.P, plan.selection, top, room, maxima, lists, scratch);
  bool settled = way == Way::settle && candidates.settle(plan.edge);
  Kept kept = {candidates.keys(), candidates.kept(), true};
  if (way == Way::keep_best) {
    keep_best<Logit>(logits, top, maxima, room.keys, scratch);
    kept = {room.keys, 1, true};
    settled = true;
  }
  if (settled) {
    const topw_report report = {plan.P.greedy ? TOPW_GREEDY : TOPW_CANDIDATES, candidates.found(), 0, 0, 0, 0};
    finish_row(call, row, plan.P, top, kept, report, candidates.sums(), scratch, candidates.weighed());
  } else if (own_index() == 0) {
    open_row(call, row);
  }
}

// Whether this block is the row's last, which then sees the others' writes.
__device__ inline bool last_of_row(const Call &call, int64_t row) {
  TOPW_SHARED(uint32_t, last);
  __syncthreads();
  if (call.chunks == 1) return true;
  if (own_index() == 0) {
    last = take_ticket(&call.workspace.tickets[row]) == static_cast<uint32_t>(call.chunks) - 1;
    if (last) call.workspace.tickets[row] = 0;
  }
  __syncthreads();
  return last;
}

// Blocks: `chunks` for every row, row by row.
template <class Logit>
__global__ void __launch_bounds__(kCertifyThreads, kCertifyBlocks) certify(const __grid_constant__ Call call) {
  let_next_begin();
  TOPW_SHARED(CandidateLists, lists);
  const int64_t row = blockIdx.x / static_cast<unsigned>(call.chunks);
  const bool other_rule = !is_top_w(call.inputs, row);
  const int32_t first = static_cast<int32_t>(blockIdx.x % static_cast<unsigned>(call.chunks)) * call.chunk_groups;
  const int32_t end = first + call.chunk_groups, groups = static_cast<int32_t>(call.groups);
  const Chunk chunk = {row, first, end < groups ? end : groups};
  if (call.inputs.edits > 0) {
    // Also holds the row's maxima later: has room for all its groups.
    ChunkEdits<Logit> edits(call, chunk, reinterpret_cast<int32_t *>(dynamic_shared() + sizeof(CandidateRoom)));
    measure_chunk<Logit>(call, chunk);
    edits.apply();
  } else {
    measure_chunk<Logit>(call, chunk);
  }
  if (call.outputs.keep_mask) clear_keep_mask(call, chunk);
  if (call.outputs.mass) weigh_chunk(call, chunk);
  if (other_rule) measure_units(call, chunk);
  GivenParameters given = {};  // loaded now, available with the ticket
  if (own_index() == parameter_thread()) given = given_parameters(call.inputs, row);
  if (last_of_row(call, row)) finish_or_open<Logit>(call, row, given, lists);
}

}  // namespace topw
#endif
