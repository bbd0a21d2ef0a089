// The pass over all logits: maxima of groups of 64, the mask and the edits. One chunk of a row per block.
#ifndef TOPW_CUDA_CHUNK_CUH
#define TOPW_CUDA_CHUNK_CUH

#include "block.h"
#include "logits.h"

namespace topw {

constexpr int32_t kNoEdit = INT32_MAX;
constexpr int kLoadsAtOnce = 4;  // per thread, 16 bytes each: enough to hide memory latency

// Groups [first, last) of a row.
struct Chunk {
  int64_t row;
  int32_t first, last;
};

template <class Logit>
__device__ const Logit *raw_row(const Call &call, int64_t row) {
  return reinterpret_cast<const Logit *>(call.inputs.logits) + row * call.inputs.vocab;
}

template <class Logit>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(Logit);
  Logit logits[kSize];
};

// +inf if there is a NaN or +inf, which makes the row invalid.
__device__ __forceinline__ float or_invalid(float logit) {
  return logit < static_cast<float>(INFINITY) ? logit : static_cast<float>(INFINITY);
}

// allowed: a bit for each logit.
template <class Logit, bool kMasked>
__device__ __forceinline__ float largest_of(const uint4 &bytes, uint32_t allowed) {
  Pack<Logit> pack;
  memcpy(&pack, &bytes, sizeof pack);
  const float nothing = -static_cast<float>(INFINITY);
  float largest = nothing;
#pragma unroll
  for (int i = 0; i < Pack<Logit>::kSize; ++i) {
    const float logit = or_invalid(to_float(pack.logits[i]));
    largest = Larger()(!kMasked || allowed >> i & 1 ? logit : nothing, largest);
  }
  return largest;
}

// Maxima of complete, 16-byte aligned groups; neighbouring lanes share a group.
template <class Logit, bool kMasked>
__device__ void measure_packs(const Logit *raw, const Mask &mask, int32_t first, int32_t last, float *maxima) {
  constexpr int kLanes = kGroup / Pack<Logit>::kSize, kGroups = kWarp / kLanes;
  const int32_t stride = warps() * kGroups, of_lane = lane_index() / kLanes, place = lane_index() % kLanes;
#pragma unroll 1
  for (int32_t start = first + warp_index() * kGroups; start < last; start += kLoadsAtOnce * stride) {
    uint4 packs[kLoadsAtOnce];
    uint32_t allowed[kLoadsAtOnce] = {};
#pragma unroll
    for (int u = 0; u < kLoadsAtOnce; ++u) {
      const int32_t group = start + u * stride + of_lane, token = (group < last ? group : start) * kGroup;
      if (start + u * stride >= last) continue;  // for the whole warp
      packs[u] = __ldg(reinterpret_cast<const uint4 *>(raw + token) + place);
      if (kMasked) allowed[u] = mask.from(token + place * Pack<Logit>::kSize);
    }
#pragma unroll
    for (int u = 0; u < kLoadsAtOnce; ++u) {
      const int32_t group = start + u * stride + of_lane;
      if (start + u * stride >= last) break;  // for the whole warp
      const float largest = warp_reduce(largest_of<Logit, kMasked>(packs[u], allowed[u]), Larger(), kLanes);
      if (place == 0 && group < last) maxima[group] = largest;
    }
  }
}

// Maxima of any groups: one per warp, two logits per lane.
template <class Logit, bool kMasked>
__device__ void measure_loosely(const Logit *raw, const Mask &mask, int32_t vocab, int32_t first, int32_t last,
                                float *maxima) {
  const float nothing = -static_cast<float>(INFINITY);
#pragma unroll 1
  for (int32_t start = first + warp_index(); start < last; start += kLoadsAtOnce * warps()) {
    Logit logits[kLoadsAtOnce][2];
    uint32_t allowed[kLoadsAtOnce][2] = {};
#pragma unroll
    for (int u = 0; u < kLoadsAtOnce; ++u) {
      const int32_t group = start + u * warps(), id = (group < last ? group : start) * kGroup + lane_index();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t token = id + half * kWarp < vocab ? id + half * kWarp : 0;
        logits[u][half] = raw[token];
        if (kMasked) allowed[u][half] = mask.from(token);
      }
    }
#pragma unroll
    for (int u = 0; u < kLoadsAtOnce; ++u) {
      const int32_t group = start + u * warps(), id = group * kGroup + lane_index();
      if (group >= last) break;  // for the whole warp
      const auto of = [&](int half) {
        const bool counts = id + half * kWarp < vocab && (!kMasked || allowed[u][half] & 1);
        return counts ? or_invalid(to_float(logits[u][half])) : nothing;
      };
      const float here = of(0), there = of(1);
      const float largest = warp_reduce(Larger()(here, there), Larger());
      if (lane_index() == 0) maxima[group] = largest;
    }
  }
}

