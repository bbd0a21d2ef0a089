// The rules other than Top-W (docs/contract/rules.md): a row's rule, and the plan by which it keeps tokens.
//
// With y_i = (top - l_i) / Ts and w_i = exp(-y_i), a probability is w_i / Z. Every rule but `typical` keeps a prefix of
// the tokens by (logit descending, id ascending).
#ifndef TOPW_CUDA_RULES_H
#define TOPW_CUDA_RULES_H

#include <float.h>
#include <math.h>

#include "../native/parameters.h"
#include "../native/rule.h"
#include "platform.h"

namespace topw {

__device__ inline bool is_top_w(const topw_inputs &inputs, int64_t row) {
  return !inputs.rule || __ldg(inputs.rule + row) == TOPW_RULE_TOP_W;
}

__device__ TOPW_OUT_OF_LINE inline bool valid_rule(const topw_inputs &inputs, int64_t row) {
  Rule rule;
  return rule.read(inputs, row);
}

// The rule of a row; it must be valid.
__device__ inline Rule known_rule(const topw_inputs &inputs, int64_t row) {
  Rule rule;
  static_cast<void>(rule.read(inputs, row));
  return rule;
}

// The numbers of the whole row that a rule needs (statistics.cuh).
enum class Needs : int32_t { nothing, weights, spread };

struct RowNumbers {
  double rest, surprise, squares;   // weights: Z - 1, the sum of w y, the sum of w^2 minus 1
  double count, lowest, deviation;  // spread, of the finite logits; deviation is the unbiased standard deviation
};

enum class Limit : int32_t { first, edge, count, mass, entropy, cliff, typical };

// How a rule limits the kept tokens. The comments name the limits that use a field.
struct RulePlan {
  Limit limit;
  float edge;      // edge: the smallest logit kept
  int32_t count;   // count: number of tokens kept; entropy: size of the pool; cliff: minimum number of tokens kept
  int32_t finite;  // cliff: number of finite logits
  double target;   // mass, typical: the mass to reach; entropy: alpha; cliff: the smallest finite logit
  double center;   // entropy: ln Z; typical: the mean of y
  double total;    // mass, typical: Z; entropy: the sum of w (y + ln Z)
};

constexpr int32_t kCertifiedRank = 64;  // a row is certified if all kept tokens are among this many best ones
__device__ inline Needs needs_of(const Rule &rule) {
  switch (rule.code) {
    case TOPW_RULE_TOP_P: return rule.v0 < 1 ? Needs::weights : Needs::nothing;
    case TOPW_RULE_TOP_H:
    case TOPW_RULE_TYPICAL:
    case TOPW_RULE_EPSILON:
    case TOPW_RULE_ETA:
    case TOPW_RULE_P_LESS: return Needs::weights;
    case TOPW_RULE_TOP_N_SIGMA:
    case TOPW_RULE_MIN_K: return Needs::spread;
    default: return Needs::nothing;
  }
}

// A plan that keeps logits >= `edge`, and always the first token.
__device__ inline void keep_from(double edge, float top, RulePlan &plan) {
  plan.limit = edge <= static_cast<double>(top) ? Limit::edge : Limit::first;
  if (edge <= -static_cast<double>(FLT_MAX)) {
    plan.edge = -FLT_MAX;
    return;
  }
  plan.edge = static_cast<float>(edge);
  if (static_cast<double>(plan.edge) < edge) plan.edge = nextafterf(plan.edge, static_cast<float>(INFINITY));
}

// A plan that keeps weights >= `least`.
__device__ inline void keep_weights_from(double least, float top, const Parameters &P, RulePlan &plan) {
  keep_from(least > 0 ? static_cast<double>(top) + P.selection * log(least) : -static_cast<double>(INFINITY), top, plan);
}

__device__ inline void plan_cliff(double tau, float top, const RowNumbers &row, RulePlan &plan) {
  const double range = static_cast<double>(top) - row.lowest;
  if (range == 0) {
    plan.limit = tau > 0 ? Limit::edge : Limit::first;
    plan.edge = top;
    return;
  }
  const double flat = tau / range;
  plan.limit = Limit::cliff;
  plan.finite = static_cast<int32_t>(row.count);
  plan.count = static_cast<int32_t>(flat < row.count ? flat : row.count);
  plan.target = row.lowest;
}

// Called by one thread, with a finite `top`.
__device__ TOPW_OUT_OF_LINE inline void make_plan(const Rule &rule, const Parameters &P, float top,
                                                  const RowNumbers &row, RulePlan &plan) {
  const double v = rule.v0, Z = 1 + row.rest, mean = row.surprise / Z;
  plan = {};
  plan.edge = -FLT_MAX;
  plan.total = Z;
  switch (rule.code) {
    case TOPW_RULE_TOP_K:
      plan.limit = Limit::count;
      plan.count = static_cast<int32_t>(v);
      return;
    case TOPW_RULE_TOP_P:
      plan.limit = v < 1 ? Limit::mass : Limit::edge;
      plan.target = v * Z;
      return;
    case TOPW_RULE_TOP_H:
      plan.center = log1p(row.rest);
      plan.total = row.surprise + Z * plan.center;
      plan.limit = plan.total > 0 ? Limit::entropy : Limit::first;
      plan.count = static_cast<int32_t>(rule.v1);
      plan.target = v;
      return;
    case TOPW_RULE_TYPICAL:
      plan.limit = Limit::typical;
      plan.target = v * Z;
      plan.center = mean;
      return;
    case TOPW_RULE_MIN_P: return keep_weights_from(v, top, P, plan);
    case TOPW_RULE_EPSILON: return keep_weights_from(v * Z, top, P, plan);
    case TOPW_RULE_ETA: {
      const double relative = sqrt(v) * exp(-mean);
      return keep_weights_from(relative < v * Z ? relative : v * Z, top, P, plan);
    }
    case TOPW_RULE_P_LESS: return keep_weights_from((1 + row.squares) / Z, top, P, plan);
    case TOPW_RULE_TOP_N_SIGMA: return keep_from(static_cast<double>(top) - v * row.deviation, top, plan);
    case TOPW_RULE_MIN_K: return plan_cliff(v, top, row, plan);
    default: plan.limit = Limit::edge;
  }
}

}  // namespace topw
#endif
