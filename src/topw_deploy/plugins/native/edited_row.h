// A row of edited and masked logits (docs/contract/graph.md, section 6) in whole blocks, mostly uncopied.
#ifndef TOPW_EDITED_ROW_H
#define TOPW_EDITED_ROW_H

#include "array.h"
#include "hot.h"
#include "topw.h"

namespace topw {

// Blocks point into the caller's logits. Edited blocks and an incomplete last one are patches: copies, edited and
// padded with -inf. The mask is applied to a block when its maximum is measured and whenever it is read.
class EditedRow {
 public:
  enum class Verdict { valid, invalid, out_of_memory };
  // Optional sums that the pass over the logits computes.
  enum class Sums { none, moments, weights };

  // Reads a row. It is invalid if its edited, allowed logits hold NaN, +inf or nothing finite, or if the penalty of a
  // real token is not > 0. `rate`: the rate of the weights, if `wanted` are weights.
  [[nodiscard]] Verdict open(const topw_inputs &inputs, int64_t row, Sums wanted = Sums::none, double rate = 0);

  // Whether there are sums over the edited row, like those of hot().rough_moments and hot().rough_sums. False if they
  // were not computed (for example for a masked row), or if edits removed more than they left, so that rounding counts.
  bool has_sums() const { return has_sums_; }
  float centre() const { return centre_; }  // the moments' centre, or the weights' `top`, which logits may exceed
  const Moments &moments() const { return moments_; }
  double weights() const { return weights_; }
  // The weights or squares that edits removed from the sums. They count towards the sums' rounding errors.
  double removed() const { return removed_; }

  int64_t vocab() const { return vocab_; }
  int64_t blocks() const { return blocks_; }
  float top() const { return top_; }  // the largest logit
  float maximum(int64_t block) const { return maxima_[block]; }
  const float *maxima() const { return maxima_.data(); }  // [padded_blocks()], padded with -inf
  int64_t padded_blocks() const { return padded_blocks_; }
  // Valid until the next call.
  const float *block(int64_t b) const { return allowed_ ? allowed_block(b) : edited_block(b); }
  // Calls visit(logits, first, blocks) for all blocks in order, several at once where they lie together in memory. The
  // logits are valid until the next call.
  template <class Visit>
  void for_each_run(const Visit &visit) const;
  int64_t first_at_top() const;  // lowest id among the largest logits

 private:
  int64_t patch(int64_t block);  // the index of the block's patch, which is created on first use
  bool apply_edits(const topw_inputs &inputs, int64_t row);
  bool measure_maxima();
  bool maxima_of(const float *logits, int64_t first, int64_t blocks);
  bool maxima_and_sums(int64_t whole, Sums wanted, double rate);
  void correct_sums(int64_t whole, Sums wanted, double rate);

  const float *edited_block(int64_t b) const {
    return patch_of_[b] < 0 ? raw_ + b * kBlock : patches_.data() + patch_of_[b] * kBlock;
  }
  const float *allowed_block(int64_t b) const;
  void take_mask(const topw_inputs &inputs, int64_t row);
  const int32_t *words_of(int64_t b) const { return b < vocab_ / kBlock ? allowed_ + b * kWords : last_words_; }

  const float *raw_ = nullptr;
  const int32_t *allowed_ = nullptr;  // null: no mask
  int32_t last_words_[kWords] = {};   // of an incomplete last block
  int64_t vocab_ = 0, blocks_ = 0, padded_blocks_ = 0, patch_count_ = 0;
  float top_ = 0;
  bool has_sums_ = false;
  float centre_ = 0;
  double weights_ = 0, removed_ = 0;
  Moments moments_;
  Array<float> maxima_, patches_;
  Array<float> masked_;           // [kBlock] the block read last
  Array<int32_t> patch_of_;       // [blocks] -1: none
  Array<int32_t> patched_block_;  // [patch_count_]
};

template <class Visit>
void EditedRow::for_each_run(const Visit &visit) const {
  for (int64_t b = 0; b < blocks_;) {
    const int64_t first = b++;
    if (!allowed_ && patch_of_[first] < 0)
      while (b < blocks_ && patch_of_[b] < 0) ++b;
    visit(block(first), first, b - first);
  }
}

}  // namespace topw
#endif
