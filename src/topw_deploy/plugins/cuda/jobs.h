// Work on open rows that any block of the launch may take: each row has a leader, which publishes jobs cut into items.
//
// A block waits only for items that a running block has claimed, never for a block that has yet to begin. So no number of
// resident blocks is needed, a launch of any size ends, and it may share the device with other kernels.
//
// What was written before `publish` is seen by whoever claims an item, and what an item writes is seen by the leader
// behind `finish`, past the first level of cache (__ldcg) where another block wrote it.
#ifndef TOPW_CUDA_JOBS_H
#define TOPW_CUDA_JOBS_H

#include "block.h"
#include "workspace.h"

namespace topw::crop {

constexpr uint64_t kMostWait = 20'000'000'000;  // nanoseconds without progress: something is broken
constexpr uint64_t kMostStep = 100'000'000;     // of which one look counts at most so many: a device may stand still, too

// Ends a launch that waits for what never comes. A device that hangs is lost to everyone.
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

// Board::claims: how many items are claimed, how many the job has, and the job's number, which tells it from the next.
constexpr int kItemBits = 20;
constexpr uint64_t kItemMask = (uint64_t{1} << kItemBits) - 1;

__device__ __forceinline__ uint64_t unclaimed(uint32_t number, int32_t items) {
  return static_cast<uint64_t>(number) << (2 * kItemBits) | static_cast<uint64_t>(items) << kItemBits;
}
__device__ __forceinline__ int32_t claimed_in(uint64_t claims) { return static_cast<int32_t>(claims & kItemMask); }
__device__ __forceinline__ int32_t items_in(uint64_t claims) {
  return static_cast<int32_t>(claims >> kItemBits & kItemMask);
}

// An item of a job, or -1. In shared memory: one thread claims it for its block.
struct Claim {
  int32_t item;
  uint32_t job;
};

// The next item of the board's job. A claimed item keeps its job from ending, so what is read of the job then is its own.
__device__ inline Claim claim_item(Board *board) {
  const uint64_t seen = polled(&board->claims);
  if (claimed_in(seen) >= items_in(seen)) return {-1, 0};
  const uint64_t claims = add_to(&board->claims, 1);
  if (claimed_in(claims) >= items_in(claims)) return {-1, 0};
  fence();
  return {claimed_in(claims), static_cast<uint32_t>(claims >> (2 * kItemBits))};
}

// Called by all threads of a block: work(item) for the claimed item and for all that can be claimed of the same job.
// `claim` is in shared memory, written a barrier before; it may end with an item of the board's next job.
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

// A leader's side of its board. Every function is called by all threads of the leading block.
class Leader {
 public:
  // claim: in shared memory, for this object alone.
  __device__ Leader(Board *board, Job *job, Claim &claim) : board_(board), job_(job), claim_(claim) {}

  // Offers a job to all blocks. The leader goes on; nothing that the job reads or writes may be touched before `finish`.
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

  // Works on what is left of the job, then waits for the items of others. Nothing where no job is published.
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

// What another block, or another launch, wrote.
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

// Blocks that lead at once: each open row has one, up to kTeams rows at a time.
__device__ inline int32_t leaders(uint32_t open_rows) {
  return static_cast<int32_t>(open_rows < static_cast<uint32_t>(kTeams) ? open_rows : static_cast<uint32_t>(kTeams));
}

// The last thing that a block does. The last block to come puts the control memory back to zero for the next launch.
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
