#include "row.h"

#include <string.h>

#include <algorithm>

#include "candidates.h"
#include "crop.h"
#include "draw.h"
#include "rule.h"
#include "table.h"

namespace topw {
namespace {

constexpr int64_t kMostTokens = INT32_MAX / 2;

// False if the arguments, which may come from an unchecked graph, cannot be read.
bool is_readable(const topw_options &options, const topw_table *table, const topw_inputs &inputs) {
  if (inputs.vocab < 1 || inputs.vocab > kMostTokens) return false;
  if (inputs.words != 0 && inputs.words != words_of_mask(inputs.vocab)) return false;
  return options.metric == TOPW_UNIFORM ||
         (options.metric >= 0 && options.metric < TOPW_UNIFORM && table && Table::is_readable(*table, inputs.vocab));
}

void write_invalid(const topw_inputs &inputs, int64_t row, const topw_outputs &out) {
  out.next_token[row] = -1;
  out.logprob[row] = 0;
  out.kept[row] = 0;
  out.certified[row] = 0;
  if (out.mass) out.mass[row] = 0;
  if (out.keep_mask && inputs.vocab > 0)
    memset(out.keep_mask + row * inputs.vocab, 0, static_cast<size_t>(inputs.vocab));
  if (out.reports) out.reports[row] = {TOPW_INVALID, 0, 0, 0, 0, 0};
}

// Keeps the largest logit alone, for a greedy row or beta <= lam, where J never rises.
bool keep_best(topw_workspace &w, int32_t stage, Crop &crop) {
  if (!w.candidates.id.reserve(1) || !w.candidates.logit.reserve(1)) return false;
  w.candidates.id[0] = static_cast<int32_t>(w.row.first_at_top());
  w.candidates.logit[0] = w.row.top();
  crop = {&w.candidates, 1, true, true, {stage, 0, 0, 0, 0, 0}};
  return true;
}

// Moves the alternation's crop to the front of the pool.
void keep_members(topw_workspace &w, Crop &crop) {
  Ranked &tokens = w.pool.tokens;
  const uint8_t *member = w.alternation.members();
  crop.kept = 0;
  for (int64_t i = 0; i < tokens.size; ++i)
    if (member[i]) {
      tokens.id[crop.kept] = tokens.id[i];
      tokens.logit[crop.kept++] = tokens.logit[i];
    }
}

bool crop_of_pool(const topw_options &options, const topw_table *table, const Parameters &P, topw_workspace &w,
                  Crop &crop) {
  if (!w.pool.fill(w.row, P, std::max<int64_t>(1, options.top_m), w.sorter)) return false;
  crop.tokens = &w.pool.tokens;
  crop.report.candidates = static_cast<int32_t>(w.pool.tokens.size);
  crop.certified = P.scale >= 0 && w.pool.K <= w.pool.k0;  // T2
  if (crop.certified) {
    crop.kept = w.pool.K;
    crop.report.stage = TOPW_POOL;
    return true;
  }
  if (!w.alternation.run(options, table, w.pool, P, w.sorter)) return false;
  keep_members(w, crop);
  crop.report.stage = P.scale >= 0 ? TOPW_GEOMETRY : TOPW_LITERAL;
  crop.report.steps = static_cast<int32_t>(std::min<int64_t>(w.alternation.steps, INT32_MAX));
  crop.report.distances = w.alternation.pairs;
  crop.report.distances_avoided = std::max<int64_t>(0, w.alternation.literal_pairs - w.alternation.pairs);
  return true;
}

bool crop_of_row(const topw_options &options, const topw_table *table, const Parameters &P, topw_workspace &w,
                 Crop &crop) {
  if (P.greedy) return keep_best(w, TOPW_GREEDY, crop);
  if (P.scale >= 0) {
    if (P.c <= 0) return keep_best(w, TOPW_CANDIDATES, crop);
    int64_t seen = 0;
    const Outcome outcome =
        crop_from_candidates(w.row, P, std::max<int64_t>(1, options.top_m), w.sorter, w.candidates, crop.kept, seen);
    if (outcome == Outcome::out_of_memory) return false;
    if (outcome == Outcome::settled) {
      crop.tokens = &w.candidates;
      crop.certified = true;
      crop.report = {TOPW_CANDIDATES, static_cast<int32_t>(seen), 0, 0, 0, 0};
      return true;
    }
  }
  return crop_of_pool(options, table, P, w, crop);
}

bool draw_token(const Crop &crop, const Parameters &P, topw_workspace &w, Draw &drawn) {
  if (P.greedy) return true;
  if (!crop.ranked) return draw_unranked(*crop.tokens, P, w.running, w.sorter, drawn);
  if (!w.weights.reserve(crop.kept)) return false;
  drawn = draw(crop.tokens->logit.data(), crop.kept, P, w.weights.data());
  return true;
}

bool write_answer(const topw_inputs &inputs, int64_t row, const Crop &crop, const Parameters &P, topw_workspace &w,
            const topw_outputs &out) {
  Draw drawn = {0, 0};
  if (!draw_token(crop, P, w, drawn)) return false;
  const float *logits = crop.tokens->logit.data();
  out.next_token[row] = crop.tokens->id[drawn.place];
  out.logprob[row] = static_cast<float>(drawn.logprob);
  out.kept[row] = static_cast<int32_t>(crop.kept);
  out.certified[row] = crop.certified;
  if (out.mass) out.mass[row] = static_cast<float>(mass(logits, crop.kept, w.row, P));
  if (out.keep_mask)
    for (int64_t i = 0; i < crop.kept; ++i) out.keep_mask[row * inputs.vocab + crop.tokens->id[i]] = 1;
  if (out.reports) out.reports[row] = crop.report;
  return true;
}

}  // namespace

bool sample_row(const topw_options &options, const topw_table *table, const topw_inputs &inputs, int64_t row,
                topw_workspace &w, const topw_outputs &out) {
  write_invalid(inputs, row, out);
  Parameters P;
  Rule rule;
  if (!is_readable(options, table, inputs) || !P.read(inputs, row) || !rule.read(inputs, row)) return true;
  const bool other_rule = rule.code != TOPW_RULE_TOP_W && !P.greedy;
  const EditedRow::Verdict verdict = other_rule ? w.row.open(inputs, row, sums_of(rule), 1 / P.selection)
                                                : w.row.open(inputs, row);
  if (verdict != EditedRow::Verdict::valid) return verdict == EditedRow::Verdict::invalid;
  Crop crop;
  const bool chosen = other_rule ? w.rule_crop.choose(w.row, rule, P.selection, w.sorter, crop)
                                 : crop_of_row(options, table, P, w, crop);
  return chosen && write_answer(inputs, row, crop, P, w, out);
}

}  // namespace topw
