// What a rule keeps of a row.
#ifndef TOPW_CROP_H
#define TOPW_CROP_H

#include "ranked.h"
#include "topw.h"

namespace topw {

struct Crop {
  const Ranked *tokens = nullptr;  // the first `kept` of them
  int64_t kept = 0;
  bool certified = false;
  bool ranked = true;  // by (logit descending, id ascending); else by id, and all of `tokens`
  topw_report report = {};
};

}  // namespace topw
#endif