// Maxima of unedited groups, padded with -inf.
template <class Logit, bool kMasked>
__device__ void measure_chunk(const Call &call, const Chunk &chunk) {
  const Mask mask(call, chunk.row);
  const Logit *raw = raw_row<Logit>(call, chunk.row);
  float *maxima = call.workspace.maxima + chunk.row * call.padded_groups;
  const int32_t vocab = static_cast<int32_t>(call.inputs.vocab), whole = vocab / kGroup;
  int32_t packed = reinterpret_cast<uintptr_t>(raw) % 16 == 0 ? whole : chunk.first;
  packed = packed < chunk.last ? packed : chunk.last;
  measure_packs<Logit, kMasked>(raw, mask, chunk.first, packed, maxima);
  measure_loosely<Logit, kMasked>(raw, mask, vocab, packed, chunk.last, maxima);
  if (chunk.last == call.groups && own_index() < call.padded_groups - call.groups)
    maxima[call.groups + own_index()] = -static_cast<float>(INFINITY);
}

template <class Logit>
__device__ TOPW_OUT_OF_LINE void measure_masked_chunk(const Call &call, const Chunk &chunk) {
  measure_chunk<Logit, true>(call, chunk);
}

// Two copies of the code: rows without a mask take as long as if there were no masks.
template <class Logit>
__device__ __forceinline__ void measure_chunk(const Call &call, const Chunk &chunk) {
  if (call.inputs.words > 0)
    measure_masked_chunk<Logit>(call, chunk);
  else
    measure_chunk<Logit, false>(call, chunk);
}

// Rounds every operation, as on a CPU: edited logits are the same everywhere.
__device__ __forceinline__ float edited(float logit, float penalty, float bias) {
  return __fadd_rn(logit > 0 ? __fdiv_rn(logit, penalty) : __fmul_rn(logit, penalty), bias);
}

// A row's edits within a chunk, applied in a patch (copy) of each edited group. Of repeated ids, the last applies to
// the raw logit.
template <class Logit>
class ChunkEdits {
 public:
  // Starts loading the edits, which arrive while measure_chunk runs.
  __device__ ChunkEdits(const Call &call, const Chunk &chunk, int32_t *slots)
      : call_(call),
        chunk_(chunk),
        mask_(call, chunk.row),
        slots_(slots),
        edits_(static_cast<int32_t>(call.inputs.edits)),
        first_id_(own_index() < edits_ ? call.inputs.edit_ids[chunk.row * edits_ + own_index()] : -1) {}

  // Corrects measure_chunk's maxima. `slots`: shared memory for the chunk's groups.
  __device__ void apply() {
    const int32_t groups = chunk_.last - chunk_.first;
#pragma unroll 1
    for (int32_t g = own_index(); g < groups; g += block_size()) slots_[g] = kNoEdit;
    __syncthreads();
    const int wrong = find();
    const bool some = __syncthreads_or(wrong != 0);
#pragma unroll 1
    for (int32_t g = own_index(); g < groups; g += block_size())
      call_.workspace.patch_of[chunk_.row * call_.groups + chunk_.first + g] = slots_[g] == kNoEdit ? -1 : slot(g);
    if (!some) return;
    for_patched([&](int32_t g, int32_t k) { marks(g)[k] = -1; });
    __syncthreads();
    mark_last();
    __syncthreads();
    write_patches();
    if (!__syncthreads_or(wrong > 1)) return;
    if (own_index() == 0)
      call_.workspace.maxima[chunk_.row * call_.padded_groups + chunk_.first] = static_cast<float>(INFINITY);
  }

 private:
  // See patch_slots_of.
  __device__ int32_t slot(int32_t g) const { return edits_ <= call_.groups ? slots_[g] : chunk_.first + g; }

  __device__ float *patch(int32_t g) const {
    return call_.workspace.patches + (chunk_.row * call_.patch_slots + slot(g)) * kGroup;
  }
  __device__ int32_t *marks(int32_t g) const { return reinterpret_cast<int32_t *>(patch(g)); }

