// How certify cuts rows into chunks, one block each. Host code.
#ifndef TOPW_CUDA_CHUNKING_H
#define TOPW_CUDA_CHUNKING_H

#include <stdint.h>

namespace topw {

// resident: blocks of the pass over the logits per multiprocessor.
struct Device {
  int64_t multiprocessors, resident;
  bool operator==(const Device &other) const {
    return multiprocessors == other.multiprocessors && resident == other.resident;
  }
};

// Rows of groups, to be cut at multiples of `step` groups.
struct Rows {
  int64_t groups, batch, step;
  bool operator==(const Rows &other) const {
    return groups == other.groups && batch == other.batch && step == other.step;
  }
};

struct Chunking {
  int64_t groups, chunks;  // per chunk; per row
};

// Minimizes the busiest multiprocessor's time. It reads its resident blocks' chunks, then the rest; fewer than kBusy
// blocks take as long as kBusy.
inline Chunking cut_into_chunks(const Rows &rows, const Device &device) {
  constexpr int64_t kBusy = 3, kLate = 64;  // blocks; groups read while a block starts
  const auto ceiling = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const auto at_least_busy = [](int64_t blocks) { return blocks == 0 ? 0 : blocks > kBusy ? blocks : kBusy; };
  const int64_t together = ceiling(device.resident, device.multiprocessors);
  Chunking best = {};
  int64_t least = INT64_MAX;
  for (int64_t wanted = 1, of_chunk = INT64_MAX; of_chunk > rows.step; ++wanted) {
    of_chunk = ceiling(ceiling(rows.groups, wanted), rows.step) * rows.step;
    const int64_t chunks = ceiling(rows.groups, of_chunk);
    const int64_t of_busiest = ceiling(chunks * rows.batch, device.multiprocessors);
    const int64_t reading = of_busiest / together * at_least_busy(together) + at_least_busy(of_busiest % together);
    const int64_t cost = reading * of_chunk + ceiling(of_busiest, together) * kLate;
    if (cost >= least) continue;
    least = cost;
    best = {of_chunk, chunks};
  }
  return best;
}

}  // namespace topw
#endif
