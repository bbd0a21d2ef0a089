// Edited and masked logits on the device: the caller's, with patches for edited groups.
#ifndef TOPW_CUDA_LOGITS_H
#define TOPW_CUDA_LOGITS_H

#include "../native/half.h"
#include "workspace.h"

namespace topw {

struct Float16 {
  uint16_t bits;
};
struct Bfloat16 {
  uint16_t bits;
};

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(Float16 value) { return from_float16(value.bits); }
__device__ __forceinline__ float to_float(Bfloat16 value) { return from_bfloat16(value.bits); }

__device__ __forceinline__ uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

// A key that sorts values in descending order; -0 equals 0.
__device__ __forceinline__ uint32_t descending_key(float value) {
  const uint32_t bits = bits_of(value + 0.0f);
  return bits >> 31 ? bits : bits ^ 0x7fffffffu;
}

__device__ __forceinline__ float value_of_key(uint32_t key) {
  return float_of_bits(key >> 31 ? key : key ^ 0x7fffffffu);
}

// Sorts ascending as (logit descending, id ascending).
__device__ __forceinline__ uint64_t token_key(float logit, int32_t id) {
  return static_cast<uint64_t>(descending_key(logit)) << 32 | static_cast<uint32_t>(id);
}
__device__ __forceinline__ float logit_of(uint64_t key) { return value_of_key(static_cast<uint32_t>(key >> 32)); }
__device__ __forceinline__ int32_t id_of(uint64_t key) { return static_cast<int32_t>(key & 0xffffffffu); }

// A row's mask (topw_inputs), whose bits are read with the logits. Keeps no address, which would cost two registers.
class Mask {
 public:
  __device__ Mask(const Call &call, int64_t row) : call_(call), row_(row) {}

  __device__ bool exists() const { return call_.inputs.words > 0; }
  // The bits from token `id` < vocab to the end of its word, the lowest first. Requires a mask.
  __device__ uint32_t from(int32_t id) const {
    const int32_t *const words = call_.inputs.allowed + row_ * call_.inputs.words;
    return static_cast<uint32_t>(__ldg(words + id / 32)) >> (id % 32);
  }

 private:
  const Call &call_;
  const int64_t row_;
};

constexpr int kPatched = 3;

// Two undecoded logits of a row; their number, or kPatched.
template <class Logit>
struct Two {
  Logit raw[2];
  float2 patched;
  int there;
};

// For all steps after the pass over the logits. Any logits type.
class LogitRow {
 public:
  __device__ LogitRow(const Call &call, int64_t row)
      : type_(call.logits_type),
        raw_(static_cast<const unsigned char *>(static_cast<const void *>(call.inputs.logits)) +
             row * call.inputs.vocab * (call.logits_type == TOPW_FLOAT32 ? 4 : 2)),
        patch_of_(call.inputs.edits > 0 ? call.workspace.patch_of + row * call.groups : nullptr),
        patches_(call.workspace.patches + row * call.patch_slots * kGroup),
        maxima_(call.workspace.maxima + row * call.padded_groups),
        mask_(call, row),
        vocab_(static_cast<int32_t>(call.inputs.vocab)),
        groups_(static_cast<int32_t>(call.groups)) {}

  __device__ int32_t vocab() const { return vocab_; }
  __device__ int32_t groups() const { return groups_; }

  // The largest logit of a group.
  __device__ float maximum(int32_t group) const { return __ldcg(maxima_ + group); }

  // -inf after the last token, up to the end of its group.
  __device__ float at(int32_t id) const {
    return id < vocab_ && allows(id) ? edited_at(id) : -static_cast<float>(INFINITY);
  }

  // Slot of a group's patch; negative: none.
  __device__ int32_t slot(int32_t group) const { return patch_of_ ? __ldcg(patch_of_ + group) : -1; }

  // Logits 4 * quarter to 4 * quarter + 3 of a group; one load if aligned.
  __device__ float4 four(int32_t group, int32_t quarter, int32_t slot) const {
    float4 four = edited_four(group, quarter, slot);
    const int32_t first = group * kGroup + 4 * quarter;
    if (!mask_.exists() || first >= vocab_) return four;
    const uint32_t bits = mask_.from(first);
    const float nothing = -static_cast<float>(INFINITY);
    if (!(bits & 1)) four.x = nothing;
    if (!(bits & 2)) four.y = nothing;
    if (!(bits & 4)) four.z = nothing;
    if (!(bits & 8)) four.w = nothing;
    return four;
  }

