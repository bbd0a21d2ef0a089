// A strict JSON reader (RFC 8259; no repeated keys), and string output.
#ifndef TOPW_JSON_H
#define TOPW_JSON_H

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <iterator>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common.h"

namespace topw {

struct Json {
  enum Kind { Null, Bool, Number, Text, List, Object } kind = Null;
  bool truth = false;
  double number = 0;
  std::string text;               // of a number: its digits
  std::vector<std::string> keys;  // of an object: one per item
  std::vector<Json> items;
  std::string path;             // source and path of this value, for errors
  const char *advice = "";      // the next step, for errors

  std::string shown() const {
    if (kind == Text) return "'" + text.substr(0, 60) + "'";
    if (kind == Bool) return truth ? "true" : "false";
    std::ostringstream digits;
    digits << std::setprecision(15) << number;
    return kind == Number ? digits.str() : kind == List ? "a list" : kind == Null ? "null" : "an object";
  }
  void need(bool holds, const std::string &what) const {
    if (!holds) throw Failure(path + " is " + shown() + ", but must be " + what + "; " + advice + ".");
  }
  const Json *find(std::string_view key) const {  // null if absent or null
    const auto place = std::find(keys.begin(), keys.end(), key) - keys.begin();
    return place == std::ptrdiff_t(keys.size()) || items[place].kind == Null ? nullptr : &items[place];
  }
  const Json &at(const std::string &key) const {
    if (const Json *found = find(key)) return *found;
    throw Failure(path + " has no " + key + "; " + advice + ".");
  }
  const std::vector<Json> &as_list() const {
    need(kind == List, "a list");
    return items;
  }
  const std::string &as_text() const {
    need(kind == Text, "a text");
    return text;
  }
  bool as_flag() const {
    need(kind == Bool, "true or false");
    return truth;
  }
  double as_number() const {
    need(kind == Number, "a number");
    return number;
  }
  std::int64_t as_whole(std::int64_t least = 0, std::int64_t most = kMost) const {
    const bool fits = kind == Number && number >= double(least) && number <= double(most);
    need(fits && number == std::floor(number),
         "an integer in [" + std::to_string(least) + ", " + std::to_string(most) + "]");
    return std::int64_t(number);
  }
  std::uint64_t as_seed() const {  // all 64 bits: more than a double
    const auto seed = parse<std::uint64_t>(text);
    need(kind == Number && seed, "an integer in [0, " + std::to_string(~std::uint64_t{0}) + "]");
    return *seed;
  }
};

class JsonReader {
 public:
  JsonReader(std::string_view text, std::string source, const char *advice = "export the model again")
      : text_(text), source_(std::move(source)), advice_(advice) {}

  Json read() {
    Json value = read_value(source_, 0);
    skip_space();
    if (at_ != text_.size()) fail("something follows the value");
    return value;
  }

 private:
  static constexpr int kDeepest = 64;

  [[noreturn]] void fail(const char *what) const {
    throw Failure(source_ + " is not JSON (byte " + std::to_string(at_) + ": " + what + "); " + advice_ + ".");
  }
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  void skip_space() { at_ = std::min(text_.find_first_not_of(" \t\r\n", at_), text_.size()); }
  bool take(std::string_view word) {
    if (text_.compare(at_, word.size(), word) != 0) return false;
    at_ += word.size();
    return true;
  }

  Json read_value(const std::string &path, int depth) {
    if (depth > kDeepest) fail("it is nested too deep");
    skip_space();
    Json value;
    value.path = path;
    value.advice = advice_;
    if (take("{")) {
      value.kind = Json::Object;
      read_items(value, "}", depth);
    } else if (take("[")) {
      value.kind = Json::List;
      read_items(value, "]", depth);
    } else if (take("\"")) {
      value.kind = Json::Text;
      value.text = read_text();
    } else if (take("true")) {
      value.kind = Json::Bool;
      value.truth = true;
    } else if (take("false")) {
      value.kind = Json::Bool;
    } else if (!take("null")) {
      value.kind = Json::Number;
      value.text = read_digits();
      value.number = std::strtod(value.text.c_str(), nullptr);
    }
    return value;
  }

