// Parameters of requests and generation_config.json: names (as in the Python runtime, docs/guide/runtime.md), bounds,
// and reading them from JSON.
#ifndef TOPW_PARAMETERS_H
#define TOPW_PARAMETERS_H

#include <array>
#include <cfloat>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "common.h"
#include "json.h"

namespace topw {

struct Parameter {
  const char *name, *alias;  // in the paper, and in its authors' code
  const char *bound;
  bool (*holds)(double);
};
inline bool not_negative(double value) { return value >= 0 && std::isfinite(value); }
inline constexpr std::array<Parameter, 6> kParameters{{
    {"lam", "lambda_geom", "a finite number >= 0", not_negative},
    {"beta", "beta", "a finite number >= 0", not_negative},
    {"temperature", "temperature", "a finite number >= 0", not_negative},
    {"selection_temperature", "selection_temperature", "a finite number >= 0", not_negative},
    {"init_top_p", "warm_p", "in (0, 1]", [](double value) { return value > 0 && value <= 1; }},
    {"geom_scale", "geom_scale", "finite", [](double value) { return std::isfinite(value); }},
}};
using Parameters = std::map<std::string, float>;
constexpr float kGreedyBelow = 1e-5F;  // a temperature

struct Given {
  Parameters top_w;
  std::optional<std::int64_t> max_new_tokens, max_length, min_new_tokens, min_length, pad_token_id;
  std::optional<std::int64_t> no_repeat_ngram_size;
  std::optional<double> repetition_penalty, presence_penalty, frequency_penalty;
  std::optional<bool> do_sample, ignore_eos;
  std::optional<Tokens> eos_token_id, stop_token_ids, suppress_tokens;
  std::optional<std::vector<Tokens>> bad_words_ids;
  std::optional<std::map<std::int64_t, double>> logit_bias;
  std::optional<std::vector<std::string>> stop_strings;
  std::optional<std::uint64_t> seed;
};

struct WholeField {
  const char *name;
  std::int64_t least;
  std::optional<std::int64_t> Given::*field;
};
inline constexpr std::array<WholeField, 6> kWholes{{
    {"max_new_tokens", 1, &Given::max_new_tokens},
    {"max_length", 1, &Given::max_length},
    {"min_new_tokens", 0, &Given::min_new_tokens},
    {"min_length", 0, &Given::min_length},
    {"pad_token_id", 0, &Given::pad_token_id},
    {"no_repeat_ngram_size", 0, &Given::no_repeat_ngram_size},
}};

struct RealField {
  const char *name, *bound;
  bool (*holds)(double);
  std::optional<double> Given::*field;
};
inline bool finite(double value) { return std::isfinite(value); }
inline constexpr std::array<RealField, 3> kReals{{
    {"repetition_penalty", "a finite number > 0", [](double value) { return value > 0 && std::isfinite(value); },
     &Given::repetition_penalty},
    {"presence_penalty", "a finite number", finite, &Given::presence_penalty},
    {"frequency_penalty", "a finite number", finite, &Given::frequency_penalty},
}};

struct FlagField {
  const char *name;
  std::optional<bool> Given::*field;
};
inline constexpr std::array<FlagField, 2> kFlags{
    {{"do_sample", &Given::do_sample}, {"ignore_eos", &Given::ignore_eos}}};

struct IdsField {
  const char *name;
  std::optional<Tokens> Given::*field;
};
inline constexpr std::array<IdsField, 3> kIds{{{"eos_token_id", &Given::eos_token_id},
                                               {"stop_token_ids", &Given::stop_token_ids},
                                               {"suppress_tokens", &Given::suppress_tokens}}};

// Further aliases, of vLLM and OpenAI's interface.
inline const std::map<std::string, std::string> kAliases{{"max_tokens", "max_new_tokens"},
                                                         {"max_completion_tokens", "max_new_tokens"},
                                                         {"min_tokens", "min_new_tokens"},
                                                         {"stop", "stop_strings"}};
inline std::string own_name(const std::string &name) {
  for (const Parameter &parameter : kParameters)
    if (name == parameter.alias) return parameter.name;
  const auto found = kAliases.find(name);
  return found == kAliases.end() ? name : found->second;
}

inline float to_float32(double value) {  // to nearest, as numpy does
  if (std::fabs(value) >= 0x1.ffffffp127) return value < 0 ? -INFINITY : INFINITY;
  if (std::fabs(value) > FLT_MAX) return value < 0 ? -FLT_MAX : FLT_MAX;
  return float(value);
}
// The range also applies to the float32 value the graph takes.
inline bool in_range(bool (*holds)(double), double value) { return holds(value) && holds(to_float32(value)); }
inline bool is_bias(double value) { return value < INFINITY; }  // -infinity bans
constexpr const char *kBiasBound = "a number below infinity";

template <typename Field>
void read_real(const Json &value, const Field &parameter, double &number) {
  number = value.as_number();
  value.need(in_range(parameter.holds, number), std::string(parameter.bound) + ", in float32 too");
}

inline Tokens read_ids(const Json &value) {  // one, or a list
  if (value.kind == Json::Number) return {value.as_whole()};
  Tokens ids;
  for (const Json &id : value.as_list()) ids.push_back(id.as_whole());
  return ids;
}

inline std::vector<Tokens> read_id_lists(const Json &value) {
  std::vector<Tokens> lists;
  for (const Json &list : value.as_list()) {
    list.need(list.kind == Json::List && !list.items.empty(), "a list of token ids that is not empty");
    lists.push_back(read_ids(list));
  }
  return lists;
}

inline std::map<std::int64_t, double> read_biases(const Json &value) {
  value.need(value.kind == Json::Object, "an object of token ids and numbers");
  std::map<std::int64_t, double> biases;
  for (std::size_t i = 0; i < value.keys.size(); ++i) {
    const auto id = parse<std::int64_t>(value.keys[i]);
    if (!id || *id < 0)
      throw Failure(value.path + " names '" + value.keys[i] + "', but must name token ids; " + value.advice + ".");
    if (!biases.emplace(*id, value.items[i].as_number()).second)
      throw Failure(value.path + " names the token id " + std::to_string(*id) + " twice; " + value.advice + ".");
    value.items[i].need(in_range(is_bias, biases[*id]), std::string(kBiasBound) + ", in float32 too");
  }
  return biases;
}

inline std::vector<std::string> read_texts(const Json &value) {  // one, or a list
  std::vector<std::string> texts;
  if (value.kind == Json::Text) texts.push_back(value.text);
  if (value.kind != Json::Text)
    for (const Json &text : value.as_list()) texts.push_back(text.as_text());
  for (const std::string &text : texts) value.need(!text.empty(), "a text that is not empty, or a list of such");
  return texts;
}

// Sets the field of that name; returns whether it exists.
inline bool read_field(const std::string &name, const Json &value, Given &given) {
  double number = 0;
  for (const Parameter &parameter : kParameters)
    if (name == parameter.name) {
      read_real(value, parameter, number);
      given.top_w[parameter.name] = to_float32(number);
      return true;
    }
  for (const RealField &real : kReals)
    if (name == real.name) {
      read_real(value, real, number);
      given.*real.field = number;
      return true;
    }
  for (const WholeField &whole : kWholes)
    if (name == whole.name) return given.*whole.field = value.as_whole(whole.least), true;
  for (const FlagField &flag : kFlags)
    if (name == flag.name) return given.*flag.field = value.as_flag(), true;
  for (const IdsField &ids : kIds)
    if (name == ids.name) return given.*ids.field = read_ids(value), true;
  if (name == "bad_words_ids") return given.bad_words_ids = read_id_lists(value), true;
  if (name == "logit_bias") return given.logit_bias = read_biases(value), true;
  if (name == "stop_strings") return given.stop_strings = read_texts(value), true;
  if (name == "seed") return given.seed = value.as_seed(), true;
  return false;
}

// Reads the parameters among the keys of `object`; returns the other keys.
inline std::vector<std::string> read_fields(const Json &object, Given &given) {
  std::vector<std::string> others;
  std::set<std::string> known;
  for (std::size_t i = 0; i < object.keys.size(); ++i) {
    const std::string name = own_name(object.keys[i]);
    if (object.items[i].kind == Json::Null) continue;
    if (!read_field(name, object.items[i], given)) others.push_back(object.keys[i]);
    if (!known.insert(name).second)
      throw Failure(object.path + " states " + name + " twice, once as " + object.keys[i] + "; " + object.advice + ".");
  }
  return others;
}

// `first`, completed from `second`.
inline Given merged(Given first, const Given &second) {
  first.top_w.insert(second.top_w.begin(), second.top_w.end());
  const auto take = [&](auto Given::*field) {
    if (!(first.*field)) first.*field = second.*field;
  };
  for (const WholeField &whole : kWholes) take(whole.field);
  for (const RealField &real : kReals) take(real.field);
  for (const FlagField &flag : kFlags) take(flag.field);
  for (const IdsField &ids : kIds) take(ids.field);
  take(&Given::bad_words_ids);
  take(&Given::logit_bias);
  take(&Given::stop_strings);
  take(&Given::seed);
  return first;
}

}  // namespace topw

#endif
