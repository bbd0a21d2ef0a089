// The generation loop. Decoder and Top-W are one graph: a run computes the next tokens from the last ones and from each
// row's parameters, edits and random number.
#ifndef TOPW_LOOP_H
#define TOPW_LOOP_H

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cache.h"
#include "common.h"
#include "edits.h"
#include "folder.h"
#include "onnxruntime.h"
#include "random.h"
#include "request.h"
#include "text.h"

namespace topw {

using Clock = std::chrono::steady_clock;

// One sequence. `text` is absent without a tokenizer.
struct Row {
  Row(const RowRequest &of, std::optional<RowText> with) : request(of), text(std::move(with)) {}

  const RowRequest &request;
  std::optional<RowText> text;
  std::string shown;  // all text so far
  Tokens tokens;
  std::vector<float> logprobs;
  std::vector<std::int32_t> kept;
  std::vector<bool> certified;
  bool ended = false;
  std::optional<std::int64_t> stop_token;  // what ended it; neither if it used up its budget
  std::optional<std::string> stop_string;
  Clock::time_point ended_at;

  bool stopped() const { return stop_token || stop_string; }

  // Adds a drawn token; returns the new text.
  std::string take(std::int64_t token) {
    tokens.push_back(token);
    std::string gained;
    if (request.ends.count(token)) {
      stop_token = token;
    } else if (text) {
      gained = text->push(token);
      stop_string = text->found();
    }
    ended = stopped() || std::int64_t(tokens.size()) == request.budget;
    if (ended && text) {
      gained += text->flush();  // may complete a stop string
      if (!stopped()) stop_string = text->found();
    }
    if (ended) ended_at = Clock::now();
    shown += gained;
    return gained;
  }
};

// Arrays of the sampler's inputs and outputs, each [B].
class Sampler {
 public:
  Sampler(const std::vector<RowRequest> &requests, const Folder &folder, Binding &binding)
      : uniform_(requests.size(), 0),
        allowed_(requests.size() * words_of(folder) + 1, -1),  // one more, for a valid address
        rule_(requests.size(), 0),                              // Top-W
        rule_values_(requests.size() * 2, 0),
        token_(requests.size(), -1),
        logprob_(requests.size(), 0),
        kept_(requests.size(), 0),
        certified_(new bool[requests.size()]()) {
    const Shape shape{std::int64_t(requests.size())};
    for (const Parameter &parameter : kParameters) {
      std::vector<float> &values = parameters_[parameter.name];
      for (const RowRequest &request : requests) values.push_back(request.top_w.at(parameter.name));
      if (parameter.name == std::string_view("temperature"))  // for rows that end
        binding.changing_input(parameter.name, values.data(), shape);
      else
        binding.host_input(parameter.name, values.data(), shape);
    }
    binding.changing_input("uniform", uniform_.data(), shape);
    binding.host_input("allowed", allowed_.data(), {shape[0], words_of(folder)});
    binding.host_input("rule", rule_.data(), shape);
    binding.host_input("rule_values", rule_values_.data(), {shape[0], 2});
    binding.host_output("next_token", token_.data(), shape);
    binding.host_output("kept", kept_.data(), shape);
    binding.host_output("certified", certified_.get(), shape);
    has_logprob_ = folder.outputs.count("logprob") > 0;
    if (has_logprob_) binding.host_output("logprob", logprob_.data(), shape);
  }

  void draw_with(std::size_t row, float uniform) { uniform_[row] = uniform; }
  void make_greedy(std::size_t row) { parameters_["temperature"][row] = 0; }  // the cheapest, for ended rows
  const Tokens &tokens() const { return token_; }
  void record(std::size_t index, Row &row) const {
    row.kept.push_back(kept_[index]);
    row.certified.push_back(certified_[index]);
    if (has_logprob_) row.logprobs.push_back(logprob_[index]);
  }

 private:
  // Words of a row's mask: none, which allows every token, unless the graph takes a fixed number.
  static std::int64_t words_of(const Folder &folder) {
    return std::max<std::int64_t>(folder.fixed_size("allowed", 1), 0);
  }

  std::map<std::string, std::vector<float>> parameters_;
  std::vector<float> uniform_;
  std::vector<std::int32_t> allowed_;
  std::vector<std::int32_t> rule_;
  std::vector<float> rule_values_;
  Tokens token_;
  std::vector<float> logprob_;
  std::vector<std::int32_t> kept_;
  std::unique_ptr<bool[]> certified_;
  bool has_logprob_ = false;
};

// One batch: the graph's arrays, bound once where possible.
class Generation {
 public:
  // Called for a row with a new token, and its new text; the row may have ended.
  using Gained = std::function<void(std::size_t index, const Row &row, const std::string &text)>;

  Generation(const Session &session, const Folder &folder, const std::vector<RowRequest> &requests,
             std::vector<Row> &rows)
      : rows_(rows),
        active_(rows.size(), true),
        binding_(session),
        cache_(open_cache(session, folder, binding_, sizes_of(requests))),  // first: outputs are found by position
        sampler_(requests, folder, binding_),
        edits_(requests, folder) {
    edits_.bind(binding_);
  }

  // Generates to the end; returns the time of the first tokens.
  Clock::time_point run(const Gained &gained) {
    for (std::size_t i = 0; i < rows_.size(); ++i)
      if (rows_[i].request.budget == 0) {
        rows_[i].ended = true;
        rows_[i].ended_at = Clock::now();
        retire(i);
        gained(i, rows_[i], "");
      }
    std::optional<Clock::time_point> first;
    for (std::int64_t step = 0; std::count(active_.begin(), active_.end(), true) > 0; ++step) {
      if (step == 0)
        cache_->feed_prompts();
      else
        cache_->feed_tokens(active_);
      sample(step);
      if (!first) first = Clock::now();
      accept(step, gained);
    }
    return first.value_or(Clock::now());
  }

 private:
  static Rows sizes_of(const std::vector<RowRequest> &requests) {
    Rows sizes;
    for (const RowRequest &request : requests) {
      sizes.prompts.push_back(request.prompt);
      sizes.budgets.push_back(request.budget);
    }
    return sizes;
  }

  // Binds this step's inputs and runs the graph.
  void sample(std::int64_t step) {
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      const RowRequest &request = rows_[i].request;
      sampler_.draw_with(i, uniform_for(request.seed, request.prompt.size() + std::uint64_t(step)));
    }
    edits_.prepare(binding_);
    binding_.run();
  }

  // Adds drawn tokens, and retires finished rows.
  void accept(std::int64_t step, const Gained &gained) {
    const Tokens &drawn = sampler_.tokens();
    edits_.accept(drawn);
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      if (!active_[i]) continue;
      if (drawn[i] < 0)
        throw Failure("the logits of row " + std::to_string(i) + " at step " + std::to_string(step) + " hold NaN or " +
                      "+infinity, or none is finite after the edits; try topw verify, and check penalties and bans.");
      cache_->next_ids[i] = drawn[i];
      const std::string text = rows_[i].take(drawn[i]);
      sampler_.record(i, rows_[i]);
      if (rows_[i].ended) retire(i);
      gained(i, rows_[i], text);
    }
  }

  // Makes row `i`, which the graph still runs, as cheap as possible.
  void retire(std::size_t i) {
    active_[i] = false;
    cache_->next_ids[i] = rows_[i].request.pad;
    edits_.retire(i);
    sampler_.make_greedy(i);
  }

  std::vector<Row> &rows_;
  std::vector<bool> active_;
  Binding binding_;
  std::unique_ptr<Cache> cache_;
  Sampler sampler_;
  Edits edits_;
};

}  // namespace topw

#endif
