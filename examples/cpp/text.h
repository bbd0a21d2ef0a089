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

// Whether `bytes`, one to four of them, are a character of several bytes or its beginning.
inline bool begins_character(std::string_view bytes) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(bytes[i]); };
  const unsigned first = byte(0);
  if (first < 0xC2 || first > 0xF4) return false;
  if (bytes.size() > (first < 0xE0 ? 2U : first < 0xF0 ? 3U : 4U)) return false;
  for (std::size_t i = 1; i < bytes.size(); ++i)
    if (!is_continuation(bytes[i])) return false;
  if (bytes.size() < 2) return true;
  const unsigned second = byte(1);  // where overlong forms, surrogates and what is beyond U+10FFFF show
  return !(first == 0xE0 && second < 0xA0) && !(first == 0xED && second > 0x9F) && !(first == 0xF0 && second < 0x90) &&
         !(first == 0xF4 && second > 0x8F);
}

// Characters of `bytes` as a decoder shows them: U+FFFD for each longest stretch that begins no valid character.
inline std::size_t count_shown(std::string_view bytes) {
  std::size_t count = 0;
  for (std::size_t at = 0; at < bytes.size(); ++count) {
    std::size_t size = 1;  // of the longest beginning of a character here
    for (std::size_t longer = 2; longer <= 4 && at + longer <= bytes.size(); ++longer)
      if (begins_character(bytes.substr(at, longer))) size = longer;
    at += size;
  }
  return count;
}

// How many bytes at the end of `bytes` begin a character that more bytes can complete.
inline std::size_t count_pending(std::string_view bytes) {
  for (std::size_t size = 1; size <= std::min<std::size_t>(bytes.size(), 3); ++size) {
    const std::string_view end = bytes.substr(bytes.size() - size);
    if (!is_utf8(end) && begins_character(end)) return size;
  }
  return 0;
}

using Decode = std::function<std::string(const Tokens &)>;
// The bytes of a token: "" if it gives no text, nothing if it shares no character with other tokens.
using BytesOf = std::function<std::optional<std::string>(std::int64_t)>;

// Turns tokens into text one by one. What a token looks like depends on those before it: a byte-level token may hold
// part of a character, a SentencePiece one loses its leading space at the start of a text. So each token is decoded
// together with the last ones that gave text, and what those alone give is taken off. Text that ends inside a character
// is held back. Where the prompt ends inside a character, the text begins with that character, or with U+FFFD where the
// answer does not complete it.
class IncrementalDecoder {
 public:
  // Of the prompt the last few tokens serve as context.
  IncrementalDecoder(Decode decode, const BytesOf &bytes_of, const Tokens &prompt) : decode_(std::move(decode)) {
    if (!begin_inside_character(bytes_of, prompt)) begin_behind(bytes_of, prompt);
    prompt_ = ids_.size();
  }

  // The text that became certain with `token`; often none, when a character is still in parts.
  std::string push(std::int64_t token) {
    ids_.push_back(token);
    const std::string text = decode_(from(start_));
    const bool unfinished = text.size() >= kReplacement.size() &&
                            text.compare(text.size() - kReplacement.size(), kReplacement.size(), kReplacement) == 0;
    return unfinished ? "" : give_out(text);
  }
  // What was held back; an unfinished character comes out as U+FFFD. To be called once, at the end. Without a token
  // behind the prompt there is no text.
  std::string flush() {
    return ids_.size() == read_ || ids_.size() == prompt_ ? "" : give_out(decode_(from(start_)));
  }

 private:
  static constexpr std::size_t kContext = 6;    // prompt tokens that the first generated ones are decoded with
  static constexpr std::size_t kCharacter = 4;  // most tokens that can share one character of UTF-8

  // Take the tokens that hold an unfinished character at the prompt's end; false if there is no such character.
  bool begin_inside_character(const BytesOf &bytes_of, const Tokens &prompt) {
    std::string bytes;
    std::vector<std::size_t> sizes;
    Tokens held;
    for (auto token = prompt.rbegin(); token != prompt.rend() && bytes.size() < kCharacter; ++token) {
      const std::optional<std::string> spelled = bytes_of(*token);
      if (!spelled) break;
      if (spelled->empty()) continue;
      held.insert(held.begin(), *token);
      sizes.insert(sizes.begin(), spelled->size());
      bytes.insert(0, *spelled);
    }
    const std::size_t pending = count_pending(bytes);
    if (pending == 0) return false;
    std::size_t dropped = 0;
    for (std::size_t left = bytes.size(); left - sizes[dropped] >= pending; ++dropped) {
      left -= sizes[dropped];
      bytes.erase(0, sizes[dropped]);
    }
    ids_.assign(held.begin() + std::ptrdiff_t(dropped), held.end());
    known_ = count_shown(std::string_view(bytes).substr(0, bytes.size() - pending));
    return true;
  }
  // Take the last tokens that give text, beginning with a whole character.
  void begin_behind(const BytesOf &bytes_of, const Tokens &prompt) {
    constexpr std::size_t most = kContext + kCharacter - 1;
    Tokens last;
    for (auto token = prompt.rbegin(); token != prompt.rend() && last.size() < most; ++token)
      if (bytes_of(*token) != std::string()) last.insert(last.begin(), *token);
    for (std::size_t size = kContext; size <= most; ++size) {
      ids_.assign(last.end() - std::ptrdiff_t(std::min(size, last.size())), last.end());
      if (decode_(ids_).compare(0, kReplacement.size(), kReplacement) != 0) break;
    }
    read_ = ids_.size();
    known_ = count_characters(decode_(ids_));
  }

  Tokens from(std::size_t start) const { return Tokens(ids_.begin() + std::ptrdiff_t(start), ids_.end()); }
  std::string give_out(const std::string &text) {
    const std::string gained(without_characters(text, known_));
    if (!gained.empty()) {  // tokens without text (special ones) are no context: the window stays
      start_ = std::exchange(read_, ids_.size());
      known_ = count_characters(decode_(from(start_)));
    }
    return gained;
  }

  Decode decode_;
  Tokens ids_;
  std::size_t start_ = 0;   // of the tokens that give context
  std::size_t read_ = 0;    // of the tokens whose text was not given out yet
  std::size_t known_ = 0;   // characters of the window that were given out before
  std::size_t prompt_ = 0;  // tokens of the prompt among ids_
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
