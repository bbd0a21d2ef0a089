#include "draw.h"

#include <math.h>

#include <algorithm>

namespace topw {
namespace {

constexpr double kNegligible = -60;  // skip blocks whose largest weight is below e^-60

}  // namespace

Draw draw(const float *logits, int64_t kept, const Parameters &P, double *weights) {
  const double top = static_cast<double>(logits[0]);
  double total = 0;
  for (int64_t i = 0; i < kept; ++i) {
    weights[i] = exp((static_cast<double>(logits[i]) - top) / P.temperature);
    total += weights[i];
  }
  double G = 0;
  int64_t place = 0;
  for (; place < kept - 1; ++place) {
    G += weights[place];
    if (G - P.uniform * total > 0) break;
  }
  return {place, (static_cast<double>(logits[place]) - top) / P.temperature - log(total)};
}

bool draw_unranked(const Ranked &crop, const Parameters &P, RunningMass &running, Sorter &sorter, Draw &drawn) {
  if (!running.reserve(crop.size)) return false;
  const float *logits = crop.logit.data(), best = *std::max_element(logits, logits + crop.size);
  const double top = static_cast<double>(best);
  hot().weights(logits, crop.size, best, 1 / P.temperature, running.weight.data());
  for (int64_t i = 0; i < crop.size; ++i) running.key[i] = top - static_cast<double>(logits[i]);
  const double total = running.total(crop.size);
  if (!running.find(crop, P.uniform * total, true, -kNegligible * P.temperature, sorter)) return false;
  const int64_t place = running.place();
  drawn = {place, (static_cast<double>(logits[place]) - top) / P.temperature - log(total)};
  return true;
}

double mass(const float *logits, int64_t kept, const EditedRow &row, const Parameters &P) {
  if (P.certain_selection) return 1;
  const double top = static_cast<double>(row.top()), rate = 1 / P.selection;
  double ours = 0, all = 0;
  for (int64_t i = 0; i < kept; ++i) ours += exp((static_cast<double>(logits[i]) - top) / P.selection);
  for (int64_t b = 0; b < row.blocks(); ++b)
    if ((static_cast<double>(row.maximum(b)) - top) * rate > kNegligible)
      all += hot().sum_of_weights(row.block(b), row.top(), rate);
  return ours / all;
}

}  // namespace topw
