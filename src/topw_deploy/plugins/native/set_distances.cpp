#include "set_distances.h"

#include <math.h>
#include <string.h>

#include <algorithm>

namespace topw {
namespace {

constexpr int64_t kMostRemembered = 16;
constexpr double kHalfUlp = 0x1p-24;      // float32's relative rounding error
constexpr double kLargestLength = 1e18;   // beyond, float32 could overflow: nominate every member

int64_t round_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

// -inf if there are fewer than k values; `size` is a multiple of 16.
double kth_largest(const float *values, int64_t size, int64_t k) {
  if (k == 1) return static_cast<double>(hot().highest_of(values, size));
  return size < k ? -INFINITY : static_cast<double>(value_reached_by(values, size, k, k));
}

}  // namespace

bool SetDistances::open(const topw_options &options, const topw_table &table, const Ranked &pool) {
  table_ = Table(table, options.metric);
  metric_ = options.metric;
  pool_ = &pool;
  neighbours_ = std::max(1, options.knn_k);
  remembered_ = neighbours_ <= kMostRemembered ? neighbours_ : 0;
  const int64_t d = table_.hidden();
  stride_ = round_up(d, 16) + 16;  // avoids multiples of the cache's ways
  pairs_ = joined_ = 0;
  // A product of d terms in blocks of kDepth rounds each term at most that often (Higham, Accuracy and Stability of
  // Numerical Algorithms, 3.1), coordinates and bias once each. 1.01 covers this bound's own rounding.
  relative_error_ = static_cast<double>(std::min(d, kDepth) + d / kDepth + 12) * kHalfUlp * 1.01;

  const int64_t m = pool.size;
  if (!slot_of_.reserve(m) || !was_member_.reserve(m) || !norm_.reserve(m) || !distance_.reserve(m) ||
      !compared_.reserve(m) || !held_.reserve(m) || !near_.reserve(m * remembered_) ||
      !points_.reserve(kChunk * stride_) || !squared_length_.reserve(kChunk) || !own_row_.reserve(d) ||
      !other_row_.reserve(d))
    return false;
  std::fill(norm_.data(), norm_.data() + m, -1.0);
  memset(was_member_.data(), 0, static_cast<size_t>(m));
  forget();
  return true;
}

void SetDistances::forget() {
  slots_ = packed_ = 0;
  longest_ = 0;
  std::fill(slot_of_.data(), slot_of_.data() + pool_->size, -1);
  std::fill(compared_.data(), compared_.data() + pool_->size, 0);
  std::fill(held_.data(), held_.data() + pool_->size, 0);
}

bool SetDistances::set_members(const uint8_t *member) {
  const int64_t m = pool_->size;
  if (slots_ > 2 * m + 4 * kPanel) forget();  // bounds the columns of former members
  for (int64_t i = 0; i < m; ++i)
    if (!member[i] && slot_of_[i] >= 0) {
      bias_[slot_of_[i]] = -INFINITY;
      place_at_[slot_of_[i]] = -1;
      slot_of_[i] = -1;
    }
  const int64_t first = slots_;  // a multiple of kPanel, as are empty columns
  for (int64_t i = 0; i < m; ++i)
    if (member[i] && slot_of_[i] < 0 && !add_member(i)) return false;
  const int64_t whole = round_up(slots_, kPanel);
  if (first == whole) return true;
  std::fill(place_at_.data() + slots_, place_at_.data() + whole, -1);
  std::fill(bias_.data() + slots_, bias_.data() + whole, -INFINITY);
  slots_ = whole;
  return true;
}

bool SetDistances::add_member(int64_t place) {
  if (!place_at_.extend(slots_, slots_ + kPanel) || !bias_.extend(slots_, slots_ + kPanel)) return false;
  slot_of_[place] = static_cast<int32_t>(slots_);
  place_at_[slots_++] = static_cast<int32_t>(place);
  joined_ += !was_member_[place];
  was_member_[place] = 1;
  return true;
}

// Interleaves new members' points in panels.
bool SetDistances::pack_members() {
  const int64_t d = table_.hidden();
  if (!panels_.extend(packed_ * d, slots_ * d)) return false;
  for (; packed_ < slots_; packed_ += kPanel) {
    for (int64_t j = 0; j < kPanel; ++j) {
      const int64_t place = place_at_[packed_ + j];
      float *point = &points_[j * stride_];
      if (place < 0) {
        memset(point, 0, static_cast<size_t>(stride_) * sizeof(float));
        continue;
      }
      const float *row = table_.row(pool_->id[place], own_row_.data());
      const double squared = hot().point(row, norm_of(place, row), table_.by(), point, stride_);
      longest_ = std::max(longest_, squared >= 0 ? sqrt(squared) : INFINITY);
      bias_[packed_ + j] = metric_ == TOPW_COSINE ? 0.0f : static_cast<float>(-0.5 * squared);
    }
    hot().interleave(points_.data(), stride_, d, &panels_[packed_ * d], kPanel);
  }
  return true;
}

double SetDistances::norm_of(int64_t place, const float *row) {
  if (norm_[place] < 0) norm_[place] = table_.norm(row);
  return norm_[place];
}

bool SetDistances::measure(const int32_t *places, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    if (!drop_departed(places[i])) compared_[places[i]] = 0;
  int32_t group[kChunk];
  while (true) {  // groups tokens compared with equally many slots
    int64_t from = slots_, size = 0;
    for (int64_t i = 0; i < count; ++i) from = std::min(from, compared_[places[i]]);
    if (from == slots_) break;
    for (int64_t i = 0; i < count; ++i)
      if (compared_[places[i]] == from) group[size++] = places[i];
    if (!compare(group, size, from)) return false;
    for (int64_t i = 0; i < size; ++i) compared_[group[i]] = slots_;
  }
  for (int64_t i = 0; i < count; ++i)
    if (remembered_ == 0) compared_[places[i]] = 0;
  return true;
}

// Drops the remembered members that left S. False, and then none is remembered, if a member left and not all compared
// ones were remembered: another of them may now be among the k nearest.
bool SetDistances::drop_departed(int64_t place) {
  Near *near = near_.data() + place * remembered_;
  int32_t held = 0;
  for (int32_t n = 0; n < held_[place]; ++n)
    if (place_at_[near[n].slot] >= 0) near[held++] = near[n];
  const bool whole = held == held_[place] || held_[place] < neighbours_;
  held_[place] = whole ? held : 0;
  if (held > 0) distance_[place] = mean_of(near, held);
  return whole;
}

bool SetDistances::compare(const int32_t *places, int64_t count, int64_t from) {
  const int64_t columns = slots_ - from, d = table_.hidden(), rows = round_up(count, kRowGroup);
  if (!sums_.reserve(rows * columns) || !taken_.reserve(columns + 16) || !nominated_.reserve(columns + 16) ||
      !found_.reserve(columns + kMostRemembered))
    return false;
  if (!pack_members()) return false;
  points_of(places, count);
  for (int64_t i = 0; i < rows; ++i)
    memcpy(&sums_[i * columns], &bias_[from], static_cast<size_t>(columns) * sizeof(float));
  for (int64_t k = 0; k < d; k += kDepth)
    for (int64_t slot = from; slot < slots_; slot += kPanel)
      hot().closeness(&points_[k], rows, stride_, &panels_[slot * d + k * kPanel], std::min(kDepth, d - k),
                      &sums_[slot - from], columns);
  for (int64_t slot = from; slot < slots_; ++slot) pairs_ += place_at_[slot] >= 0 ? count : 0;
  for (int64_t i = 0; i < count; ++i) set_distance(places[i], &sums_[i * columns], from, squared_length_[i]);
  return true;
}

void SetDistances::points_of(const int32_t *places, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float *row = table_.row(pool_->id[places[i]], own_row_.data());
    squared_length_[i] = hot().point(row, norm_of(places[i], row), table_.by(), &points_[i * stride_], stride_);
  }
  for (int64_t i = count; i < round_up(count, kRowGroup); ++i)
    memset(&points_[i * stride_], 0, static_cast<size_t>(stride_) * sizeof(float));
}

