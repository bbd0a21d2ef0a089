// Streams tokens as text: whole characters, with stop strings held back and cut.
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

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD, for invalid bytes

inline bool is_continuation(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }

inline std::size_t count_characters(std::string_view text) {
  return text.size() - std::size_t(std::count_if(text.begin(), text.end(), is_continuation));
}

inline std::string_view without_characters(std::string_view text, std::size_t count) {
  std::size_t at = 0;
  for (; count > 0 && at < text.size(); --count)
    do ++at;
    while (at < text.size() && is_continuation(text[at]));
  return text.substr(at);
}

// Rejects stray bytes, overlong forms, surrogates and code points beyond U+10FFFF.
inline bool is_utf8(std::string_view text) {
  for (std::size_t at = 0; at < text.size();) {
    const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U; };
    const unsigned first = byte(at);
    const std::size_t more = first < 0x80 ? 0 : first < 0xE0 ? 1 : first < 0xF0 ? 2 : 3;  // bytes after the first
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

// Whether `bytes` (one to four) are a multi-byte character or a prefix of one.
inline bool begins_character(std::string_view bytes) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(bytes[i]); };
  const unsigned first = byte(0);
  if (first < 0xC2 || first > 0xF4) return false;
  if (bytes.size() > (first < 0xE0 ? 2U : first < 0xF0 ? 3U : 4U)) return false;
  for (std::size_t i = 1; i < bytes.size(); ++i)
    if (!is_continuation(bytes[i])) return false;
  if (bytes.size() < 2) return true;
  const unsigned second = byte(1);  // excludes overlong forms, surrogates and code points beyond U+10FFFF
  return !(first == 0xE0 && second < 0xA0) && !(first == 0xED && second > 0x9F) && !(first == 0xF0 && second < 0x90) &&
         !(first == 0xF4 && second > 0x8F);
}

// Number of characters shown for `bytes`: U+FFFD for each maximal invalid stretch.
inline std::size_t count_shown(std::string_view bytes) {
  std::size_t count = 0;
  for (std::size_t at = 0; at < bytes.size(); ++count) {
    std::size_t size = 1;  // of the longest character prefix here
    for (std::size_t longer = 2; longer <= 4 && at + longer <= bytes.size(); ++longer)
      if (begins_character(bytes.substr(at, longer))) size = longer;
    at += size;
  }
  return count;
}

// Number of trailing bytes that form an incomplete character.
inline std::size_t count_pending(std::string_view bytes) {
  for (std::size_t size = 1; size <= std::min<std::size_t>(bytes.size(), 3); ++size) {
    const std::string_view end = bytes.substr(bytes.size() - size);
    if (!is_utf8(end) && begins_character(end)) return size;
  }
  return 0;
}

using Decode = std::function<std::string(const Tokens &)>;
// A token's bytes: "" if it has no text; nullopt if it cannot share a character with other tokens.
using BytesOf = std::function<std::optional<std::string>(std::int64_t)>;

// Decodes tokens one by one. A token's text depends on earlier ones: a byte-level token may hold part of a character,
// and a SentencePiece token loses its leading space at the start of a text. So each token is decoded after the last
// ones with text, whose own text is removed. Incomplete characters are held back. If the prompt ends inside a
// character, the text begins with that character, or with U+FFFD if the answer does not complete it.
class IncrementalDecoder {
 public:
  // The last few prompt tokens are context.
  IncrementalDecoder(Decode decode, const BytesOf &bytes_of, const Tokens &prompt) : decode_(std::move(decode)) {
    if (!begin_inside_character(bytes_of, prompt)) begin_behind(bytes_of, prompt);
    prompt_ = ids_.size();
  }

  // The text `token` completes; may be empty.
  std::string push(std::int64_t token) {
    ids_.push_back(token);
    const std::string text = decode_(from(start_));
    const bool unfinished = text.size() >= kReplacement.size() &&
                            text.compare(text.size() - kReplacement.size(), kReplacement.size(), kReplacement) == 0;
    return unfinished ? "" : give_out(text);
  }
  // The text held back, an incomplete character as U+FFFD; none without generated tokens. Call once, at the end.
  std::string flush() {
    return ids_.size() == read_ || ids_.size() == prompt_ ? "" : give_out(decode_(from(start_)));
  }

 private:
  static constexpr std::size_t kContext = 6;    // prompt tokens decoded with the first generated ones
  static constexpr std::size_t kCharacter = 4;  // most tokens per UTF-8 character

  // Keeps the tokens of an incomplete character at the prompt's end; false if none.
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
  // Keeps the last tokens with text, starting at a character boundary.
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
    if (!gained.empty()) {  // tokens without text (special ones) are not context
      start_ = std::exchange(read_, ids_.size());
      known_ = count_characters(decode_(from(start_)));
    }
    return gained;
  }

  Decode decode_;
  Tokens ids_;
  std::size_t start_ = 0;   // of the context
  std::size_t read_ = 0;    // of tokens whose text is not yet returned
  std::size_t known_ = 0;   // characters of the window already returned
  std::size_t prompt_ = 0;  // prompt tokens among ids_
};

// Returns text up to the first stop string, however the text is split into pieces. The one that ends first counts; of
// two that end together, the longer one.
class StopStrings {
 public:
  explicit StopStrings(std::vector<std::string> stops) : stops_(std::move(stops)) {}

  // The new text that cannot belong to a stop string.
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
  // The text held back, at the end.
  std::string flush() { return std::exchange(held_, ""); }

  std::optional<std::string> found;

 private:
  // Length of the longest suffix of `text` that is a prefix of a stop string.
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

// A row's text: decoder and stop strings; `push` and `flush` return the text to show. The first `guarded` tokens,
// required by min_new_tokens, cannot end it.
class RowText {
 public:
  RowText(IncrementalDecoder decoder, std::vector<std::string> stops, std::int64_t guarded)
      : decoder_(std::move(decoder)), stops_(std::move(stops)), guarded_(guarded) {}

  const std::optional<std::string> &found() const { return stops_.found; }

  std::string push(std::int64_t token) {
    const std::string text = decoder_.push(token);
    if (guarded_ <= 1) return stops_.push(text);  // the last required token may complete a stop string
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
