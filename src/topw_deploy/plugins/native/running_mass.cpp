#include "running_mass.h"

#include <algorithm>

namespace topw {
namespace {

constexpr int64_t kBuckets = 4096;

}  // namespace

double RunningMass::total(int64_t tokens) const {
  double sum = 0;
  for (int64_t i = 0; i < tokens; ++i) sum += weight[i];
  return sum;
}

int64_t RunningMass::bucket(double key) const {
  const double at = key * scale_;
  return at < static_cast<double>(kBuckets - 1) ? static_cast<int64_t>(at) : kBuckets - 1;
}

bool RunningMass::find(const Ranked &tokens, double target, bool beyond, double range, Sorter &sorter) {
  tokens_ = tokens.size;
  double largest = 0;
  for (int64_t i = 0; i < tokens_; ++i) largest = std::max(largest, key[i]);
  range = std::min(range, largest);
  scale_ = range > 0 ? static_cast<double>(kBuckets) / range : 0;
  if (!(scale_ < 1e300)) scale_ = 0;
  if (!sums_.reserve(kBuckets)) return false;
  std::fill(sums_.data(), sums_.data() + kBuckets, 0.0);
  for (int64_t i = 0; i < tokens_; ++i) sums_[bucket(key[i])] += weight[i];
  const auto enough = [&](double sum) { return beyond ? sum > target : sum >= target; };
  double before = 0;
  for (bucket_ = 0; bucket_ < kBuckets && !enough(before + sums_[bucket_]); ++bucket_) before += sums_[bucket_];
  reached_ = bucket_ < kBuckets;
  if (!reached_) bucket_ = bucket(largest);
  if (!sort_bucket(tokens, bucket_, sorter)) return false;
  for (rank_ = 0; reached_ && rank_ < inside_count_ - 1; ++rank_)
    if (enough(before += weight[inside_[rank_]])) break;
  if (!reached_) rank_ = inside_count_ - 1;
  place_ = inside_[rank_];
  return true;
}

bool RunningMass::sort_bucket(const Ranked &tokens, int64_t chosen, Sorter &sorter) {
  if (!inside_.reserve(tokens_) || !rank_of_.reserve(tokens_) || !sorter.reserve(tokens_)) return false;
  inside_count_ = 0;
  for (int64_t i = 0; i < tokens_; ++i)
    if (bucket(key[i]) == chosen) sorter.set(inside_count_++, descending_key(tokens.logit[i]), static_cast<int32_t>(i));
  const Sorter::Entry *by_logit = sorter.sort(inside_count_);
  for (int64_t n = 0; n < inside_count_; ++n) inside_[n] = by_logit[n].item;
  for (int64_t n = 0; n < inside_count_; ++n) sorter.set(n, ascending_key(key[inside_[n]]), inside_[n]);
  const Sorter::Entry *by_key = sorter.sort(inside_count_);
  for (int64_t n = 0; n < inside_count_; ++n) {
    inside_[n] = by_key[n].item;
    rank_of_[by_key[n].item] = static_cast<int32_t>(n);
  }
  return true;
}

bool RunningMass::is_up_to_found(int64_t i) const {
  const int64_t at = bucket(key[i]);
  return at < bucket_ || (at == bucket_ && rank_of_[i] <= rank_);
}

}  // namespace topw