// The sum a member needs to be possibly among the k nearest. Sums are x.y for `cosine`, else x.y - |y|^2 / 2; larger is
// nearer. Each is within `error` of exact.
float SetDistances::threshold(int64_t place, const float *sums, int64_t columns, double squared_length) const {
  const double length = sqrt(squared_length);
  if (!(length < kLargestLength && longest_ < kLargestLength)) return -INFINITY;
  const double error = relative_error_ * (length + 0.5 * longest_) * longest_ + 1e-30;
  const double kth = kth_largest(sums, columns, neighbours_);
  double bound = kth - 2 * error;
  if (held_[place] == neighbours_) {
    const double own = near_[place * remembered_ + neighbours_ - 1].distance;
    bound = std::max(bound, (metric_ == TOPW_COSINE ? 1 - own : 0.5 * (squared_length - own * own)) - error);
  }
  return nextafterf(static_cast<float>(bound), -INFINITY);
}

void SetDistances::set_distance(int64_t place, const float *sums, int64_t from, double squared_length) {
  const int64_t columns = slots_ - from;
  const float bound = threshold(place, sums, columns, squared_length);
  const int32_t first = static_cast<int32_t>(from);
  const int64_t count = hot().take_from(sums, columns, first, bound, taken_.data(), nominated_.data());
  const float *row = table_.row(pool_->id[place], own_row_.data());
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (place_at_[nominated_[i]] < 0) continue;
    found_[found++] = {distance_to_slot(row, norm_[place], nominated_[i]), nominated_[i]};
    if (neighbours_ == 1 && found_[found - 1].distance == 0) break;  // a duplicate: nothing is nearer
  }
  store_nearest(place, found);
}

double SetDistances::distance_to_slot(const float *row, double norm, int32_t slot) {
  const int64_t place = place_at_[slot];
  const float *other = table_.row(pool_->id[place], other_row_.data());
  double distance;
  if (metric_ == TOPW_COSINE)
    distance = 1.0 - std::clamp(hot().scalar_product(row, norm, other, norm_[place], table_.by()), -1.0, 1.0);
  else
    distance = sqrt(hot().squared_distance(row, norm, other, norm_[place], table_.by()));
  return distance >= 0 ? distance : INFINITY;  // NaN: infinitely far
}

// Stores the k nearest among the remembered and the first `found` of found_.
void SetDistances::store_nearest(int64_t place, int64_t found) {
  Near *near = near_.data() + place * remembered_;
  for (int32_t n = 0; n < held_[place]; ++n) found_[found++] = near[n];
  const int32_t k = static_cast<int32_t>(std::min(found, neighbours_));
  std::sort(found_.data(), found_.data() + found, [](const Near &x, const Near &y) {
    return x.distance < y.distance || (x.distance == y.distance && x.slot < y.slot);
  });
  distance_[place] = mean_of(found_.data(), k);
  if (remembered_ == 0) return;
  std::copy(found_.data(), found_.data() + k, near);
  held_[place] = k;
}

double SetDistances::mean_of(const Near *near, int32_t count) {
  double sum = 0;
  for (int32_t n = 0; n < count; ++n) sum += near[n].distance;
  return sum / count;
}

}  // namespace topw
