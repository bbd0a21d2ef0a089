// Shared by the kernels of a step: the call, and scratch memory.
//
// Two launches answer a batch. `certify` (certify.cuh) reads all logits, answers rows that are invalid or certifiable,
// and appends the others to `open_rows` in any order. `geometry` (geometry.cuh) answers those through finish_row
// (finish.h) and zeroes the control memory; it returns at once if open_count is 0.
//
// certify writes for an open row, before its number is in open_rows[0 .. control->open_count):
//   rows[row]             parameters (valid, not greedy), the largest logit `top`, and for a rule other than Top-W its
//                         plan
//   maxima[row][group]    the largest of each 64 logits, edited and masked; finite or -inf
//   LogitRow (logits.h)   the edited and masked logits, through patch_of, patches and the caller's mask
//   unit_tops, unit_sums  for `mass`: weights of each unit, in units of its largest logit
// and zeroes keep_mask[row].
//
// launch.cu uses from geometry.cuh:
//   kGeometryThreads                        threads of a block; the emulation may use fewer
//   geometry(Call call)                     for any number of blocks
//   geometry_shared_bytes(shape, threads)   dynamic, at most kSharedOnRequest
// and from team_scratch.h the global memory of a row's leader.
#ifndef TOPW_CUDA_WORKSPACE_H
#define TOPW_CUDA_WORKSPACE_H

#include "../native/parameters.h"
#include "platform.h"
#include "rules.h"
#include "team_scratch.h"
#include "topw_cuda.h"

namespace topw {

constexpr int kGroup = 64;            // logits that share a maximum
constexpr int64_t kMostVocab = 524288;
constexpr int64_t kMostHidden = 8192;
constexpr int64_t kMostPool = 4096;
constexpr int64_t kMostNeighbours = 16;
constexpr int64_t kMassUnit = 1024;   // logits per partial sum of weights, for `mass`

// Zero between steps: the first bytes of the control memory, before the rows' tickets.
struct Control {
  uint32_t open_count;   // rows that certify left open
  // Used by geometry; its last block zeroes them and open_count.
  uint32_t leaders;      // blocks that asked to lead
  uint32_t next_row;     // the next open row to take
  uint32_t rows_done;
  uint32_t blocks_left;
  Board boards[kTeams];
};

// A row after certify.
struct RowState {
  Parameters parameters;
  float top;           // the largest logit
  RulePlan plan;       // unless the rule is Top-W
};

// A unit's sums, for rules that need numbers of the whole row (statistics.cuh).
struct UnitNumbers {
  double sums[4];
};

struct Workspace {
  Control *control;
  uint32_t *tickets;   // [batch] zero between launches
  int32_t *open_rows;  // [batch]
  RowState *rows;      // [batch]
  float *maxima;       // [batch, padded_groups]
  int32_t *patch_of;   // [batch, groups] slot of an edited group, or -1; NULL without edits
  float *patches;      // [batch, patch_slots, kGroup]
  float *unit_tops;    // [batch, units]
  double *unit_sums;   // [batch, units]
  UnitNumbers *unit_numbers;  // [batch, units]
  unsigned char *team_scratch;  // see team_scratch.h
};

// The kernels' argument, by value.
struct Call {
  topw_options options;  // top_m at most vocab
  topw_table table;
  topw_inputs inputs;
  topw_outputs outputs;
  Workspace workspace;
  int64_t groups, padded_groups;  // of kGroup logits in a row; padded to a multiple of 4
  int64_t patch_slots;
  int32_t logits_type;
  int32_t units;                  // of kMassUnit logits in a row
  int32_t chunk_groups, chunks;   // certify: groups per chunk, chunks per row
  int32_t best_groups;            // certify: number of maxima by which it finds the best tokens; 0: none
  double log_vocab;
};

inline int64_t groups_of(int64_t vocab) { return (vocab + kGroup - 1) / kGroup; }
inline int64_t padded_groups_of(int64_t vocab) { return (groups_of(vocab) + 3) / 4 * 4; }
inline int64_t units_of(int64_t vocab) { return (vocab + kMassUnit - 1) / kMassUnit; }
// A group's slot is the lowest number of its edits, or the group's number if groups are fewer.
inline int64_t patch_slots_of(int64_t vocab, int64_t edits) {
  return edits < groups_of(vocab) ? edits : groups_of(vocab);
}

inline int64_t control_bytes(const topw_cuda_shape &shape) {
  const int64_t bytes = static_cast<int64_t>(sizeof(Control) + sizeof(uint32_t) * shape.batch);
  return (bytes + 255) / 256 * 256;
}

// Parts of control and scratch memory. Both may be NULL to query only the `bytes` of scratch.
inline Workspace lay_out(const topw_cuda_shape &shape, void *control, void *memory, int64_t *bytes) {
  unsigned char *const start = static_cast<unsigned char *>(memory);
  int64_t at = 0;
  const auto take = [&](int64_t size) {
    unsigned char *const here = start ? start + at : nullptr;
    at += (size + 255) / 256 * 256;
    return here;
  };
  const int64_t batch = shape.batch, floats = sizeof(float);
  Workspace w = {};
  w.control = static_cast<Control *>(control);
  w.tickets = control ? reinterpret_cast<uint32_t *>(w.control + 1) : nullptr;
  w.open_rows = reinterpret_cast<int32_t *>(take(batch * floats));
  w.rows = reinterpret_cast<RowState *>(take(batch * static_cast<int64_t>(sizeof(RowState))));
  w.maxima = reinterpret_cast<float *>(take(batch * padded_groups_of(shape.vocab) * floats));
  if (shape.edits > 0) {
    w.patch_of = reinterpret_cast<int32_t *>(take(batch * groups_of(shape.vocab) * floats));
    w.patches = reinterpret_cast<float *>(take(batch * patch_slots_of(shape.vocab, shape.edits) * kGroup * floats));
  }
  const int64_t units = batch * units_of(shape.vocab);
  w.unit_tops = reinterpret_cast<float *>(take(units * floats));
  w.unit_sums = reinterpret_cast<double *>(take(units * static_cast<int64_t>(sizeof(double))));
  w.unit_numbers = reinterpret_cast<UnitNumbers *>(take(units * static_cast<int64_t>(sizeof(UnitNumbers))));
  w.team_scratch = take(team_scratch_bytes(shape));
  *bytes = at;
  return w;
}

}  // namespace topw
#endif
