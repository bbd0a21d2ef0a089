// Penalties, biases and bans as the graph's sparse logit edits (docs/contract/graph.md, section 6): three inputs [B,
// slots], one slot per edited token of a row. A step writes only changes.
#ifndef TOPW_EDITS_H
#define TOPW_EDITS_H

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common.h"
#include "onnxruntime.h"
#include "request.h"

namespace topw {

class EditSlots {
 public:
  EditSlots(std::int64_t rows, std::int64_t slots, bool fixed, bool changing)
      : rows_(rows), fixed_(fixed), changing_(changing) {
    allocate(slots);
  }

  void bind(Binding &binding) {
    bind(binding, "edit_ids", ids_);
    bind(binding, "edit_penalty", penalty_);
    bind(binding, "edit_bias", bias_);
    grown_ = false;
  }
  bool grown() const { return grown_; }  // since it was bound

  std::int64_t &id(std::int64_t row, std::int64_t slot) { return ids_[row * slots_ + slot]; }
  float &penalty(std::int64_t row, std::int64_t slot) { return penalty_[row * slots_ + slot]; }
  float &bias(std::int64_t row, std::int64_t slot) { return bias_[row * slots_ + slot]; }

  void make_room(std::int64_t slot) {
    while (slot >= slots_) grow();
  }

 private:
  template <typename Values>
  void bind(Binding &binding, const char *name, Values &values) {
    if (changing_)
      binding.changing_input(name, values.data(), {rows_, slots_});
    else
      binding.host_input(name, values.data(), {rows_, slots_});
  }
  void allocate(std::int64_t slots) {
    slots_ = slots;
    const std::size_t size = rows_ * slots + 1;  // one more, for a valid address
    ids_.assign(size, -1);
    penalty_.assign(size, 1);
    bias_.assign(size, 0);
  }
  void grow() {
    if (fixed_)
      throw Failure("the request edits more than " + std::to_string(slots_) + " tokens, the maximum this graph was " +
                    "exported with; use fewer penalties, biases or bans, or export with more slots.");
    const std::int64_t had = slots_;
    const Tokens ids = ids_;
    const std::vector<float> penalty = penalty_, bias = bias_;
    allocate(std::max<std::int64_t>(2 * had, 1));
    for (std::int64_t row = 0; row < rows_; ++row) {
      std::copy_n(ids.begin() + row * had, had, ids_.begin() + row * slots_);
      std::copy_n(penalty.begin() + row * had, had, penalty_.begin() + row * slots_);
      std::copy_n(bias.begin() + row * had, had, bias_.begin() + row * slots_);
    }
    grown_ = true;
  }

  const std::int64_t rows_;
  const bool fixed_;     // by the graph
  const bool changing_;  // whether any row has edits
  std::int64_t slots_ = 0;
  bool grown_ = false;
  Tokens ids_;
  std::vector<float> penalty_, bias_;
};

// One row's edits: permanent ones (penalties, biases, bans), and a single step's bans.
class RowEdits {
 public:
  RowEdits(EditSlots &slots, std::int64_t row, const RowRequest &request)
      : slots_(slots), row_(row), request_(request), history_(request.prompt) {
    const std::int64_t size = request.no_repeat_ngram_size;
    for (std::int64_t end = size; size > 0 && end <= std::int64_t(history_.size()); ++end) remember_ngram(end);
    make_standing();
  }

  static bool wanted(const RowRequest &r) {
    return r.repetition_penalty != 1 || r.presence_penalty != 0 || r.frequency_penalty != 0 || !r.logit_bias.empty() ||
           !r.suppress_tokens.empty() || !r.bad_words_ids.empty() || r.no_repeat_ngram_size > 0 ||
           (r.min_new_tokens > 0 && !r.ends.empty());
  }

  // Apply the bans of the next step.
  void prepare() {
    for (const auto &[slot, standing] : lifted_) slots_.bias(row_, slot) = standing;
    lifted_.clear();
    for (const std::int64_t token : bans()) {
      const std::int64_t slot = slot_of(token);
      lifted_.emplace_back(slot, slots_.bias(row_, slot));
      slots_.bias(row_, slot) = -INFINITY;
    }
  }

  // Update the edits for a drawn token.
  void accept(std::int64_t token) {
    history_.push_back(token);
    ++steps_;
    if (request_.repetition_penalty != 1) penalise(token);
    if (request_.presence_penalty != 0 || request_.frequency_penalty != 0) {
      const bool first = generated_.insert(token).second;
      add_bias(token, -request_.frequency_penalty - (first ? request_.presence_penalty : 0));
    }
    if (request_.no_repeat_ngram_size > 0) remember_ngram(std::int64_t(history_.size()));
  }

