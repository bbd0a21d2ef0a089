// The input embeddings, read by row in any storage type (docs/contract/graph.md, section 2).
#ifndef TOPW_TABLE_H
#define TOPW_TABLE_H

#include "hot.h"
#include "topw.h"

namespace topw {

class Table {
 public:
  Table() = default;
  explicit Table(const topw_table &table, int32_t metric);

  // Whether all rows below `vocab` are readable.
  static bool is_readable(const topw_table &table, int64_t vocab);

  int64_t hidden() const { return by_.hidden; }
  const Normalisation &by() const { return by_; }

  // A row as float32, in place or decoded into `decoded` [hidden].
  const float *row(int64_t token, float *decoded) const;
  // The norm of its point, at least 1e-12.
  double norm(const float *row) const;

 private:
  topw_table stored_{};
  Normalisation by_{};
};

}  // namespace topw
#endif
