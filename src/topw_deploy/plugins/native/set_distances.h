// dist(i, S) of pool tokens to a changing set S (docs/contract/graph.md, section 2), with few distances in double.
//
// Float32 products with a rigorous error bound nominate a token's possible nearest members, whose distances are then
// computed in double. Each token remembers its nearest members, so the next step compares only new ones.
#ifndef TOPW_SET_DISTANCES_H
#define TOPW_SET_DISTANCES_H

#include "array.h"
#include "ranked.h"
#include "table.h"
#include "topw.h"

namespace topw {

constexpr int64_t kChunk = 192;  // tokens measured at a time

class SetDistances {
 public:
  // Sets the pool; places below index it. False if out of memory.
  [[nodiscard]] bool open(const topw_options &, const topw_table &, const Ranked &pool);
  // S = places with member[place]. False if out of memory.
  [[nodiscard]] bool set_members(const uint8_t *member);
  // Computes distances of `count` <= kChunk places outside S. False if out of memory.
  [[nodiscard]] bool measure(const int32_t *places, int64_t count);
  // dist(i, S) of a measured place: to the nearest member, or the mean of the knn_k nearest.
  double distance(int64_t place) const { return distance_[place]; }

  int64_t pairs() const { return pairs_; }        // pairs (token, member) compared so far
  int64_t joined() const { return joined_; }      // tokens ever in S

 private:
  struct Near {
    double distance;
    int32_t slot;
  };

  [[nodiscard]] bool add_member(int64_t place);
  [[nodiscard]] bool pack_members();
  void forget();
  bool drop_departed(int64_t place);
  [[nodiscard]] bool compare(const int32_t *places, int64_t count, int64_t from);
  void points_of(const int32_t *places, int64_t count);
  float threshold(int64_t place, const float *sums, int64_t columns, double squared_length) const;
  void set_distance(int64_t place, const float *sums, int64_t from, double squared_length);
  double distance_to_slot(const float *row, double norm, int32_t slot);
  void store_nearest(int64_t place, int64_t found);
  static double mean_of(const Near *near, int32_t count);
  double norm_of(int64_t place, const float *row);

  Table table_;
  const Ranked *pool_ = nullptr;
  int32_t metric_ = 0;
  int64_t neighbours_ = 1;      // k
  int64_t remembered_ = 0;      // k, or 0 if too large to remember
  int64_t stride_ = 0;          // stride of points_
  int64_t slots_ = 0;           // member columns; former members leave theirs empty
  int64_t packed_ = 0;          // slots packed into panels_, on first use
  int64_t pairs_ = 0, joined_ = 0;
  double longest_ = 0;          // length of the members' points
  double relative_error_ = 0;   // of a product, relative to the lengths' product

  Array<int32_t> slot_of_;      // [pool] -1: no member
  Array<int32_t> place_at_;     // [slots] -1: empty
  Array<uint8_t> was_member_;   // [pool]
  Array<float> panels_;         // [slots / kPanel, hidden, kPanel] the members' points
  Array<float> bias_;           // [slots] initial value of the product; -inf if empty
  Array<float> points_, sums_;  // [kChunk, stride_], [kChunk, columns]
  Array<double> squared_length_;  // [kChunk]
  Array<double> norm_;          // [pool] of table rows; -1: not computed
  Array<double> distance_;      // [pool]
  Array<int64_t> compared_;     // [pool] slots compared so far
  Array<int32_t> held_;         // [pool] remembered count
  Array<Near> near_;            // [pool, remembered_]
  Array<Near> found_;           // scratch
  Array<float> taken_, own_row_, other_row_;
  Array<int32_t> nominated_;
};

}  // namespace topw
#endif
