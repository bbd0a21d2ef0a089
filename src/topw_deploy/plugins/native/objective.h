// J over the prefixes of an order (docs/contract/theory.md, Notation), in double, in the reference's order of
// operations.
#ifndef TOPW_OBJECTIVE_H
#define TOPW_OBJECTIVE_H

#include <math.h>
#include <stdint.h>

#include "host_device.h"

namespace topw {

constexpr double kSmallestLogWeight = -60.0;  // smaller weights count as e^-60

TOPW_SHARED_CODE inline double log_weight(float logit, float top, double temperature) {
  return (static_cast<double>(logit) - static_cast<double>(top)) / temperature;
}

TOPW_SHARED_CODE inline double weight(double log_weight) {
  return exp(log_weight < kSmallestLogWeight ? kSmallestLogWeight : log_weight);
}

// J_k = Phi_k / Gamma_k + c log Gamma_k of the tokens added so far, by phi descending, and its first maximum. For c <=
// 0 J never rises: the first prefix wins, despite rounding.
//
// Phi_k / Gamma_k never rises, so a J below the best stays below until c log Gamma makes up the difference: no
// logarithm is needed up to that mass.
class Prefixes {
 public:
  TOPW_SHARED_CODE explicit Prefixes(double c) : c_(c) {}

  TOPW_SHARED_CODE void add(double p, double phi) {
    before_ = Gamma_;
    Gamma_ += p;
    Phi_ += p * phi;
    ++size_;
    if (Gamma_ > hopeless_up_to_) compare();
  }

  TOPW_SHARED_CODE int64_t size() const { return size_; }
  TOPW_SHARED_CODE int64_t first_maximiser() const { return first_maximiser_; }
  TOPW_SHARED_CODE double best() const { return best_; }
  TOPW_SHARED_CODE double mass_before() const { return mass_before_; }  // of the best prefix without its last token
  TOPW_SHARED_CODE double Gamma() const { return Gamma_; }
  TOPW_SHARED_CODE double Phi() const { return Phi_; }

 private:
  static constexpr double kRounding = 1e-9;  // ties' bound of J
  static constexpr double kWorthwhile = 8;   // tokens whose logarithms cost as much as one exponential

  TOPW_SHARED_CODE void compare() {
    const double mean = Phi_ / Gamma_, J = mean + c_ * log(Gamma_);
    if (size_ == 1 || (c_ > 0 && J > best_)) {
      best_ = J;
      first_maximiser_ = size_;
      mass_before_ = before_;
      if (c_ <= 0) hopeless_up_to_ = INFINITY;
      return;
    }
    const double lacking = best_ - J - kRounding * (1 + c_ + fabs(best_) + fabs(mean));
    if (lacking * Gamma_ > kWorthwhile * c_ * (Gamma_ - before_)) hopeless_up_to_ = Gamma_ * exp(lacking / c_);
  }

  double c_, Gamma_ = 0, Phi_ = 0, best_ = 0, before_ = 0, mass_before_ = 0, hopeless_up_to_ = 0;
  int64_t size_ = 0, first_maximiser_ = 0;
};

}  // namespace topw
#endif
