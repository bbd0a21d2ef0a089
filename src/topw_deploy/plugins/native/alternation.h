// Stage C: the alternation with few distances, for uncertified rows; the literal rule for a negative geom_scale
// (docs/contract/theory.md, sections 3 and 4).
#ifndef TOPW_ALTERNATION_H
#define TOPW_ALTERNATION_H

#include "parameters.h"
#include "pool.h"
#include "set_distances.h"

namespace topw {

class Alternation {
 public:
  int64_t steps = 0;              // alternations
  int64_t pairs = 0;              // distances computed
  int64_t literal_pairs = 0;      // under the literal rule
  int64_t kept = 0;

  // Writes the crop to members(). `table`: NULL for the uniform metric. False if out of memory.
  [[nodiscard]] bool run(const topw_options &, const topw_table *, const Pool &, const Parameters &, Sorter &);
  const uint8_t *members() const { return member_.data(); }  // [pool]

 private:
  [[nodiscard]] bool start();
  [[nodiscard]] bool step();
  [[nodiscard]] bool measure_all();
  [[nodiscard]] bool measure_survivors();
  double lower_bound_of_best() const;
  void set_lower_bound(int64_t i);
  void prune(double reached);
  void scan();
  int64_t cycle_length();

  const topw_options *options_ = nullptr;
  const topw_table *table_ = nullptr;
  const Pool *pool_ = nullptr;
  const Parameters *P_ = nullptr;
  Sorter *sorter_ = nullptr;
  SetDistances distances_;
  int64_t entered_ = 0;           // tokens that entered the set in the last step
  int64_t saved_at_ = 0;          // step of saved_

  Array<uint8_t> member_, saved_;
  Array<uint8_t> candidate_;      // may enter the set
  Array<uint8_t> exact_;          // far_ is exact, not a lower bound
  Array<double> far_;             // dist(i, S)
};

}  // namespace topw
#endif
