// Resolves each row's parameters: from the request, else generation_config.json, else the export (Top-W's six) or a
// default.
#ifndef TOPW_REQUEST_H
#define TOPW_REQUEST_H

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "common.h"
#include "folder.h"
#include "parameters.h"
#include "random.h"

namespace topw {

constexpr std::int64_t kMaxNewTokens = 256;  // default

struct Prompt {
  Tokens ids;
  Given given;
};

// One sequence's resolved request.
struct RowRequest {
  Tokens prompt;
  Parameters top_w;
  std::int64_t budget = 0;          // most new tokens, by all limits
  std::int64_t min_new_tokens = 0;  // until then, ends are banned and stop strings ignored
  std::set<std::int64_t> ends;      // drawing one ends the row
  bool ignore_eos = false;          // then `ends` is empty
  std::int64_t pad = 0;             // fed after the end
  std::vector<std::string> stop_strings;
  double repetition_penalty = 1, presence_penalty = 0, frequency_penalty = 0;
  std::map<std::int64_t, double> logit_bias;
  Tokens suppress_tokens;
  std::vector<Tokens> bad_words_ids;
  std::int64_t no_repeat_ngram_size = 0;
  std::uint64_t seed = 0;
};

inline void check_prompt(const Tokens &prompt, const Folder &folder, const std::string &which) {
  if (prompt.empty())
    throw Failure(which + " is empty and the model states no BOS token to start from; give token ids after the " +
                  "folder or on standard input.");
  for (const std::int64_t id : prompt)
    if (id < 0 || id >= folder.vocabulary)
      throw Failure(which + " holds the token id " + std::to_string(id) + ", but ids go from 0 to " +
                    std::to_string(folder.vocabulary - 1) + ".");
  if (std::int64_t(prompt.size()) > folder.context)
    throw Failure(which + " has " + std::to_string(prompt.size()) + " tokens, the model's context holds " +
                  std::to_string(folder.context) + "; shorten it.");
}

inline void check_ids(const char *name, std::int64_t id, const Folder &folder) {
  if (id >= folder.vocabulary)
    throw Failure(std::string(name) + " names the token id " + std::to_string(id) + ", but ids go from 0 to " +
                  std::to_string(folder.vocabulary - 1) + ".");
}

inline Parameters choose_top_w(const Given &request, const Given &model, const Parameters &exported) {
  Parameters values = request.top_w;
  values.insert(model.top_w.begin(), model.top_w.end());
  values.insert(exported.begin(), exported.end());
  float &temperature = values["temperature"];
  const bool stated = request.top_w.count("temperature") > 0;
  if (request.do_sample == true && temperature < kGreedyBelow) {
    if (stated) throw Failure("do_sample is true, but the temperature is 0, which is greedy; give a higher one.");
    temperature = 1;
  }
  if (request.do_sample == false || (!request.do_sample && !stated && model.do_sample == false)) temperature = 0;
  return values;
}

// Most tokens to draw after a prompt of `prompt` tokens.
inline std::int64_t choose_budget(std::int64_t prompt, const Given &request, const Given &model, const Folder &folder) {
  if (request.max_new_tokens && request.max_length)
    throw Failure("max_new_tokens and max_length are both given; give one of them.");
  if (request.max_length && *request.max_length <= prompt)
    throw Failure("the prompt has " + std::to_string(prompt) + " tokens, but max_length is " +
                  std::to_string(*request.max_length) + "; raise it.");
  std::int64_t wanted = kMaxNewTokens;
  for (const Given *source : {&model, &request}) {  // ignore a model's limit that the prompt exceeds
    if (source->max_new_tokens)
      wanted = *source->max_new_tokens;
    else if (source->max_length.value_or(0) > prompt)
      wanted = *source->max_length - prompt;
  }
  return std::min(wanted, folder.context - prompt);
}

inline RowRequest resolve(const Prompt &prompt, const Folder &folder, std::uint64_t seed) {
  const Given all = merged(prompt.given, folder.stated);
  const auto length = std::int64_t(prompt.ids.size());
  const Tokens ends = all.eos_token_id.value_or(Tokens{});
  RowRequest row;
  row.prompt = prompt.ids;
  row.top_w = choose_top_w(prompt.given, folder.stated, folder.exported);
  row.budget = choose_budget(length, prompt.given, folder.stated, folder);
  row.min_new_tokens = std::max(all.min_new_tokens.value_or(0), all.min_length.value_or(0) - length);
  row.ignore_eos = all.ignore_eos.value_or(false);
  const Tokens stops = all.stop_token_ids.value_or(Tokens{});
  row.ends.insert(stops.begin(), stops.end());
  if (!row.ignore_eos) row.ends.insert(ends.begin(), ends.end());
  row.pad = ends.empty() ? 0 : *std::min_element(ends.begin(), ends.end());
  if (all.pad_token_id && *all.pad_token_id < folder.vocabulary) row.pad = *all.pad_token_id;
  row.stop_strings = all.stop_strings.value_or(row.stop_strings);
  row.repetition_penalty = all.repetition_penalty.value_or(1);
  row.presence_penalty = all.presence_penalty.value_or(0);
  row.frequency_penalty = all.frequency_penalty.value_or(0);
  row.logit_bias = all.logit_bias.value_or(row.logit_bias);
  row.suppress_tokens = all.suppress_tokens.value_or(Tokens{});
  row.bad_words_ids = all.bad_words_ids.value_or(row.bad_words_ids);
  row.no_repeat_ngram_size = all.no_repeat_ngram_size.value_or(0);
  row.seed = seed;
  for (const std::int64_t id : ends) check_ids("eos_token_id", id, folder);
  for (const std::int64_t id : stops) check_ids("stop_token_ids", id, folder);
  for (const std::int64_t id : row.suppress_tokens) check_ids("suppress_tokens", id, folder);
  for (const auto &[id, bias] : row.logit_bias) check_ids("logit_bias", id, folder);
  for (const Tokens &word : row.bad_words_ids)
    for (const std::int64_t id : word) check_ids("bad_words_ids", id, folder);
  return row;
}

// One row per prompt and sample; a prompt's samples are adjacent.
inline std::vector<RowRequest> resolve_all(const std::vector<Prompt> &prompts, const Folder &folder,
                                           std::int64_t samples) {
  std::vector<RowRequest> rows;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    check_prompt(prompts[i].ids, folder, prompts.size() > 1 ? "prompt " + std::to_string(i) : "the prompt");
    const std::uint64_t seed = prompts[i].given.seed ? *prompts[i].given.seed : fresh_seed();
    for (std::int64_t sample = 0; sample < samples; ++sample)
      rows.push_back(resolve(prompts[i], folder, sequence_seed(seed, std::uint64_t(sample))));
  }
  const auto differs = [&](const RowRequest &row) { return row.prompt.size() != rows.front().prompt.size(); };
  if (!folder.pads && std::any_of(rows.begin(), rows.end(), differs))
    throw Failure("this decoder cannot pad, but the prompts of the batch differ in length; run them one by one, or "
                  "group those of equal length.");
  return rows;
}

}  // namespace topw

#endif
