// Parameters of a row, and options fixed by the export (docs/contract/graph.md, section 1).
#ifndef TOPW_PARAMETERS_H
#define TOPW_PARAMETERS_H

#include <math.h>

#include "host_device.h"
#include "topw.h"

namespace topw {

constexpr float kGreedyBelow = 1e-5f;

TOPW_SHARED_CODE inline bool is_finite_and_not_negative(float value) {
  return value >= 0 && value < static_cast<float>(INFINITY);
}

// Words of a row's mask (topw_inputs).
TOPW_SHARED_CODE inline int64_t words_of_mask(int64_t vocab) { return (vocab + 31) / 32; }

struct GivenParameters {
  float temperature, selection_temperature, lam, beta, init_top_p, geom_scale, uniform;
};

TOPW_SHARED_CODE inline GivenParameters given_parameters(const topw_inputs &inputs, int64_t row) {
  return {inputs.temperature[row], inputs.selection_temperature[row], inputs.lam[row], inputs.beta[row],
          inputs.init_top_p[row],  inputs.geom_scale[row],            inputs.uniform[row]};
}

struct Parameters {
  double lam, beta, c;  // c = beta - lam
  double temperature, selection, init_top_p, scale, uniform;
  bool greedy;            // temperature under 1e-5
  bool certain_selection;  // selection temperature under 1e-5: all mass on the largest logit
  double unit;            // max(1, lam, beta), the unit of errors in J

  // False if a parameter is out of range.
  [[nodiscard]] TOPW_SHARED_CODE bool take(const GivenParameters &given);
  [[nodiscard]] TOPW_SHARED_CODE bool read(const topw_inputs &inputs, int64_t row) {
    return take(given_parameters(inputs, row));
  }
};

TOPW_SHARED_CODE inline bool Parameters::take(const GivenParameters &given) {
  lam = given.lam;
  beta = given.beta;
  c = beta - lam;
  temperature = given.temperature;
  selection = given.selection_temperature == 0 ? given.temperature : given.selection_temperature;
  init_top_p = given.init_top_p;
  scale = given.geom_scale;
  uniform = given.uniform;
  greedy = given.temperature < kGreedyBelow;
  certain_selection = selection < static_cast<double>(kGreedyBelow);
  const double larger = lam > beta ? lam : beta;
  unit = larger > 1 ? larger : 1;
  return is_finite_and_not_negative(given.lam) && is_finite_and_not_negative(given.beta) &&
         is_finite_and_not_negative(given.temperature) && is_finite_and_not_negative(given.selection_temperature) &&
         init_top_p > 0 && init_top_p <= 1 && scale - scale == 0 &&  // finite - finite is 0
         uniform >= 0 && uniform < 1;
}

}  // namespace topw
#endif
