// native/alternation.cpp on a GPU: a row's leading block runs the steps and publishes the distances as jobs.
#ifndef TOPW_CUDA_ALTERNATION_H
#define TOPW_CUDA_ALTERNATION_H

#include <math.h>

#include "../native/objective.h"
#include "distances.h"
#include "logits.h"
#include "scan.h"

namespace topw::crop {

// State bits (Memory::state). kExact: the distance to the set is computed; a member's is 0.
constexpr uint8_t kMember = 1, kCandidate = 2, kExact = 4, kWasMember = 8, kSaved = 16, kNext = 32;

constexpr double kRounding = 1e-9;     // ties' bound of J, in units of max(1, lam, beta)
constexpr int kRounds = 8;             // pruning rounds; any number is sound
constexpr float kRoughly = 4e-6f;      // relative error bound of pruning's float32 sums
constexpr int32_t kFewestRows = 32;    // fewest tokens measured at a time
constexpr int64_t kCheapHidden = 2048; // beyond, measure fewer pairs at a time

// A leading block's shared memory.
struct Room {
  uint64_t *keys;   // [capacity]
  uint32_t *items;  // [capacity]
  int32_t capacity; // a power of 2
  double *sums[2];  // [pool]
};

// A key that sorts values in descending order; -0 equals 0.
__device__ __forceinline__ uint64_t phi_key(double value) {
  value += 0.0;
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits >> 63 ? bits : bits ^ 0x7fffffffffffffffu;
}

// See native/alternation.cpp.
__device__ __forceinline__ double h(double y) { return 1 - y * (0.5 + y / 6); }

class Alternation {
 public:
  int64_t steps = 0;      // scans
  int64_t pairs = 0;      // distances computed
  int64_t literal = 0;    // under the literal rule
  int32_t kept = 0;

  // helpers: blocks to cut work for.
  __device__ Alternation(const Call &call, const Parameters &P, const Memory &memory, const Job &job, const Room &room,
                         Leader &leader, Distances &distances, int32_t helpers, BlockScratch &scratch)
      : P_(P),
        memory_(memory),
        pool_(job.tokens),
        job_(job),
        room_(room),
        leader_(leader),
        distances_(distances),
        helpers_(helpers),
        scratch_(scratch),
        measures_(call.options.metric != TOPW_UNIFORM && P.scale != 0),
        neighbours_(call.options.knn_k),
        most_steps_(call.options.alt_iters),
        bounds_(call.table.neighbour_bound) {
    const int64_t hidden = call.table.hidden;
    pairs_at_once_ = hidden > kCheapHidden ? kPairs * kCheapHidden / hidden : kPairs;
  }

  // From the pool's first k0 tokens to the crop's members.
  __device__ TOPW_OUT_OF_LINE void run(int32_t k0) {
    kept = k0;
    if (measures_) {  // others measure lengths while this block prepares
      job_.work = Work::measure_lengths;
      leader_.publish(job_, distances_.items(job_));
    }
#pragma unroll 1
    for (int32_t i = own_index(); i < pool_; i += block_size()) memory_.state[i] = i < k0 ? kMember : 0;
    __syncthreads();
    int64_t last = most_steps_ > 1 ? most_steps_ : 1;
    while (steps < last) {
      const int32_t before = kept;
      step();
      if (entered_ == 0 && kept == before) break;
      const bool nested_is_final = P_.scale >= 0 && (neighbours_ == 0 || kept >= neighbours_);  // T1
      if (entered_ == 0 && nested_is_final) break;
      if (const int64_t cycle = period()) last = steps + (last - steps) % cycle;
    }
    finish_job();
    literal = static_cast<int64_t>(pool_) * joined_;
  }

  // Writes the members' positions to memory.cols.
  __device__ void list_members() { list(kMember, kMember, memory_.cols); }

 private:
  __device__ bool member(int32_t i) const { return memory_.state[i] & kMember; }

  // Lists the positions whose bits of `mask` equal `bits`. Returns their number.
  __device__ TOPW_OUT_OF_LINE int32_t list(uint8_t mask, uint8_t bits, int32_t *positions) {
    return block_compact(
        pool_, [&](int32_t i) { return (memory_.state[i] & mask) == bits; },
        [&](int32_t i, int32_t place) { positions[place] = i; }, scratch_);
  }

  __device__ double base_phi(int32_t i) const { return memory_.base[i]; }
  __device__ double phi(int32_t i) const { return -P_.scale * static_cast<double>(memory_.distance[i]) + base_phi(i); }

  __device__ void step() {
    ++steps;
    members_ = list(kMember, kMember, memory_.cols);
    int32_t joined = 0;
#pragma unroll 1
    for (int32_t i = own_index(); i < pool_; i += block_size()) joined += prepare(i);
    if (measures_) joined_ += block_sum(joined, scratch_);
    if (P_.scale < 0) {
      if (measures_) measure(P_.scale);
    } else {
      const double reached = surely_reached();
      prune(reached);
      if (measures_) measure(reached);
    }
    scan();
  }

