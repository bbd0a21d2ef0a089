// What a row chose for itself, and what the export fixed (docs/graph.md, section 1).
#ifndef TOPW_PARAMETERS_H
#define TOPW_PARAMETERS_H

#include "topw.h"

namespace topw {

struct Parameters {
  double lam, beta, c;  // c = beta - lam
  double temperature, selection, init_top_p, scale, uniform;
  bool greedy;            // temperature under 1e-5
  bool certain_selection;  // so is the selection temperature: all mass is on the largest logit
  double unit;            // max(1, lam, beta): what an error in J is measured in

  // False if one lies outside its interval.
  [[nodiscard]] bool read(const topw_inputs &inputs, int64_t row);
};

}  // namespace topw
#endif