  // An edit's token, relative to the chunk; -1 if outside.
  __device__ int32_t token(int32_t e) const {
    const int64_t id = e == own_index() ? first_id_ : call_.inputs.edit_ids[chunk_.row * edits_ + e];
    const int64_t from = static_cast<int64_t>(chunk_.first) * kGroup, to = static_cast<int64_t>(chunk_.last) * kGroup;
    return id >= from && id < to && id < call_.inputs.vocab ? static_cast<int32_t>(id - from) : -1;
  }

  // Stores the lowest edit of every group. Returns 0 if this thread found none, 2 if a penalty invalidates the row.
  __device__ int find() {
    int found = 0;
#pragma unroll 1
    for (int32_t e = own_index(); e < edits_; e += block_size()) {
      const int32_t at = token(e);
      if (at < 0) continue;
      atomicMin(&slots_[at / kGroup], e);
      const bool valid = call_.inputs.edit_penalty[chunk_.row * edits_ + e] > 0;
      found = valid && found < 2 ? 1 : 2;
    }
    return found;
  }

  // Calls visit(group, place) for every patched logit; one group per warp.
  template <class Visit>
  __device__ void for_patched(Visit visit) {
#pragma unroll 1
    for (int32_t g = warp_index(); g < chunk_.last - chunk_.first; g += warps()) {
      if (slots_[g] == kNoEdit) continue;
      for (int32_t k = lane_index(); k < kGroup; k += kWarp) visit(g, k);
    }
  }

  // Writes each token's last edit at its place in the patch.
  __device__ void mark_last() {
#pragma unroll 1
    for (int32_t e = own_index(); e < edits_; e += block_size()) {
      const int32_t at = token(e);
      if (at >= 0) atomicMax(&marks(at / kGroup)[at % kGroup], e);
    }
  }

  __device__ void write_patches() {
    const Logit *raw = raw_row<Logit>(call_, chunk_.row);
#pragma unroll 1
    for (int32_t g = warp_index(); g < chunk_.last - chunk_.first; g += warps()) {
      if (slots_[g] == kNoEdit) continue;
      float largest = -static_cast<float>(INFINITY);
      for (int32_t k = lane_index(); k < kGroup; k += kWarp) {
        const float logit = edited_token(raw, (chunk_.first + g) * kGroup + k, __ldcg(marks(g) + k));
        patch(g)[k] = logit;
        largest = Larger()(or_invalid(logit), largest);
      }
      largest = warp_reduce(largest, Larger());
      if (lane_index() == 0)
        call_.workspace.maxima[chunk_.row * call_.padded_groups + chunk_.first + g] = largest;
    }
  }

  __device__ float edited_token(const Logit *raw, int32_t id, int32_t edit) const {
    if (id >= call_.inputs.vocab || (mask_.exists() && !(mask_.from(id) & 1))) return -static_cast<float>(INFINITY);
    const float logit = to_float(raw[id]);
    if (edit < 0) return logit;
    const int64_t e = chunk_.row * edits_ + edit;
    return edited(logit, call_.inputs.edit_penalty[e], call_.inputs.edit_bias[e]);
  }

  const Call &call_;
  const Chunk &chunk_;
  const Mask mask_;
  int32_t *const slots_;
  const int32_t edits_;
  const int64_t first_id_;
};

__device__ inline void clear_keep_mask(const Call &call, const Chunk &chunk) {
  const int64_t vocab = call.inputs.vocab, from = static_cast<int64_t>(chunk.first) * kGroup;
  const int64_t end = static_cast<int64_t>(chunk.last) * kGroup, to = end < vocab ? end : vocab;
  uint8_t *const mask = call.outputs.keep_mask + chunk.row * vocab;
  const uintptr_t start = reinterpret_cast<uintptr_t>(mask + from);
  int64_t whole = (to - from) / 16 * 16;
  if (start % 16 != 0) whole = 0;
#pragma unroll 1
  for (int64_t i = 16 * own_index(); i < whole; i += 16 * block_size())
    *reinterpret_cast<uint4 *>(mask + from + i) = uint4{0, 0, 0, 0};
#pragma unroll 1
  for (int64_t i = from + whole + own_index(); i < to; i += block_size()) mask[i] = 0;
}

}  // namespace topw
#endif
