// Stage B: the pool, its mass and warm start, and the certificate without distances.
#ifndef TOPW_POOL_H
#define TOPW_POOL_H

#include "parameters.h"
#include "ranked.h"

namespace topw {

struct Pool {
  Ranked tokens;     // the top_m best finite logits
  Array<double> a, p;  // log-weights and weights in units of the largest
  int64_t k0 = 0;      // warm start size
  int64_t K = 0;       // first maximiser of the base J
  double mass = 0;

  // False if out of memory.
  [[nodiscard]] bool fill(const EditedRow &, const Parameters &, int64_t top_m, Sorter &);

 private:
  void weigh(float top, const Parameters &);
};

}  // namespace topw
#endif
