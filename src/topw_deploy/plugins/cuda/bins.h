// Selection from a whole row without sorting it: tokens are counted and weighed by eight bits of their key at a time,
// from the highest bits down. All blocks fill the bins; a leading block decides.
#ifndef TOPW_CUDA_BINS_H
#define TOPW_CUDA_BINS_H

#include "pairs.h"
#include "pool.h"

namespace topw::crop {

constexpr uint64_t kLastKey = ~uint64_t{0};
constexpr int64_t kBinBytes = kSteps * static_cast<int64_t>(sizeof(uint64_t));  // of dynamic shared memory
constexpr int kFirstShift = 56;

// Distances are not negative, so their bits sort like their values.
__device__ inline uint64_t distance_key(float logit, const Choice &choice) {
  const double distance = fabs(-log_weight(logit, choice.top, choice.temperature) - choice.center);
  uint64_t bits;
  memcpy(&bits, &distance, sizeof bits);
  return bits;
}

// The tokens that memory.bins chooses, for one item.
class BinReader : public PoolReader {
 public:
  __device__ BinReader(const LogitRow &row, const Job &job, const Memory &memory, BlockScratch &scratch)
      : PoolReader(row, job, memory, scratch),
        bins_(load_written(memory.bins)),
        cooling_(cooling_of(bins_.temperature)),
        weights_(reinterpret_cast<uint64_t *>(dynamic_shared())) {}

  // Adds the item's tokens to the bins after memory.found, and in memory.weights.
  __device__ TOPW_OUT_OF_LINE void fill(int32_t item) {
    for (int32_t b = own_index(); b < kSteps; b += block_size()) scratch_.bins[b] = 0, weights_[b] = 0;
    __syncthreads();
    const Batch batch = read(item);
    for_each_token(batch, [&](int, float logit, int32_t id) { add(logit, id); });
    __syncthreads();
    for (int32_t b = own_index(); b < kSteps; b += block_size()) {
      if (scratch_.bins[b]) atomicAdd(memory_.found + 1 + b, scratch_.bins[b]);
      if (weights_[b]) add_to(memory_.weights + b, weights_[b]);
    }
  }

  // Appends the chosen tokens' keys to memory.taken.
  __device__ TOPW_OUT_OF_LINE void take_chosen(int32_t item) {
    append(item, [&](float logit, int32_t id) { return chooses(logit, id); });
  }

  // keep_mask: [vocab].
  __device__ TOPW_OUT_OF_LINE void mark(int32_t item, uint8_t *keep_mask) {
    const Batch batch = read(item);
    for_each_token(batch, [&](int, float logit, int32_t id) {
      if (chooses(logit, id)) keep_mask[id] = 1;
    });
  }

 private:
  __device__ TOPW_OUT_OF_LINE bool chooses(float logit, int32_t id) const {
    if (logit == -static_cast<float>(INFINITY)) return false;
    const Choice &choice = bins_.choice;
    const uint64_t key = token_key(logit, id);
    if (choice.which == Chosen::range) return key > choice.after && key <= choice.last;
    const uint64_t distance = distance_key(logit, bins_.choice);
    return (distance == choice.distance && key <= choice.last) ||
           (choice.which == Chosen::nearest && distance < choice.distance);
  }

  __device__ TOPW_OUT_OF_LINE void add(float logit, int32_t id) {
    if (!chooses(logit, id)) return;
    const uint64_t key = bins_.by_distance ? distance_key(logit, bins_.choice) : token_key(logit, id);
    if (bins_.shift != kFirstShift && key >> (bins_.shift + 8) != bins_.prefix) return;
    const int32_t bin = static_cast<int32_t>(key >> bins_.shift & (kSteps - 1));
    atomicAdd(&scratch_.bins[bin], 1u);
    if (bins_.scale == 0) return;
    const Weight of = weight_of(logit, bins_.top, cooling_, false);
    const double quantity = !bins_.terms ? of.weight : of.weight > 0 ? of.weight * (bins_.center - of.log) : 0;
    const uint64_t whole = static_cast<uint64_t>(quantity * bins_.boost * bins_.scale + 0.5);
    if (whole) add_to(weights_ + bin, whole);
  }

  const Bins bins_;
  const Cooling cooling_;
  uint64_t *const weights_;
};

// Counts and weights.
struct Sums {
  uint64_t weight;
  uint32_t count;

