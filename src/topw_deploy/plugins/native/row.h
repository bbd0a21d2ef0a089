// One row from logits to token. Top-W runs the stages of docs/contract/theory.md, each only if the previous one leaves
// the row undecided; other rules use rule_crop.h.
#ifndef TOPW_ROW_H
#define TOPW_ROW_H

#include "alternation.h"
#include "array.h"
#include "edited_row.h"
#include "order.h"
#include "pool.h"
#include "ranked.h"
#include "rule_crop.h"
#include "running_mass.h"
#include "topw.h"

struct topw_workspace {
  topw::EditedRow row;
  topw::Sorter sorter;
  topw::Ranked candidates;
  topw::Pool pool;
  topw::Alternation alternation;
  topw::RuleCrop rule_crop;
  topw::RunningMass running;
  topw::Array<double> weights;
};

namespace topw {

// False if out of memory; the answer is then undefined.
bool sample_row(const topw_options &, const topw_table *, const topw_inputs &, int64_t row, topw_workspace &,
                const topw_outputs &);

}  // namespace topw
#endif
