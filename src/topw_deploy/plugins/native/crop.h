// The tokens of a row that a rule keeps.
#ifndef TOPW_CROP_H
#define TOPW_CROP_H

#include "ranked.h"
#include "topw.h"

namespace topw {

struct Crop {
  const Ranked *tokens = nullptr;  // the first `kept` of them
  int64_t kept = 0;
  bool certified = false;
  bool ranked = true;  // ordered by (logit descending, id ascending); if not, by id, and all of `tokens` are kept
  topw_report report = {};
};

}  // namespace topw
#endif
