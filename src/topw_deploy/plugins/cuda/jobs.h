// Work on open rows for any block: each row's leader publishes jobs cut into items.
//
// A block waits only for items claimed by running blocks, so a launch ends with any number of resident blocks and may
// share the device.
//
// Writes before `publish` are visible to claiming blocks. An item's writes are visible to the leader after `finish`, if
// read past L1 (__ldcg).
#ifndef TOPW_CUDA_JOBS_H
#define TOPW_CUDA_JOBS_H

#include "block.h"
#include "workspace.h"

namespace topw::crop {

constexpr uint64_t kMostWait = 20'000'000'000;  // nanoseconds without progress that mean an error
constexpr uint64_t kMostStep = 100'000'000;     // most that one check counts: a device may be suspended

// Ends a launch that waits forever: a hung device is lost to all its users.
class Patience {
 public:
  __device__ void wait(const char *what) {
    if (++polls_ % 64 == 0) look(what);
    pause();
  }
  __device__ void renew() { polls_ = 0, waited_ = last_ = 0; }

 private:
  __device__ TOPW_OUT_OF_LINE void look(const char *what) {
    const uint64_t now = nanoseconds();
    if (last_ != 0) waited_ += now - last_ < kMostStep ? now - last_ : kMostStep;
    last_ = now;
    if (waited_ > kMostWait) trap(what, blockIdx.x);
  }

  uint32_t polls_ = 0;
  uint64_t waited_ = 0, last_ = 0;
};

__device__ __forceinline__ uint32_t polled(const uint32_t *word) { return *static_cast<const volatile uint32_t *>(word); }
__device__ __forceinline__ uint64_t polled(const uint64_t *word) { return *static_cast<const volatile uint64_t *>(word); }

// Board::claims packs the number of claimed items, the job's items, and the job's number.
constexpr int kItemBits = 20;
constexpr uint64_t kItemMask = (uint64_t{1} << kItemBits) - 1;

__device__ __forceinline__ uint64_t unclaimed(uint32_t number, int32_t items) {
  return static_cast<uint64_t>(number) << (2 * kItemBits) | static_cast<uint64_t>(items) << kItemBits;
}
__device__ __forceinline__ int32_t claimed_in(uint64_t claims) { return static_cast<int32_t>(claims & kItemMask); }
__device__ __forceinline__ int32_t items_in(uint64_t claims) {
  return static_cast<int32_t>(claims >> kItemBits & kItemMask);
}

// A claimed item of a job, or -1. In shared memory: one thread claims for its block.
struct Claim {
  int32_t item;
  uint32_t job;
};

// Claims the next item of the board's job. The job cannot end, nor its data change, before a claimed item is done.
__device__ inline Claim claim_item(Board *board) {
  const uint64_t seen = polled(&board->claims);
  if (claimed_in(seen) >= items_in(seen)) return {-1, 0};
  const uint64_t claims = add_to(&board->claims, 1);
  if (claimed_in(claims) >= items_in(claims)) return {-1, 0};
  fence();
  return {claimed_in(claims), static_cast<uint32_t>(claims >> (2 * kItemBits))};
}

// Calls work(item) with all threads of a block, for the claimed item and others of the same job. `claim`: in shared
// memory, written before a barrier; may end up holding an item of the board's next job.
template <class Work>
__device__ void work_off(Board *board, Claim &claim, Work work) {
  const uint32_t job = claim.job;
  for (;;) {
    const Claim own = claim;
    if (own.item < 0 || own.job != job) return;
    work(own.item);
    __syncthreads();
    if (own_index() == 0) {
      fence();
      atomicAdd(&board->done, 1u);
      claim = claim_item(board);
    }
    __syncthreads();
  }
}

// The board's leader. All threads of the block call every function.
class Leader {
 public:
  // claim: in shared memory, exclusive to this object.
  __device__ Leader(Board *board, Job *job, Claim &claim) : board_(board), job_(job), claim_(claim) {}

  // Offers a job to all blocks. Leave its data untouched until `finish`.
  __device__ void publish(const Job &job, int32_t items) {
    __syncthreads();
    if (own_index() == 0) {
      *job_ = job;
      board_->done = 0;
      fence();
      exchange_with(&board_->claims, unclaimed(number_, items));
    }
    ++number_;
    items_ = items;
  }

  // Works on remaining items, then waits for others. Does nothing without a job.
  template <class Work>
  __device__ void finish(Work work) {
    if (items_ == 0) return;
    __syncthreads();
    if (own_index() == 0) claim_ = claim_item(board_);
    __syncthreads();
    work_off(board_, claim_, work);
    if (own_index() == 0) {
      Patience patience;
      while (polled(&board_->done) < static_cast<uint32_t>(items_)) patience.wait("items of a job that are never done");
      fence();
    }
    items_ = 0;
    __syncthreads();
  }

  template <class Work>
  __device__ void run(const Job &job, int32_t items, Work work) {
    if (items > 1) {
      publish(job, items);
      finish(work);
      return;
    }
    __syncthreads();
    if (items == 1) work(0);
    __syncthreads();
  }

 private:
  Board *board_;
  Job *job_;
  Claim &claim_;
  uint32_t number_ = 1;
  int32_t items_ = 0;
};

// Reads another block's or launch's writes.
template <class T>
__device__ T load_written(const T *from) {
  constexpr int kWords = sizeof(T) / sizeof(uint32_t);
  uint32_t words[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = __ldcg(reinterpret_cast<const uint32_t *>(from) + i);
  T value;
  memcpy(&value, words, sizeof value);
  return value;
}

// Concurrent leaders: one per open row, at most kTeams.
__device__ inline int32_t leaders(uint32_t open_rows) {
  return static_cast<int32_t>(open_rows < static_cast<uint32_t>(kTeams) ? open_rows : static_cast<uint32_t>(kTeams));
}

// Every block's last call. The last block zeroes the control memory.
__device__ inline void leave(const Call &call, int32_t teams) {
  Control *const control = call.workspace.control;
  __syncthreads();
  if (own_index() != 0) return;
  fence();
  if (atomicAdd(&control->blocks_left, 1u) + 1 < gridDim.x) return;
  fence();
  for (int32_t team = 0; team < teams; ++team) control->boards[team] = {};
  control->leaders = control->next_row = control->rows_done = control->blocks_left = 0;
  control->open_count = 0;
}

}  // namespace topw::crop
#endif