 private:
  void make_standing() {
    if (request_.repetition_penalty != 1)
      for (const std::int64_t token : request_.prompt) penalise(token);
    for (const auto &[token, bias] : request_.logit_bias) {
      const std::int64_t slot = slot_of(token);
      slots_.bias(row_, slot) = to_float32(bias);
    }
    for (const std::int64_t token : request_.suppress_tokens) ban(token);
    for (const Tokens &word : request_.bad_words_ids) {
      // Never ban the end of sequence, so that the text can end.
      if (word.size() == 1 && !request_.ends.count(word[0])) ban(word[0]);
      if (word.size() > 1) words_.push_back(split(word));
    }
  }
  static std::pair<Tokens, std::int64_t> split(Tokens word) {  // all but the last token, and the last
    const std::int64_t last = word.back();
    word.pop_back();
    return {word, last};
  }
  void penalise(std::int64_t token) {
    const std::int64_t slot = slot_of(token);
    slots_.penalty(row_, slot) = to_float32(request_.repetition_penalty);
  }
  void ban(std::int64_t token) {
    const std::int64_t slot = slot_of(token);
    slots_.bias(row_, slot) = -INFINITY;
  }
  // Clamp to float32's maximum: the only infinity the graph accepts is the ban, -infinity.
  void add_bias(std::int64_t token, double amount) {
    const std::int64_t slot = slot_of(token);
    const double bias = double(slots_.bias(row_, slot)) + amount;
    slots_.bias(row_, slot) = float(std::clamp(bias, -double(FLT_MAX), double(FLT_MAX)));
  }

  // Tokens the next step must not draw.
  std::set<std::int64_t> bans() const {
    std::set<std::int64_t> banned;
    if (steps_ < request_.min_new_tokens) banned = request_.ends;
    for (const auto &[beginning, last] : words_)
      if (ends_with(beginning)) banned.insert(last);
    const std::int64_t size = request_.no_repeat_ngram_size - 1;
    if (size >= 0 && size <= std::int64_t(history_.size())) {
      const auto found = followers_.find(Tokens(history_.end() - size, history_.end()));
      if (found != followers_.end()) banned.insert(found->second.begin(), found->second.end());
    }
    return banned;
  }
  bool ends_with(const Tokens &tail) const {
    return history_.size() >= tail.size() && std::equal(tail.rbegin(), tail.rend(), history_.rbegin());
  }
  void remember_ngram(std::int64_t end) {
    const std::int64_t size = request_.no_repeat_ngram_size;
    if (end < size) return;
    const auto start = history_.begin() + (end - size), last = history_.begin() + (end - 1);
    followers_[Tokens(start, last)].insert(*last);
  }
  std::int64_t slot_of(std::int64_t token) {
    const auto [place, added] = slot_numbers_.emplace(token, std::int64_t(slot_numbers_.size()));
    if (added) {
      slots_.make_room(place->second);
      slots_.id(row_, place->second) = token;
    }
    return place->second;
  }

  EditSlots &slots_;
  const std::int64_t row_;
  const RowRequest &request_;
  Tokens history_;
  std::int64_t steps_ = 0;
  std::map<std::int64_t, std::int64_t> slot_numbers_;
  std::vector<std::pair<std::int64_t, float>> lifted_;  // (slot, permanent bias) of this step's bans
  std::set<std::int64_t> generated_;
  std::vector<std::pair<Tokens, std::int64_t>> words_;  // prefixes, and the last tokens that must not follow
  std::map<Tokens, std::set<std::int64_t>> followers_;  // tokens that followed the last n - 1 tokens
};

// A batch's edits; without edits it binds empty inputs once.
class Edits {
 public:
  Edits(const std::vector<RowRequest> &requests, const Folder &folder)
      : slots_(std::int64_t(requests.size()), first_slots(requests, folder), folder.fixed_size("edit_ids", 1) >= 0,
               any_wanted(requests)) {
    for (std::size_t row = 0; row < requests.size(); ++row)
      if (RowEdits::wanted(requests[row])) rows_.emplace(row, RowEdits(slots_, std::int64_t(row), requests[row]));
  }

  void bind(Binding &binding) { slots_.bind(binding); }
  void prepare(Binding &binding) {
    for (auto &[row, edits] : rows_) edits.prepare();
    if (slots_.grown()) slots_.bind(binding);
  }
  void accept(const Tokens &drawn) {
    for (auto &[row, edits] : rows_) edits.accept(drawn[row]);
  }
  void retire(std::size_t row) { rows_.erase(row); }  // its slots stay

 private:
  static std::int64_t first_slots(const std::vector<RowRequest> &requests, const Folder &folder) {
    const std::int64_t fixed = folder.fixed_size("edit_ids", 1);
    if (fixed >= 0) return fixed;
    return any_wanted(requests) ? 16 : 0;
  }
  static bool any_wanted(const std::vector<RowRequest> &requests) {
    return std::any_of(requests.begin(), requests.end(), RowEdits::wanted);
  }

  EditSlots slots_;
  std::map<std::size_t, RowEdits> rows_;
};

}  // namespace topw

#endif
