// From tokens to text while they arrive: whole characters only, stop strings held back and cut.
#ifndef TOPW_TEXT_H
#define TOPW_TEXT_H

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "common.h"

namespace topw {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // what decoders put for bytes that are no character

inline bool is_continuation(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }

inline std::size_t count_characters(std::string_view text) {
  return text.size() - std::size_t(std::count_if(text.begin(), text.end(), is_continuation));
}

// `text` without its first `count` characters.
inline std::string_view without_characters(std::string_view text, std::size_t count) {
  std::size_t at = 0;
  for (; count > 0 && at < text.size(); --count)
    do ++at;
    while (at < text.size() && is_continuation(text[at]));
  return text.substr(at);
}

// Whether `text` is UTF-8: no stray bytes, no overlong forms, no surrogates, nothing beyond U+10FFFF.
inline bool is_utf8(std::string_view text) {
  for (std::size_t at = 0; at < text.size();) {
    const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U; };
    const unsigned first = byte(at);
    const std::size_t more = first < 0x80 ? 0 : first < 0xE0 ? 1 : first < 0xF0 ? 2 : 3;  // bytes behind the first
    if ((first >= 0x80 && first < 0xC2) || first > 0xF4) return false;
    unsigned code = more == 0 ? first : first & (0x3FU >> more);
    for (std::size_t i = 1; i <= more; ++i) {
      if ((byte(at + i) & 0xC0) != 0x80) return false;
      code = code << 6 | (byte(at + i) & 0x3F);
    }
    if ((more == 2 && code < 0x800) || (more == 3 && code < 0x10000) || code > 0x10FFFF) return false;
    if (code >= 0xD800 && code <= 0xDFFF) return false;
    at += more + 1;
  }
  return true;
}

using Decode = std::function<std::string(const Tokens &)>;

// Turns tokens into text one by one. What a token looks like depends on those before it: a byte-level token may hold
// part of a character, a SentencePiece one loses its leading space at the start of a text. So each token is decoded
// together with the last ones that gave text, and what those alone give is taken off. Text that ends inside a character
// is held back.
class IncrementalDecoder {
 public:
  // Of the prompt the last few tokens serve as context; none of their text is given out.
  IncrementalDecoder(Decode decode, const Tokens &prompt) : decode_(std::move(decode)) {
    for (std::size_t size = kContext; size < kContext + kCharacter; ++size) {
      ids_.assign(prompt.end() - std::ptrdiff_t(std::min(size, prompt.size())), prompt.end());
      if (decode_(ids_).compare(0, kReplacement.size(), kReplacement) != 0) break;  // it begins with a whole character
    }
    read_ = ids_.size();
  }

  // The text that became certain with `token`; often none, when a character is still in parts.
  std::string push(std::int64_t token) {
    ids_.push_back(token);
    const std::string text = decode_(from(ids_.size()));
    const bool unfinished = text.size() >= kReplacement.size() &&
                            text.compare(text.size() - kReplacement.size(), kReplacement.size(), kReplacement) == 0;
    return unfinished ? "" : give_out(text);
  }
  // What was held back; an unfinished character comes out as U+FFFD. To be called once, at the end.
  std::string flush() { return read_ < ids_.size() ? give_out(decode_(from(ids_.size()))) : ""; }

 private:
  static constexpr std::size_t kContext = 6;    // prompt tokens that the first generated ones are decoded with
  static constexpr std::size_t kCharacter = 4;  // most tokens that can share one character of UTF-8

  Tokens from(std::size_t end) const {
    return Tokens(ids_.begin() + std::ptrdiff_t(start_), ids_.begin() + std::ptrdiff_t(end));
  }
  std::string give_out(const std::string &text) {
    const std::size_t known = count_characters(decode_(from(read_)));
    if (count_characters(text) > known) {  // tokens without text (special ones) are no context: the window stays
      start_ = read_;
      read_ = ids_.size();
    }
    return std::string(without_characters(text, known));
  }

  Decode decode_;
  Tokens ids_;
  std::size_t start_ = 0;  // of the tokens that give context
  std::size_t read_ = 0;   // of the tokens whose text was not given out yet
};

// Lets text through up to the first stop string, whatever pieces the text comes in. The one whose last character comes
// first wins; of two that end together, the longer.
class StopStrings {
 public:
  explicit StopStrings(std::vector<std::string> stops) : stops_(std::move(stops)) {}

  // The part of the text so far that can no longer belong to a stop string and was not given out before.
  std::string push(const std::string &piece) {
    if (found || piece.empty()) return "";
    std::string text = std::exchange(held_, "") + piece;
    std::optional<std::tuple<std::size_t, std::size_t, std::string>> first;  // end, start, stop string
    for (const std::string &stop : stops_)
      if (const std::size_t start = text.find(stop); start != std::string::npos) {
        const std::tuple match{start + stop.size(), start, stop};
        if (!first || match < *first) first = match;
      }
    if (first) {
      found = std::get<2>(*first);
      return text.substr(0, std::get<1>(*first));
    }
    const std::size_t cut = text.size() - possible_beginning(text);
    held_ = text.substr(cut);
    return text.substr(0, cut);
  }
  // What was held back, once it is sure that nothing follows.
  std::string flush() { return std::exchange(held_, ""); }

  std::optional<std::string> found;

 private:
  // Length of the longest end of `text` with which some stop string begins.
  std::size_t possible_beginning(const std::string &text) const {
    std::size_t longest = 0;
    for (const std::string &stop : stops_)
      for (std::size_t size = std::min(text.size(), stop.size() - 1); size > longest; --size)
        if (text.compare(text.size() - size, size, stop, 0, size) == 0) longest = size;
    return longest;
  }

  std::vector<std::string> stops_;
  std::string held_;
};

// The text of one row, decoder and stop strings together; `push` and `flush` return what may be shown. The first
// `guarded` tokens, those that min_new_tokens demands, cannot end the text.
class RowText {
 public:
  RowText(IncrementalDecoder decoder, std::vector<std::string> stops, std::int64_t guarded)
      : decoder_(std::move(decoder)), stops_(std::move(stops)), guarded_(guarded) {}

  const std::optional<std::string> &found() const { return stops_.found; }

  std::string push(std::int64_t token) {
    const std::string text = decoder_.push(token);
    if (guarded_ <= 1) return stops_.push(text);  // the last demanded token may already complete a stop string
    --guarded_;
    return text;
  }
  std::string flush() {
    if (found()) return "";
    const std::string text = stops_.push(decoder_.flush());
    return found() ? text : text + stops_.flush();
  }

 private:
  IncrementalDecoder decoder_;
  StopStrings stops_;
  std::int64_t guarded_;
};

}  // namespace topw

#endif