  void read_items(Json &value, std::string_view end, int depth) {
    std::set<std::string> known;
    skip_space();
    if (take(end)) return;
    do {
      std::string name = std::to_string(value.items.size());
      if (value.kind == Json::Object) {
        skip_space();
        if (!take("\"")) fail("a key is missing");
        name = read_text();
        if (!known.insert(name).second) fail("a key is repeated");
        value.keys.push_back(name);
        skip_space();
        if (!take(":")) fail("a colon is missing");
      }
      value.items.push_back(read_value(value.path + " " + name, depth + 1));
      skip_space();
    } while (take(","));
    if (!take(end)) fail("a comma or the end is missing");
  }

  std::string read_text() {
    std::string text;
    while (!take("\"")) {
      if (static_cast<unsigned char>(peek()) < ' ') fail("a text does not end");
      if (take("\\u")) {
        append_utf8(text, read_escape());
      } else if (take("\\")) {
        static constexpr std::string_view kNames = "\"\\/bfnrt", kMeant = "\"\\/\b\f\n\r\t";
        const std::size_t place = kNames.find(peek());
        if (place == std::string_view::npos) fail("an escape is unknown");
        text += kMeant[place];
        ++at_;
      } else {
        text += text_[at_++];
      }
    }
    return text;
  }
  std::uint32_t read_escape() {  // a code point, after the first \u
    const std::uint32_t first = read_hex();
    if (first < 0xD800 || first > 0xDFFF) return first;
    const std::uint32_t second = first < 0xDC00 && take("\\u") ? read_hex() : 0;
    if (second < 0xDC00 || second > 0xDFFF) fail("half of a pair of escapes is missing");
    return 0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00);
  }
  std::uint32_t read_hex() {
    std::uint32_t value = 0;
    const char *start = text_.data() + at_, *stop = text_.data() + std::min(at_ + 4, text_.size());
    if (std::from_chars(start, stop, value, 16).ptr != start + 4) fail("four hexadecimal digits are missing");
    at_ += 4;
    return value;
  }
  static void append_utf8(std::string &text, std::uint32_t code) {
    if (code < 0x80) return text.push_back(char(code));
    const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;  // bytes after the first
    text += char((0xFF00 >> (more + 1) & 0xFF) | code >> (6 * more));
    for (int i = more - 1; i >= 0; --i) text += char(0x80 | (code >> (6 * i) & 0x3F));
  }

  std::string read_digits() {  // of a number
    const std::size_t start = at_;
    const auto digits = [&] {
      const std::size_t first = at_;
      while (peek() >= '0' && peek() <= '9') ++at_;
      if (at_ == first) fail("there is no value");
    };
    take("-");
    if (!take("0")) digits();
    if (take(".")) digits();
    if (take("e") || take("E")) {
      if (!take("-")) take("+");
      digits();
    }
    return std::string(text_.substr(start, at_ - start));
  }

  std::string_view text_;
  std::string source_;
  const char *advice_;
  std::size_t at_ = 0;
};

inline std::string read_file(const std::filesystem::path &path) {
  std::ifstream stream(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(stream), {}};
  if (!stream) throw Failure(path.string() + " cannot be read; export or copy the folder again.");
  return text;
}

inline Json read_json(const std::filesystem::path &path) {
  return JsonReader(read_file(path), path.filename().string()).read();
}

// UTF-8 `text` as a JSON string.
inline std::string as_json_text(std::string_view text) {
  static constexpr std::string_view kEscaped = "\"\\\b\f\n\r\t", kNames = "\"\\bfnrt";
  std::ostringstream written;
  written << '"' << std::hex << std::setfill('0');
  for (const char c : text) {
    const std::size_t place = kEscaped.find(c);
    if (place != std::string_view::npos)
      written << '\\' << kNames[place];
    else if (static_cast<unsigned char>(c) < ' ')
      written << "\\u" << std::setw(4) << int(c);
    else
      written << c;
  }
  written << '"';
  return written.str();
}

}  // namespace topw

#endif
