// The command line.
#ifndef TOPW_COMMAND_LINE_H
#define TOPW_COMMAND_LINE_H

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common.h"
#include "onnxruntime.h"
#include "parameters.h"
#include "text.h"

namespace topw {

struct Options {
  std::string folder, native_library, tokenizer_library, onnxruntime = TOPW_ONNXRUNTIME;
  Tokens ids;                      // a prompt
  std::vector<std::string> texts;  // prompts
  Given given;
  std::int64_t samples = 1;
  int threads = -1;  // onnxruntime's choice
  bool cuda = false, batch = false, json = false, stats = false, self_test = false;
  bool bare_prompt = false, special_text = false;
};

constexpr const char *kHelp = R"(Usage: topw_host FOLDER [OPTIONS] [TOKEN_ID ...]

Runs the folder that topw-export wrote. Without a tokenizer it reads token ids, from standard input if none are
given, and prints the ids that it draws, one per line. With one it reads and prints text.

Prompts and answers:
  --tokenizer-library PATH   shared library with the C interface of mlc-ai/tokenizers-cpp
  --prompt TEXT              a prompt; repeatable (standard input, without one line break at its end)
  --batch                    every line of standard input is a JSON object: "prompt" (a text or a list of token ids)
                             and parameters by the names of the Python runtime, which override the options given
                             here; all lines run as one batch
  --num-return-sequences N   answers to each prompt (1)
  --json                     print one JSON object per answer, each on a line (implied by --batch and several answers)
  --no-add-special-tokens    add no special tokens to a text that has them, such as the output of a chat template
  --no-skip-special-tokens   show special tokens in the text

Limits and ends:
  --max-new-tokens N         maximum tokens to draw (the model's, else 256); never more than its context holds
  --min-new-tokens N         minimum tokens before an end of sequence or a stop string
  --eos ID                   token id that ends the answer; repeatable (the model's)
  --ignore-eos               continue after the end of sequence
  --stop TEXT                the answer ends before this text; repeatable

Draws:
  --seed N                   in [0, 2^64): the same seed, prompt and parameters give the same tokens (fresh)
  --temperature X            sampling temperature, >= 0; below 1e-5 greedy
  --selection-temperature X  temperature that chooses the crop; 0: as --temperature
  --lam X, --beta X          weights of the entropy term and of the log-mass reward, >= 0
  --init-top-p X             mass of the nucleus warm start, in (0, 1]
  --geom-scale X             factor on distances; negative repels

Edits of the logits:
  --repetition-penalty X     penalty for tokens that occurred before, > 0; 1 is none
  --presence-penalty X       subtract from logits of generated tokens, once
  --frequency-penalty X      subtract from logits of generated tokens, per occurrence
  --no-repeat-ngram-size N   never generate an n-gram of this size twice; 0 allows it
  --logit-bias ID=BIAS       add to a token's logit; -inf bans it; repeatable
  --suppress-tokens ID,...   ban these tokens; repeatable
  --bad-words-ids ID,...     ban this sequence of tokens; repeatable

Values not given come from generation_config.json, else from the export.

Running:
  --provider cpu|cuda        where the graph runs (cpu)
  --threads N                threads of an operator, in [0, 1024]; 0 lets onnxruntime choose
  --native-library PATH      libtopw.so, which answers the sampler's node faster than the graph
  --onnxruntime PATH         onnxruntime's shared library ()" TOPW_ONNXRUNTIME R"()
  --stats                    print a line of figures per answer on standard error
  --self-test                compare the random numbers with the published ones, and end
  --help                     this text

Exit codes: 0, 1 (failed), 2 (usage).
)";

template <typename Number>
Number whole(const std::string &name, const std::string &text, Number most, Number least = 0) {
  const auto number = parse<Number>(text);
  if (!number || *number < least || *number > most)
    throw UsageError(name + " is '" + text + "', but must be an integer in [" + std::to_string(least) + ", " +
                     std::to_string(most) + "].");
  return *number;
}

inline double real(const std::string &name, const std::string &text, bool (*holds)(double), const char *bound) {
  char *end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end || !in_range(holds, value))
    throw UsageError(name + " is '" + text + "', but must be " + bound + ", in float32 too.");
  return value;
}

inline Tokens ids_of(const std::string &name, const std::string &text) {  // "3,5,8"
  Tokens ids;
  for (std::size_t start = 0; start <= text.size();) {
    const std::size_t end = std::min(text.find(',', start), text.size());
    ids.push_back(whole(name, text.substr(start, end - start), kMost));
    start = end + 1;
  }
  return ids;
}

inline const std::string &utf8(const std::string &name, const std::string &text) {
  if (text.empty() || !is_utf8(text)) throw UsageError(name + " is empty or not UTF-8; give some text.");
  return text;
}

using Take = std::function<void(const std::string &name, const std::string &value)>;
using Takes = std::map<std::string, Take>;

// "max_new_tokens" -> "--max-new-tokens"
inline std::string option_of(std::string name) {
  std::replace(name.begin(), name.end(), '_', '-');
  return "--" + name;
}

inline void add_parameters(Given &given, Takes &takes) {
  for (const Parameter &parameter : kParameters)
    for (const char *name : {parameter.name, parameter.alias})
      takes[option_of(name)] = [&](auto &option, auto &value) {
        given.top_w[parameter.name] = to_float32(real(option, value, parameter.holds, parameter.bound));
      };
  for (const RealField &field : kReals)
    takes[option_of(field.name)] = [&](auto &option, auto &value) {
      given.*field.field = real(option, value, field.holds, field.bound);
    };
  for (const WholeField &field : kWholes)
    if (field.field == &Given::max_new_tokens || field.field == &Given::min_new_tokens ||
        field.field == &Given::no_repeat_ngram_size)
      takes[option_of(field.name)] = [&](auto &option, auto &value) {
        given.*field.field = whole(option, value, kMost);
      };
  takes["--seed"] = [&](auto &option, auto &value) { given.seed = whole(option, value, ~std::uint64_t{0}); };
}

template <typename List>
List &started(std::optional<List> &list) {
  return list ? *list : list.emplace();
}

inline void add_lists(Given &given, Takes &takes) {
  takes["--eos"] = [&](auto &option, auto &value) {
    started(given.eos_token_id).push_back(whole(option, value, kMost));
  };
  takes["--suppress-tokens"] = [&](auto &option, auto &value) {
    for (const std::int64_t id : ids_of(option, value)) started(given.suppress_tokens).push_back(id);
  };
  takes["--bad-words-ids"] = [&](auto &option, auto &value) {
    started(given.bad_words_ids).push_back(ids_of(option, value));
  };
  takes["--logit-bias"] = [&](auto &option, auto &value) {
    const std::size_t sign = value.find('=');
    if (sign == std::string::npos) throw UsageError(option + " is '" + value + "', but must be ID=BIAS.");
    const std::int64_t id = whole(option, value.substr(0, sign), kMost);
    const double bias = real(option, value.substr(sign + 1), is_bias, kBiasBound);
    if (!started(given.logit_bias).emplace(id, bias).second)
      throw UsageError(option + " names the token id " + std::to_string(id) + " twice; give it one bias.");
  };
  takes["--stop"] = takes["--stop-strings"] = [&](auto &option, auto &value) {
    started(given.stop_strings).push_back(utf8(option, value));
  };
}

inline Takes options_with_values(Options &o) {
  Takes takes{
      {"--prompt", [&](auto &, auto &value) { o.texts.push_back(value); }},
      {"--num-return-sequences",
       [&](auto &name, auto &value) { o.samples = whole<std::int64_t>(name, value, 1 << 20, 1); }},
      {"--threads", [&](auto &name, auto &value) { o.threads = whole(name, value, 1024); }},
      {"--native-library", [&](auto &, auto &value) { o.native_library = value; }},
      {"--tokenizer-library", [&](auto &, auto &value) { o.tokenizer_library = value; }},
      {"--onnxruntime", [&](auto &, auto &value) { o.onnxruntime = value; }},
      {"--provider",
       [&](auto &name, auto &value) {
         o.cuda = value == "cuda";
         if (!o.cuda && value != "cpu") throw UsageError(name + " is '" + value + "', but must be cpu or cuda.");
       }},
  };
  add_parameters(o.given, takes);
  add_lists(o.given, takes);
  return takes;
}

// Rejects options that conflict or need another.
inline void check_options(const Options &o) {
  if (o.folder.empty() && !o.self_test) throw UsageError("no folder is given; see --help.");
  if (int(!o.ids.empty()) + int(!o.texts.empty()) + int(o.batch) > 1)
    throw UsageError("prompts are given in two ways; give token ids, --prompt or --batch.");
  if (!o.tokenizer_library.empty()) return;
  const bool stops = o.given.stop_strings.has_value();
  const std::pair<bool, const char *> uses[] = {{!o.texts.empty(), "--prompt"},
                                                {stops, "--stop"},
                                                {o.bare_prompt, "--no-add-special-tokens"},
                                                {o.special_text, "--no-skip-special-tokens"}};
  for (const auto &[used, name] : uses)
    if (used) throw UsageError(std::string(name) + " needs a tokenizer; name its library with --tokenizer-library.");
}

inline Options parse_command_line(const std::vector<std::string> &arguments) {
  Options o;
  bool ignore_eos = false;
  const Takes takes = options_with_values(o);
  const std::map<std::string, bool *> flags{{"--ignore-eos", &ignore_eos},
                                            {"--batch", &o.batch},
                                            {"--json", &o.json},
                                            {"--stats", &o.stats},
                                            {"--self-test", &o.self_test},
                                            {"--no-add-special-tokens", &o.bare_prompt},
                                            {"--no-skip-special-tokens", &o.special_text}};
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string &argument = arguments[i];
    if (const auto flag = flags.find(argument); flag != flags.end()) {
      *flag->second = true;
    } else if (const auto take = takes.find(argument); take != takes.end()) {
      if (++i == arguments.size()) throw UsageError(argument + " needs a value; see --help.");
      take->second(argument, arguments[i]);
    } else if (argument.rfind("--", 0) == 0) {
      throw UsageError(argument + " is not an option; see --help.");
    } else if (o.folder.empty()) {
      o.folder = argument;
    } else if (const auto id = parse<std::int64_t>(argument)) {
      o.ids.push_back(*id);
    } else {
      throw UsageError("'" + argument + "' is not a token id, which is an integer; give a text with --prompt.");
    }
  }
  if (ignore_eos) o.given.ignore_eos = true;
  check_options(o);
  return o;
}

}  // namespace topw

#endif
