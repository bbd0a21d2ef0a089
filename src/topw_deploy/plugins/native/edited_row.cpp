#include "edited_row.h"

#include <math.h>
#include <string.h>

#include <algorithm>

namespace topw {
namespace {

float edited(float logit, float penalty, float bias) {
  return (logit > 0 ? logit / penalty : logit * penalty) + bias;
}

}  // namespace

EditedRow::Verdict EditedRow::open(const topw_inputs &inputs, int64_t row) {
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
  if (maxima_of(raw_, 0, whole)) return Verdict::invalid;
  if (whole < blocks_) patch(whole);
  if (!edit(inputs, row)) return Verdict::invalid;
  return measure() ? Verdict::valid : Verdict::invalid;
}

// Words that the mask lacks in an incomplete last block allow only padding.
void EditedRow::take_mask(const topw_inputs &inputs, int64_t row) {
  allowed_ = inputs.words > 0 ? inputs.allowed + row * inputs.words : nullptr;
  if (!allowed_ || vocab_ % kBlock == 0) return;
  const int64_t first = vocab_ / kBlock * kWords;
  for (int64_t i = 0; i < kWords; ++i) last_words_[i] = first + i < inputs.words ? allowed_[first + i] : -1;
}

// Maxima of consecutive blocks, of which `first` is the first. True if a logit is NaN.
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

// False for a real token with a penalty that is not > 0. Of repeated ids, the last applies to the raw logit.
bool EditedRow::edit(const topw_inputs &inputs, int64_t row) {
  for (int64_t e = row * inputs.edits; e < (row + 1) * inputs.edits; ++e) {
    const int64_t id = inputs.edit_ids[e];
    if (id < 0 || id >= vocab_) continue;
    if (!(inputs.edit_penalty[e] > 0)) return false;
    patches_[patch(id / kBlock) * kBlock + id % kBlock] = edited(raw_[id], inputs.edit_penalty[e], inputs.edit_bias[e]);
  }
  return true;
}

// Maxima of patched blocks and of all. False if the row is invalid.
bool EditedRow::measure() {
  for (int64_t i = 0; i < patch_count_; ++i)
    if (maxima_of(patches_.data() + i * kBlock, patched_block_[i], 1)) return false;
  std::fill(maxima_.data() + blocks_, maxima_.data() + padded_blocks_, -INFINITY);
  top_ = *std::max_element(maxima_.data(), maxima_.data() + blocks_);
  return top_ > -INFINITY && top_ < INFINITY;
}

int64_t EditedRow::first_at_top() const {
  const int64_t b = std::find(maxima_.data(), maxima_.data() + blocks_, top_) - maxima_.data();
  const float *logits = block(b);
  return b * kBlock + (std::find(logits, logits + kBlock, top_) - logits);
}

}  // namespace topw