  // Initialises a token's state. Returns 1 for a new member.
  __device__ int32_t prepare(int32_t i) {
    const uint8_t known = memory_.state[i], kept_bits = kWasMember | kSaved;
    if (known & kMember) {
      memory_.state[i] = static_cast<uint8_t>((known & kept_bits) | kMember | kWasMember | kExact);
      return known & kWasMember ? 0 : 1;
    }
    memory_.state[i] = static_cast<uint8_t>((known & kept_bits) | kCandidate | (measures_ ? 0 : kExact));
    if (!measures_) {
      memory_.distance[i] = P_.scale == 0 ? 0.0f : 1.0f;
      return 0;
    }
    const float bound = bounds_ ? bounds_[id_of(memory_.tokens[i])] : 0.0f;
    memory_.distance[i] = bound > 0 && bound < static_cast<float>(INFINITY) ? bound : 0.0f;
    return 0;
  }

  __device__ double surely_reached() {
#pragma unroll 1
    for (int32_t n = own_index(); n < members_; n += block_size()) {
      const int32_t i = memory_.cols[n];
      room_.sums[0][n] = memory_.p[i];
      room_.sums[1][n] = memory_.p[i] * base_phi(i);
    }
    block_scan(room_.sums[0], room_.sums[1], members_, scratch_);
    const double best = first_maximiser(room_.sums[0], room_.sums[1], members_, P_.c, scratch_).J;
    __syncthreads();
    return best;
  }

  // Row test (see native/alternation.cpp) in float32 with an error bound, then in double where undecided.
  __device__ TOPW_OUT_OF_LINE void prune(double reached) {
    const float c = static_cast<float>(P_.c), scale = static_cast<float>(P_.scale);
    const float asked = static_cast<float>(reached - 2 * kRounding * P_.unit);
    float before = -1;
#pragma unroll 1
    for (int round = 0; round < kRounds; ++round) {
      const float Gmax = mass_left(round) * (1 + kRoughly);
      if (Gmax == before) break;
      before = Gmax;
      const float gain = c * logf(Gmax), share = 1 / Gmax;
      const float error = kRoughly * (fabsf(asked) + fabsf(gain) + 2 * c);
#pragma unroll 1
      for (int32_t i = own_index(); i < pool_; i += block_size()) {
        if (!(memory_.state[i] & kCandidate)) continue;
        const float far = scale * memory_.distance[i], base = memory_.rough_base[i], y = memory_.rough_p[i] * share;
        const float surplus = base - far + c * (1 - y * (0.5f + y / 6)) - (asked - gain);
        const float known = error + kRoughly * (fabsf(base) + fabsf(far));
        const bool drop = known < static_cast<float>(INFINITY) ? surplus < -known : surely_lost(i, reached, Gmax);
        if (drop) memory_.state[i] &= static_cast<uint8_t>(~kCandidate);
      }
    }
    __syncthreads();
  }

  // Rounds alternate between two arrays, so one barrier suffices.
  __device__ float mass_left(int round) {
    float *const of_warp = reinterpret_cast<float *>(scratch_.values) + round % 2 * kMostWarps;
    float sum = 0;
#pragma unroll 1
    for (int32_t i = own_index(); i < pool_; i += block_size())
      if (memory_.state[i] & (kMember | kCandidate)) sum += memory_.rough_p[i];
    sum = warp_reduce(sum, Plus());
    if (lane_index() == 0) of_warp[warp_index()] = sum;
    __syncthreads();
    sum = 0;
    for (int i = 0; i < warps(); ++i) sum += of_warp[i];
    return sum;
  }

  __device__ TOPW_OUT_OF_LINE bool surely_lost(int32_t i, double reached, float mass) const {
    const double Gmax = static_cast<double>(mass);
    const double needed = reached - P_.c * log(Gmax) - kRounding * P_.unit;
    return phi(i) + P_.c * h(memory_.p[i] / Gmax) < needed;
  }

  // Most probable tokens first, in chunks large enough for all blocks. Unless the rule is literal, each chunk's row
  // test narrows the rest.
  __device__ void measure(double reached) {
    const int64_t at_once = pairs_at_once_ / members_;
    const int32_t most = at_once < kFewestRows ? kFewestRows : static_cast<int32_t>(at_once < pool_ ? at_once : pool_);
    for (;;) {
      const int32_t found = list(kCandidate | kExact, kCandidate, memory_.rows);
      if (found == 0) return;
      job_.rows = found < most ? found : most;
      job_.cols = members_;
      mark(memory_.rows, job_.rows, kExact);
      finish_job();  // the lengths
      job_.pieces = distances_.how_to_cut(job_, helpers_);
      run(Work::compare_pairs);
      run(Work::settle_rows);
      pairs += static_cast<int64_t>(job_.rows) * job_.cols;
      read_distances(job_);
      if (P_.scale >= 0) prune(reached);
    }
  }

  __device__ void run(Work work) {
    job_.work = work;
    leader_.run(job_, distances_.items(job_), [&](int32_t item) { distances_.work(job_, item); });
  }

  __device__ void finish_job() {
    leader_.finish([&](int32_t item) { distances_.work(job_, item); });
  }

