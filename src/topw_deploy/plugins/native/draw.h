// The draw from a crop, and the crop's mass (docs/contract/graph.md, section 5).
#ifndef TOPW_DRAW_H
#define TOPW_DRAW_H

#include "parameters.h"
#include "ranked.h"
#include "running_mass.h"

namespace topw {

struct Draw {
  int64_t place;    // in the crop
  double logprob;  // in the crop, at the drawing temperature
};

// `logits` [kept], descending. `weights`: scratch [kept].
Draw draw(const float *logits, int64_t kept, const Parameters &, double *weights);

// The same for a crop in any order of logits, ids ascending. False if out of memory.
[[nodiscard]] bool draw_unranked(const Ranked &crop, const Parameters &, RunningMass &, Sorter &, Draw &drawn);

// The crop's probability under the full softmax at the selection temperature, within 3e-7 relative.
double mass(const float *logits, int64_t kept, const EditedRow &, const Parameters &);

}  // namespace topw
#endif
