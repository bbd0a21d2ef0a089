// Stage A: crop and certificate from a few candidates (docs/contract/theory.md, section 4).
#ifndef TOPW_CANDIDATES_H
#define TOPW_CANDIDATES_H

#include "parameters.h"
#include "ranked.h"

namespace topw {

enum class Outcome { settled, undecided, out_of_memory };

// Settled: the certified crop is the first `kept` of `tokens`. Undecided: the pool must decide. `seen` receives the
// number of candidates visited. Requires geom_scale >= 0, c > 0, top_m >= 1.
Outcome crop_from_candidates(const EditedRow &, const Parameters &, int64_t top_m, Sorter &, Ranked &tokens,
                             int64_t &kept, int64_t &seen);

}  // namespace topw
#endif
