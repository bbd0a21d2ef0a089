// A row's sampling rule and its values (docs/contract/graph.md).
#ifndef TOPW_RULE_H
#define TOPW_RULE_H

#include <math.h>

#include "host_device.h"
#include "topw.h"

namespace topw {

constexpr float kMostCount = 16777216.0f;  // the largest k, or pool: float32 holds every integer up to here

struct Rule {
  int32_t code = TOPW_RULE_TOP_W;
  double v0 = 0, v1 = 0;

  // False for an unknown code or a value outside its interval. Values that the rule does not use are not checked.
  [[nodiscard]] TOPW_SHARED_CODE bool take(int32_t given, float first, float second);
  [[nodiscard]] TOPW_SHARED_CODE bool read(const topw_inputs &inputs, int64_t row) {
    return !inputs.rule || take(inputs.rule[row], inputs.rule_values[2 * row], inputs.rule_values[2 * row + 1]);
  }
};

TOPW_SHARED_CODE inline bool is_count(float value) {
  return value >= 1 && value <= kMostCount && value == floorf(value);
}

TOPW_SHARED_CODE inline bool is_share(float value) { return value > 0 && value <= 1; }

TOPW_SHARED_CODE inline bool Rule::take(int32_t given, float first, float second) {
  code = given;
  v0 = static_cast<double>(first);
  v1 = static_cast<double>(second);
  switch (given) {
    case TOPW_RULE_TOP_W:
    case TOPW_RULE_P_LESS:
    case TOPW_RULE_NONE: return true;
    case TOPW_RULE_TOP_K: return is_count(first);
    case TOPW_RULE_TOP_P: return is_share(first);
    case TOPW_RULE_MIN_P: return first >= 0 && first <= 1;
    case TOPW_RULE_TOP_H: return is_share(first) && is_count(second);
    case TOPW_RULE_TYPICAL:
    case TOPW_RULE_EPSILON:
    case TOPW_RULE_ETA: return first > 0 && first < 1;
    case TOPW_RULE_TOP_N_SIGMA:
    case TOPW_RULE_MIN_K: return first >= 0 && first < static_cast<float>(INFINITY);
    default: return false;
  }
}

}  // namespace topw
#endif
