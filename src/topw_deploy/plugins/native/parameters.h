// What a row chose for itself, and what the export fixed (docs/graph.md, section 1).
#ifndef TOPW_PARAMETERS_H
#define TOPW_PARAMETERS_H

#include <math.h>

#include "host_device.h"
#include "topw.h"

namespace topw {

constexpr float kGreedyBelow = 1e-5f;

TOPW_SHARED_CODE inline bool finite_and_not_negative(float value) {
  return value >= 0 && value < static_cast<float>(INFINITY);
}

struct Parameters {
  double lam, beta, c;  // c = beta - lam
  double temperature, selection, init_top_p, scale, uniform;
  bool greedy;            // temperature under 1e-5
  bool certain_selection;  // so is the selection temperature: all mass is on the largest logit
  double unit;            // max(1, lam, beta): what an error in J is measured in

  // False if one lies outside its interval.
  [[nodiscard]] TOPW_SHARED_CODE bool read(const topw_inputs &inputs, int64_t row);
};

TOPW_SHARED_CODE inline bool Parameters::read(const topw_inputs &inputs, int64_t row) {
  const float own_selection = inputs.selection_temperature[row], drawing = inputs.temperature[row];
  lam = inputs.lam[row];
  beta = inputs.beta[row];
  c = beta - lam;
  temperature = drawing;
  selection = own_selection == 0 ? drawing : own_selection;
  init_top_p = inputs.init_top_p[row];
  scale = inputs.geom_scale[row];
  uniform = inputs.uniform[row];
  greedy = drawing < kGreedyBelow;
  certain_selection = selection < static_cast<double>(kGreedyBelow);
  const double larger = lam > beta ? lam : beta;
  unit = larger > 1 ? larger : 1;
  return finite_and_not_negative(inputs.lam[row]) && finite_and_not_negative(inputs.beta[row]) &&
         finite_and_not_negative(drawing) && finite_and_not_negative(own_selection) && init_top_p > 0 &&
         init_top_p <= 1 && scale - scale == 0 && uniform >= 0 && uniform < 1;  // a finite number less itself is 0
}

}  // namespace topw
#endif
