// One row from logits to token: the stages of docs/contract/theory.md, each only where the one before could not settle the row.
#ifndef TOPW_ROW_H
#define TOPW_ROW_H

#include "alternation.h"
#include "array.h"
#include "edited_row.h"
#include "order.h"
#include "pool.h"
#include "ranked.h"
#include "topw.h"

struct topw_workspace {
  topw::EditedRow row;
  topw::Sorter sorter;
  topw::Ranked candidates;
  topw::Pool pool;
  topw::Alternation alternation;
  topw::Array<double> weights;
};

namespace topw {

// False if memory ran out; what was answered then means nothing.
bool sample_row(const topw_options &, const topw_table *, const topw_inputs &, int64_t row, topw_workspace &,
                const topw_outputs &);

}  // namespace topw
#endif