  __device__ void mark(const int32_t *positions, int32_t count, uint8_t bit) {
#pragma unroll 1
    for (int32_t n = own_index(); n < count; n += block_size()) memory_.state[positions[n]] |= bit;
    __syncthreads();
  }

  // Other blocks wrote them: this one's L1 cache may be stale.
  __device__ void read_distances(const Job &job) {
#pragma unroll 1
    for (int32_t n = own_index(); n < job.rows; n += block_size()) {
      const int32_t i = memory_.rows[n];
      memory_.distance[i] = __ldcg(memory_.distance + i);
    }
    __syncthreads();
  }

  // Members' phi falls in pool order, so only the candidates are sorted, then merged.
  __device__ void scan() {
    const int32_t count = list(kCandidate, kCandidate, memory_.rows);
#pragma unroll 1
    for (int32_t n = own_index(); n < count; n += block_size()) {
      room_.keys[n] = phi_key(phi(memory_.rows[n]));
      room_.items[n] = static_cast<uint32_t>(memory_.rows[n]);
    }
    __syncthreads();
    if (count > 1) {
      const int32_t size = power_of_two_from(count);
#pragma unroll 1
      for (int32_t n = count + own_index(); n < size; n += block_size()) {
        room_.keys[n] = ~uint64_t{0};
        room_.items[n] = 0xffffffffu;
      }
      block_sort(room_.keys, room_.items, size);
    }
#pragma unroll 1
    for (int32_t n = own_index(); n < members_; n += block_size()) {
      const int32_t i = memory_.cols[n];
      place(i, n + candidates_before(count, phi_key(base_phi(i)), i), base_phi(i));
    }
#pragma unroll 1
    for (int32_t n = own_index(); n < count; n += block_size()) {
      const int32_t i = static_cast<int32_t>(room_.items[n]);
      place(i, n + members_before(room_.keys[n], i), phi(i));
    }
    __syncthreads();
    const int32_t both = count + members_;
    block_scan(room_.sums[0], room_.sums[1], both, scratch_);
    kept = first_maximiser(room_.sums[0], room_.sums[1], both, P_.c, scratch_).size;
    take_prefix();
  }

  __device__ void place(int32_t i, int32_t rank, double value) {
    memory_.order[rank] = i;
    room_.sums[0][rank] = memory_.p[i];
    room_.sums[1][rank] = memory_.p[i] * value;
  }

  __device__ int32_t candidates_before(int32_t count, uint64_t key, int32_t i) const {
    int32_t low = 0, high = count;
#pragma unroll 1
    while (low < high) {
      const int32_t middle = (low + high) / 2;
      const uint64_t other = room_.keys[middle];
      if (other < key || (other == key && static_cast<int32_t>(room_.items[middle]) < i))
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }

  __device__ int32_t members_before(uint64_t key, int32_t i) const {
    int32_t low = 0, high = members_;
#pragma unroll 1
    while (low < high) {
      const int32_t middle = (low + high) / 2, member = memory_.cols[middle];
      const uint64_t other = phi_key(base_phi(member));
      if (other < key || (other == key && member < i))
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }

  // Makes the first `kept` of the order the set.
  __device__ void take_prefix() {
#pragma unroll 1
    for (int32_t n = own_index(); n < kept; n += block_size()) memory_.state[memory_.order[n]] |= kNext;
    __syncthreads();
    int32_t entered = 0;
    int differs = 0;
#pragma unroll 1
    for (int32_t i = own_index(); i < pool_; i += block_size()) {
      const uint8_t known = memory_.state[i];
      const bool next = known & kNext;
      entered += next && !(known & kMember);
      differs |= next != ((known & kSaved) != 0);
      memory_.state[i] = static_cast<uint8_t>((known & ~(kMember | kNext)) | (next ? kMember : 0));
    }
    entered_ = block_sum(entered, scratch_);
    differs_ = __syncthreads_or(differs) != 0;
  }

  // See native/alternation.cpp.
  __device__ int64_t period() {
    if (saved_at_ > 0 && !differs_) return steps - saved_at_;
    if ((steps & (steps - 1)) == 0) {
#pragma unroll 1
      for (int32_t i = own_index(); i < pool_; i += block_size())
        memory_.state[i] = static_cast<uint8_t>((memory_.state[i] & ~kSaved) | (member(i) ? kSaved : 0));
      saved_at_ = steps;
      __syncthreads();
    }
    return 0;
  }

  const Parameters &P_;
  const Memory &memory_;
  int32_t pool_;
  Job job_;
  const Room &room_;
  Leader &leader_;
  Distances &distances_;
  int32_t helpers_;
  BlockScratch &scratch_;
  bool measures_;
  int32_t neighbours_;
  int64_t most_steps_, pairs_at_once_;
  const float *bounds_;

  int32_t members_ = 0;      // in memory_.cols
  int32_t entered_ = 0;      // new tokens in the last step
  bool differs_ = false;     // the last crop differs from the saved one
  int32_t joined_ = 0;       // tokens ever in the set
  int64_t saved_at_ = 0;     // step of the saved crop
};

}  // namespace topw::crop
#endif
