#include "edited_row.h"

#include <math.h>
#include <string.h>

#include <algorithm>

namespace topw {
namespace {

constexpr int64_t kSampled = 8;  // blocks from which the centre of the sums is chosen

float edit_logit(float logit, float penalty, float bias) {
  return (logit > 0 ? logit / penalty : logit * penalty) + bias;
}

}  // namespace

EditedRow::Verdict EditedRow::open(const topw_inputs &inputs, int64_t row, Sums wanted, double rate) {
  vocab_ = inputs.vocab;
  blocks_ = (vocab_ + kBlock - 1) / kBlock;
  padded_blocks_ = (blocks_ + 15) / 16 * 16;
  raw_ = inputs.logits + row * vocab_;
  patch_count_ = 0;
  const int64_t patches = std::min(blocks_, inputs.edits + 1);
  if (!maxima_.reserve(padded_blocks_) || !patch_of_.reserve(blocks_) || !patched_block_.reserve(patches) ||
      !patches_.reserve(patches * kBlock) || !masked_.reserve(kBlock))
    return Verdict::out_of_memory;
  memset(patch_of_.data(), -1, static_cast<size_t>(blocks_) * sizeof(int32_t));

  take_mask(inputs, row);
  // No edit repairs NaN or +inf.
  const int64_t whole = vocab_ / kBlock;
  has_sums_ = wanted != Sums::none && !allowed_ && whole >= kSampled;
  if (has_sums_ ? maxima_and_sums(whole, wanted, rate) : maxima_of(raw_, 0, whole)) return Verdict::invalid;
  if (whole < blocks_) patch(whole);
  if (!apply_edits(inputs, row)) return Verdict::invalid;
  if (has_sums_) correct_sums(whole, wanted, rate);
  return measure_maxima() ? Verdict::valid : Verdict::invalid;
}

// Computes maxima and sums in one pass; true if a logit is NaN. The moments' centre is near most logits. That of the
// weights is near the largest logit, so that its weight does not overflow.
bool EditedRow::maxima_and_sums(int64_t whole, Sums wanted, double rate) {
  moments_ = {};
  weights_ = removed_ = 0;
  hot().block_maxima(raw_, kSampled, maxima_.data());
  centre_ = *std::max_element(maxima_.data(), maxima_.data() + kSampled);
  if (wanted == Sums::moments) {
    Moments sample;
    hot().exact_moments(raw_, kSampled, 0, sample);
    centre_ = static_cast<float>(sample.sum / sample.count);
  }
  if (!(fabsf(centre_) < INFINITY) || (wanted == Sums::weights && !fits_rough(centre_, rate))) {
    has_sums_ = false;
    return maxima_of(raw_, 0, whole);
  }
  if (wanted == Sums::weights) return hot().maxima_and_weights(raw_, whole, centre_, rate, maxima_.data(), weights_);
  moments_.count = static_cast<double>(whole * kBlock);
  return hot().maxima_and_moments(raw_, whole, centre_, maxima_.data(), moments_);
}

// Corrects the sums for patched blocks. Those before `whole` were summed without their patches. A banned token may have
// had nearly all of a sum: then subtracting its part leaves little but rounding errors, or NaN.
void EditedRow::correct_sums(int64_t whole, Sums wanted, double rate) {
  const float none[1] = {0};
  const Weighing every = {centre_, INFINITY, -INFINITY, rate, false};
  for (int64_t i = 0; i < patch_count_; ++i) {
    const int64_t b = patched_block_[i];
    const float *patched = patches_.data() + i * kBlock, *raw = b < whole ? raw_ + b * kBlock : nullptr;
    WeightSums weighed, before;
    Moments added, removed;
    if (wanted == Sums::moments) {
      hot().exact_moments(patched, 1, static_cast<double>(centre_), added);
      if (raw) hot().exact_moments(raw, 1, static_cast<double>(centre_), removed);
    } else {
      hot().rough_sums(patched, none, 1, every, weighed);
      if (raw) hot().rough_sums(raw, none, 1, every, before);
    }
    moments_.count += added.count - removed.count;
    moments_.sum += added.sum - removed.sum;
    moments_.squares += added.squares - removed.squares;
    weights_ += weighed.Z - before.Z;
    removed_ += wanted == Sums::moments ? removed.squares : before.Z;
  }
  has_sums_ = removed_ <= (wanted == Sums::moments ? moments_.squares : weights_);
}

// In an incomplete last block, words beyond the mask's end cover only padding: they are set to allow it.
void EditedRow::take_mask(const topw_inputs &inputs, int64_t row) {
  allowed_ = inputs.words > 0 ? inputs.allowed + row * inputs.words : nullptr;
  if (!allowed_ || vocab_ % kBlock == 0) return;
  const int64_t first = vocab_ / kBlock * kWords;
  for (int64_t i = 0; i < kWords; ++i) last_words_[i] = first + i < inputs.words ? allowed_[first + i] : -1;
}

// Measures the maxima of `blocks` consecutive blocks from block `first` on. True if a logit is NaN.
bool EditedRow::maxima_of(const float *logits, int64_t first, int64_t blocks) {
  float *maxima = maxima_.data() + first;
  return allowed_ ? hot().allowed_maxima(logits, blocks, words_of(first), maxima)
                  : hot().block_maxima(logits, blocks, maxima);
}

const float *EditedRow::allowed_block(int64_t b) const {
  const int32_t *words = words_of(b);
  if ((words[0] & words[1] & words[2] & words[3]) == -1) return edited_block(b);
  hot().allow(edited_block(b), words, masked_.data());
  return masked_.data();
}

int64_t EditedRow::patch(int64_t block) {
  if (patch_of_[block] >= 0) return patch_of_[block];
  const int64_t from = block * kBlock, length = std::min(kBlock, vocab_ - from);
  float *copy = patches_.data() + patch_count_ * kBlock;
  memcpy(copy, raw_ + from, static_cast<size_t>(length) * sizeof(float));
  std::fill(copy + length, copy + kBlock, -INFINITY);
  patched_block_[patch_count_] = static_cast<int32_t>(block);
  patch_of_[block] = static_cast<int32_t>(patch_count_);
  return patch_count_++;
}

// False if the penalty of a real token is not > 0. Of repeated ids, only the last is applied, to the raw logit.
bool EditedRow::apply_edits(const topw_inputs &inputs, int64_t row) {
  for (int64_t e = row * inputs.edits; e < (row + 1) * inputs.edits; ++e) {
    const int64_t id = inputs.edit_ids[e];
    if (id < 0 || id >= vocab_) continue;
    if (!(inputs.edit_penalty[e] > 0)) return false;
    const float edited = edit_logit(raw_[id], inputs.edit_penalty[e], inputs.edit_bias[e]);
    patches_[patch(id / kBlock) * kBlock + id % kBlock] = edited;
  }
  return true;
}

// Measures the maxima of the patched blocks and of the row. False if the row is invalid.
bool EditedRow::measure_maxima() {
  for (int64_t i = 0; i < patch_count_; ++i)
    if (maxima_of(patches_.data() + i * kBlock, patched_block_[i], 1)) return false;
  std::fill(maxima_.data() + blocks_, maxima_.data() + padded_blocks_, -INFINITY);
  top_ = hot().highest_of(maxima_.data(), padded_blocks_);
  return top_ > -INFINITY && top_ < INFINITY;
}

int64_t EditedRow::first_at_top() const {
  const int64_t b = std::find(maxima_.data(), maxima_.data() + blocks_, top_) - maxima_.data();
  const float *logits = block(b);
  return b * kBlock + (std::find(logits, logits + kBlock, top_) - logits);
}

}  // namespace topw