  // Logits lane and lane + 32 of a group, by a whole warp, before the mask: ask `allows` for the few of interest.
  // Separate load and decode keep several loads in flight.
  template <class Logit>
  __device__ Two<Logit> load_two(int32_t group, int lane) const {
    const int32_t slot = patch_of_ ? __ldcg(patch_of_ + group) : -1, first = group * kGroup + lane;
    Two<Logit> two = {};
    two.there = first + kGroup / 2 < vocab_ ? 2 : first < vocab_ ? 1 : 0;
    if (slot >= 0) {
      const float *const patch = patches_ + static_cast<int64_t>(slot) * kGroup + lane;
      two.patched = {__ldcg(patch), __ldcg(patch + kGroup / 2)};
      two.there = kPatched;
      return two;
    }
    const Logit *const from = reinterpret_cast<const Logit *>(raw_) + first;
    if (two.there > 0) two.raw[0] = from[0];
    if (two.there > 1) two.raw[1] = from[kGroup / 2];
    return two;
  }
  template <class Logit>
  __device__ static float2 value_of(const Two<Logit> &two) {
    if (two.there == kPatched) return two.patched;
    const float nothing = -static_cast<float>(INFINITY);
    return {two.there > 0 ? to_float(two.raw[0]) : nothing, two.there > 1 ? to_float(two.raw[1]) : nothing};
  }

  // Whether the mask, if any, allows a token of the vocabulary.
  __device__ bool allows(int32_t id) const { return !mask_.exists() || mask_.from(id) & 1; }

 private:
  __device__ float edited_at(int32_t id) const {
    const int32_t slot = patch_of_ ? __ldcg(patch_of_ + id / kGroup) : -1;
    if (slot >= 0) return __ldcg(patches_ + static_cast<int64_t>(slot) * kGroup + id % kGroup);
    return id < vocab_ ? raw(id) : -static_cast<float>(INFINITY);
  }

  __device__ float4 edited_four(int32_t group, int32_t quarter, int32_t slot) const {
    if (slot >= 0)
      return __ldcg(reinterpret_cast<const float4 *>(patches_ + static_cast<int64_t>(slot) * kGroup) + quarter);
    const int32_t first = group * kGroup + 4 * quarter;
    const unsigned char *const from = raw_ + static_cast<int64_t>(first) * (type_ == TOPW_FLOAT32 ? 4 : 2);
    const bool aligned = reinterpret_cast<uintptr_t>(from) % (type_ == TOPW_FLOAT32 ? 16 : 8) == 0;
    if (!aligned || first + 4 > vocab_) return four_apart(first);
    if (type_ == TOPW_FLOAT32) return *reinterpret_cast<const float4 *>(from);
    const uint64_t all = *reinterpret_cast<const uint64_t *>(from);
    const auto one = [&](int n) {
      const uint16_t bits = static_cast<uint16_t>(all >> (16 * n));
      return type_ == TOPW_FLOAT16 ? from_float16(bits) : from_bfloat16(bits);
    };
    return {one(0), one(1), one(2), one(3)};
  }

  __device__ TOPW_OUT_OF_LINE float4 four_apart(int32_t first) const {
    return {edited_at(first), edited_at(first + 1), edited_at(first + 2), edited_at(first + 3)};
  }

  __device__ float raw(int32_t id) const {
    if (type_ == TOPW_FLOAT32) return reinterpret_cast<const float *>(raw_)[id];
    const uint16_t bits = reinterpret_cast<const uint16_t *>(raw_)[id];
    return type_ == TOPW_FLOAT16 ? from_float16(bits) : from_bfloat16(bits);
  }

  int32_t type_;
  const unsigned char *raw_;
  const int32_t *patch_of_;
  const float *patches_, *maxima_;
  const Mask mask_;
  int32_t vocab_, groups_;
};

}  // namespace topw
#endif
