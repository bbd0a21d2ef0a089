// Finds where a running sum over many tokens reaches a target, without sorting all of them.
#ifndef TOPW_RUNNING_MASS_H
#define TOPW_RUNNING_MASS_H

#include "ranked.h"

namespace topw {

// Tokens by (key ascending, logit descending, place ascending). Their weights are summed by buckets of the key; only
// the bucket in which the sum reaches the target is sorted.
class RunningMass {
 public:
  Array<double> key, weight;  // [tokens], filled by the caller; key >= 0

  [[nodiscard]] bool reserve(int64_t tokens) { return key.reserve(tokens) && weight.reserve(tokens + 8); }
  double total(int64_t tokens) const;

  // Finds the first token at which the sum is at least `target`, or larger than it if `beyond`; the last token if there
  // is none. `range`: larger keys are rarely needed. False if out of memory.
  [[nodiscard]] bool find(const Ranked &tokens, double target, bool beyond, double range, Sorter &);
  int64_t place() const { return place_; }
  bool has_reached() const { return reached_; }
  // Whether the token at place i is the found one or comes before it.
  bool is_up_to_found(int64_t i) const;

 private:
  int64_t bucket(double key) const;
  [[nodiscard]] bool sort_bucket(const Ranked &tokens, int64_t chosen, Sorter &);

  double scale_ = 0;
  int64_t tokens_ = 0, place_ = 0, bucket_ = 0, rank_ = 0;
  bool reached_ = false;
  Array<double> sums_;
  Array<int32_t> inside_, rank_of_;
  int64_t inside_count_ = 0;
};

}  // namespace topw
#endif
