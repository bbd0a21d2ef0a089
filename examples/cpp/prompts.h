// Prompts from the command line, standard input, or a batch of JSON lines.
#ifndef TOPW_PROMPTS_H
#define TOPW_PROMPTS_H

#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "command_line.h"
#include "common.h"
#include "folder.h"
#include "json.h"
#include "request.h"
#include "text.h"
#include "tokenizer.h"

namespace topw {

// `tokenizer` may be null.
class PromptReader {
 public:
  PromptReader(const Options &options, const Folder &folder, const Tokenizer *tokenizer)
      : options_(options), folder_(folder), tokenizer_(tokenizer) {}

  std::vector<Prompt> read() const {
    if (options_.batch) return read_batch();
    if (!options_.ids.empty()) return {begun(options_.ids, options_.given)};
    if (!tokenizer_) return {begun(read_ids(), options_.given)};
    std::vector<Prompt> prompts;
    for (const std::string &text : options_.texts) prompts.push_back(of_text(text, options_.given));
    return prompts.empty() ? std::vector{of_text(read_text(), options_.given)} : prompts;
  }

 private:
  Prompt begun(Tokens ids, const Given &given) const {  // an empty prompt becomes the BOS token
    if (ids.empty() && folder_.begin) ids.push_back(*folder_.begin);
    return {ids, given};
  }
  Prompt of_text(const std::string &text, const Given &given) const {
    return begun(tokenizer_->encode(text, !options_.bare_prompt), given);
  }

  static Tokens read_ids() {
    Tokens ids;
    for (std::string word; std::cin >> word;) {
      const auto id = parse<std::int64_t>(word);
      if (!id) throw Failure("'" + word + "' on standard input is not a token id, which is an integer; a text " +
                             "needs --tokenizer-library.");
      ids.push_back(*id);
    }
    return ids;
  }
  static std::string read_text() {  // without one trailing line break
    std::string text{std::istreambuf_iterator<char>(std::cin), {}};
    for (const char end : {'\n', '\r'})
      if (!text.empty() && text.back() == end) text.pop_back();
    return text;
  }

  std::vector<Prompt> read_batch() const {
    std::vector<Prompt> prompts;
    for (std::string line; std::getline(std::cin, line);) {
      if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
      const std::string name = "request " + std::to_string(prompts.size());
      if (!is_utf8(line)) throw Failure(name + " is not UTF-8; convert it.");
      prompts.push_back(of_json(JsonReader(line, name, "correct the request").read()));
    }
    if (prompts.empty()) throw Failure("standard input has no request; give a JSON object on every line.");
    return prompts;
  }
  Prompt of_json(const Json &request) const {
    request.need(request.kind == Json::Object, "an object with a prompt");
    const Json &prompt = request.at("prompt");
    Given given;
    for (const std::string &other : read_fields(request, given))
      if (other != "prompt")
        throw Failure(request.path + " states '" + other +
                      "', which is not a parameter of a row; see docs/guide/runtime.md.");
    const Given all = merged(given, options_.given);
    if (all.stop_strings && !tokenizer_)
      throw Failure(request.path + " has stop strings, which need a tokenizer; name its library with " +
                    "--tokenizer-library.");
    if (prompt.kind != Json::Text) return begun(ids_in(prompt), all);
    prompt.need(tokenizer_ != nullptr, "a list of token ids where there is no --tokenizer-library");
    return of_text(prompt.text, all);
  }
  static Tokens ids_in(const Json &prompt) {
    Tokens ids;
    for (const Json &id : prompt.as_list()) ids.push_back(id.as_whole(-kMost));  // the vocabulary is checked later
    return ids;
  }

  const Options &options_;
  const Folder &folder_;
  const Tokenizer *tokenizer_;
};

}  // namespace topw

#endif
