#include "parameters.h"

#include <math.h>

#include <algorithm>

namespace topw {
namespace {

constexpr float kGreedyBelow = 1e-5f;

bool finite_and_not_negative(float value) { return value >= 0 && value < INFINITY; }

}  // namespace

bool Parameters::read(const topw_inputs &inputs, int64_t row) {
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
  unit = std::max({1.0, lam, beta});
  return finite_and_not_negative(inputs.lam[row]) && finite_and_not_negative(inputs.beta[row]) &&
         finite_and_not_negative(drawing) && finite_and_not_negative(own_selection) && init_top_p > 0 &&
         init_top_p <= 1 && isfinite(scale) && uniform >= 0 && uniform < 1;
}

}  // namespace topw