  __device__ Sums operator+(const Sums &other) const { return {weight + other.weight, count + other.count}; }
};

struct FoundBin {  // in shared memory
  int32_t bin;     // -1: none
  Sums before, upto, total;  // of the earlier bins, of these and this bin, of all bins
};

// A token that a search found. key: the token's, or the distance's; before, upto: sums without and with its key.
struct FoundKey {
  bool exists;
  uint64_t key;
  Sums before, upto, total;
};

// The leading block's part. All its threads call every function.
class RowSearch {
 public:
  __device__ RowSearch(const LogitRow &row, Job &job, const Memory &memory, Leader &leader, FoundBin &found,
                       BlockScratch &scratch)
      : row_(row), job_(job), memory_(memory), leader_(leader), found_(found), scratch_(scratch) {}

  // Sums over all chosen tokens.
  __device__ Sums total(const Bins &bins) {
    return first(bins, [](const Sums &, const Sums &) { return false; }).total;
  }

  // The first key for which reached(sums up to it, total) is true. `reached` must be false for sums of 0, and must stay
  // true once it is. Overwrites the dynamic shared memory.
  template <class Reached>
  __device__ FoundKey first(Bins bins, Reached reached) {
    FoundKey found = {};
    bins.prefix = 0;
    for (bins.shift = kFirstShift;; bins.shift -= 8) {
      if (bins.shift == 24 && !bins.by_distance) {  // token ids have at most 24 bits
        bins.prefix <<= 8;
        continue;
      }
      fill(bins);
      if (warp_index() == 0) find(found.before, bins.shift == kFirstShift, reached);
      __syncthreads();
      const FoundBin bin = found_;
      __syncthreads();
      found.total = bin.total;
      if (bin.bin < 0) return found;
      found.before = bin.before;
      found.upto = bin.upto;
      bins.prefix = bins.prefix << 8 | static_cast<uint64_t>(bin.bin);
      if (bins.shift == 0) break;
    }
    found.exists = true;
    found.key = bins.prefix;
    return found;
  }

  // Writes the chosen tokens' keys, at most kMostTaken, to memory.taken. Returns their number.
  __device__ TOPW_OUT_OF_LINE int32_t take(const Bins &bins) {
    forget();
    run(Work::take_chosen, bins, [&](BinReader &reader, int32_t item) { reader.take_chosen(item); });
    const int32_t count = static_cast<int32_t>(__ldcg(memory_.found));
    __syncthreads();
    return count;
  }

  __device__ TOPW_OUT_OF_LINE void mark(const Bins &bins, uint8_t *keep_mask) {
    run(Work::mark_chosen, bins, [&](BinReader &reader, int32_t item) { reader.mark(item, keep_mask); });
  }

 private:
  __device__ void forget() {
    for (int32_t n = own_index(); n < 1 + kSteps; n += block_size()) memory_.found[n] = 0;
    for (int32_t n = own_index(); n < kSteps; n += block_size()) memory_.weights[n] = 0;
  }

  __device__ TOPW_OUT_OF_LINE void fill(const Bins &bins) {
    forget();
    run(Work::fill_bins, bins, [&](BinReader &reader, int32_t item) { reader.fill(item); });
  }

  template <class Do>
  __device__ void run(Work work, const Bins &bins, Do act) {
    job_.work = work;
    job_.listed = -1;
    if (own_index() == 0) *memory_.bins = bins;
    leader_.run(job_, PoolReader(row_, job_, memory_, scratch_).items(), [&](int32_t item) {
      BinReader reader(row_, job_, memory_, scratch_);
      act(reader, item);
    });
  }

  // The bin in which `reached` becomes true. Called by one warp.
  template <class Reached>
  __device__ void find(const Sums &before, bool from_start, Reached reached) {
    constexpr int kEach = kSteps / kWarp;
    const int first = kEach * lane_index();
    Sums own = {}, bins[kEach];
#pragma unroll
    for (int b = 0; b < kEach; ++b) {
      bins[b] = {__ldcg(memory_.weights + first + b), __ldcg(memory_.found + 1 + first + b)};
      own = own + bins[b];
    }
    const Sums scanned = {warp_scan(own.weight), warp_scan(own.count)};
    if (lane_index() == kWarp - 1 && from_start) found_.total = scanned;
    if (lane_index() == 0) found_.bin = -1;
    __syncwarp();
    const Sums total = found_.total;
    Sums upto = before + Sums{scanned.weight - own.weight, scanned.count - own.count};
    if (reached(upto, total) || !reached(upto + own, total)) return;
#pragma unroll
    for (int b = 0; b < kEach; ++b) {
      const Sums next = upto + bins[b];
      if (!reached(upto, total) && reached(next, total)) {
        found_.bin = first + b;
        found_.before = upto;
        found_.upto = next;
      }
      upto = next;
    }
  }

  const LogitRow &row_;
  Job &job_;
  const Memory &memory_;
  Leader &leader_;
  FoundBin &found_;
  BlockScratch &scratch_;
};

}  // namespace topw::crop
#endif
