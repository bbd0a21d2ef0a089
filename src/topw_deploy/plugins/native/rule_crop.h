// The kept set under a rule other than Top-W (docs/contract/rules.md): from the best tokens and bounds on the row's
// sums if these prove it, else from exact sums over the vocabulary.
#ifndef TOPW_RULE_CROP_H
#define TOPW_RULE_CROP_H

#include "best.h"
#include "crop.h"
#include "row_sums.h"
#include "rule.h"
#include "running_mass.h"

namespace topw {

// The sums that a rule needs from the first pass over the logits.
EditedRow::Sums sums_of(const Rule &);

class RuleCrop {
 public:
  // For neither Top-W nor greedy rows. `crop` points into this object. False if out of memory.
  [[nodiscard]] bool choose(const EditedRow &, const Rule &, double selection, Sorter &, Crop &crop);

 private:
  enum class Step { decided, undecided, out_of_memory };

  // rule_crop.cpp
  Step top_k(int64_t k);
  Step min_k();
  Step top_n_sigma();
  Step keep_above_threshold(Interval (*threshold)(const RowSums &, const Rule &), bool with_D);
  Step keep_weights_from(Interval threshold, bool exact);
  template <class IsKept>
  Step keep_logits_from(Interval cut, const IsKept *is_kept);
  Step keep_everything();
  Step keep_first(int64_t kept);  // keeps the first `kept` of the best tokens
  Step keep_found();              // keeps the tokens in found_, or the row's first one if there are none
  Step keep_top_alone();

  // rule_mass.cpp
  Step top_p();
  Step top_h();
  Step typical();
  Step keep_first_reaching(Interval target);
  Step keep_up_to_entropy(int64_t size);
  Step keep_typical_of_best(Interval m, Interval target);
  Step keep_members();
  Step keep_all_up_to_mass(double target);
  Step keep_all_up_to_entropy(int64_t pool);
  Step keep_all_typical(double mean, double target);
  [[nodiscard]] bool take_and_weigh(int64_t pool);
  Step keep_up_to_found(bool with_last);

  const EditedRow *row_ = nullptr;
  const Rule *rule_ = nullptr;
  double selection_ = 1;
  Sorter *sorter_ = nullptr;
  Crop *crop_ = nullptr;
  Best best_;
  RowSums sums_;
  Ranked found_;
  RunningMass running_;
  Array<double> G_, D_;     // sums over the first tokens
  Array<uint8_t> member_;   // [best tokens]
};

}  // namespace topw
#endif
