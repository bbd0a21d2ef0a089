// tokenizer.json through mlc-ai/tokenizers-cpp's C interface (tokenizers_c.h), which wraps the Python runtime's
// tokenizers library. The shared library is loaded at startup.
#ifndef TOPW_TOKENIZER_H
#define TOPW_TOKENIZER_H

#include <dlfcn.h>

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "common.h"
#include "folder.h"
#include "json.h"
#include "text.h"

namespace topw {

// The values of a JSON object's keys, located without parsing: a vocabulary is large.
class OwnValues {
 public:
  explicit OwnValues(std::string_view text) : text_(text) {}

  // The object with null for the keys `first` and `second`.
  std::string without(std::string_view first, std::string_view second) {
    std::string result;
    std::size_t copied = 0;
    visit([&](std::string_view key, std::size_t start, std::size_t end) {
      if (key != first && key != second) return;
      result.append(text_.substr(copied, start - copied)).append("null");
      copied = end;
    });
    return result.append(text_.substr(copied));
  }
  // The raw value of a key, "null" if absent.
  std::string at(std::string_view wanted) {
    std::string found = "null";
    visit([&](std::string_view key, std::size_t start, std::size_t end) {
      if (key == wanted) found = text_.substr(start, end - start);
    });
    return found;
  }

 private:
  template <typename See>
  void visit(See see) {  // see(key, start, end) of each value
    at_ = 0;
    for (int depth = 0; at_ < text_.size();) {
      const char c = text_[at_];
      if (c == '"') {
        const std::string_view key = skip_text();
        if (depth != 1 || !skip_colon()) continue;
        const std::size_t start = at_;
        skip_value();
        see(key, start, at_);
        continue;
      }
      depth += (c == '{' || c == '[') - (c == '}' || c == ']');
      ++at_;
    }
  }
  std::string_view skip_text() {  // returns the text between the quotes
    const std::size_t start = ++at_;
    while (at_ < text_.size() && text_[at_] != '"') at_ += text_[at_] == '\\' ? 2 : 1;
    const std::string_view inside = text_.substr(start, std::min(at_, text_.size()) - start);
    at_ = std::min(at_ + 1, text_.size());
    return inside;
  }
  bool skip_colon() {
    const std::size_t colon = text_.find_first_not_of(" \t\r\n", at_);
    if (colon == std::string_view::npos || text_[colon] != ':') return false;
    at_ = colon + 1;
    return true;
  }
  void skip_value() {  // up to the next comma or brace
    for (int depth = 0; at_ < text_.size();) {
      const char c = text_[at_];
      if (c == '"') {
        skip_text();
        continue;
      }
      if (depth == 0 && (c == ',' || c == '}')) return;
      depth += (c == '{' || c == '[') - (c == '}' || c == ']');
      ++at_;
    }
  }

  const std::string_view text_;
  std::size_t at_ = 0;
};

// Whether a tokenizer component, at any depth, has the type `wanted`.
inline bool has_type(const Json &part, std::string_view wanted) {
  const Json *type = part.find("type");
  if (type && type->kind == Json::Text && type->text == wanted) return true;
  return std::any_of(part.items.begin(), part.items.end(), [&](const Json &item) { return has_type(item, wanted); });
}

inline std::vector<char32_t> code_points(std::string_view text) {
  std::vector<char32_t> found;
  for (const char c : text)
    if (is_continuation(c) && !found.empty()) {
      found.back() = found.back() << 6 | (static_cast<unsigned char>(c) & 0x3FU);
    } else {
      const unsigned first = static_cast<unsigned char>(c);
      found.push_back(first < 0x80 ? first : first < 0xE0 ? first & 0x1FU : first < 0xF0 ? first & 0x0FU : first & 7U);
    }
  return found;
}

// The bytes of a byte-level token, one per character (GPT-2's table: printable bytes represent themselves, the others
// are U+0100 and following); of any other text, its own bytes.
inline std::string byte_level_bytes(const std::string &token) {
  static const std::map<char32_t, char> bytes = [] {
    std::map<char32_t, char> table;
    for (unsigned byte = 0, other = 256; byte < 256; ++byte) {
      const bool printable = (byte >= 0x21 && byte < 0x7F) || (byte >= 0xA1 && byte != 0xAD);
      table[printable ? byte : other++] = static_cast<char>(byte);
    }
    return table;
  }();
  std::string spelled;
  for (const char32_t character : code_points(token)) {
    const auto found = bytes.find(character);
    if (found == bytes.end()) return token;
    spelled += found->second;
  }
  return spelled;
}

class Tokenizer {
 public:
  Tokenizer(const std::string &library, const Folder &folder) : path_(library) {
    library_ = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);  // never closed: it may have started threads
    if (!library_) throw Failure("the tokenizers library cannot be opened (" + std::string(dlerror()) + ").");
    find(create_, "tokenizers_new_from_str");
    find(encode_, "tokenizers_encode");
    find(free_encoded_, "tokenizers_free_encode_results");
    find(decode_, "tokenizers_decode");
    find(decoded_, "tokenizers_get_decode_str");
    find(id_of_, "tokenizers_token_to_id");
    find(token_of_, "tokenizers_id_to_token");
    find(free_, "tokenizers_free");
    if (!folder.has("tokenizer.json"))
      throw Failure(folder.path.string() + " has no tokenizer.json; export the model again from a folder with one.");
    // Remove the settings for training batches: they would silently cut or pad prompts.
    const std::string whole = read_file(folder.path / "tokenizer.json");
    const std::string json = OwnValues(whole).without("truncation", "padding");
    handle_ = {create_(json.data(), json.size()), free_};
    if (!handle_) throw Failure((folder.path / "tokenizer.json").string() + " cannot be read; export the model again.");
    const Json decoder = JsonReader(OwnValues(whole).at("decoder"), "tokenizer.json").read();
    byte_level_ = has_type(decoder, "ByteLevel");
    byte_fallback_ = has_type(decoder, "ByteFallback");
    for (const Json &token : JsonReader(OwnValues(whole).at("added_tokens"), "tokenizer.json").read().items)
      if (const Json *special = token.find("special"), *id = token.find("id"); special && id && special->truth)
        special_.insert(std::int64_t(id->number));
  }

  Tokens encode(const std::string &text, bool add_special_tokens) const {
    if (!is_utf8(text)) throw Failure("the prompt is not UTF-8; convert it.");
    Encoded encoded{nullptr, 0};
    encode_(handle_.get(), text.data(), text.size(), add_special_tokens, &encoded);
    const Tokens ids(encoded.ids, encoded.ids + encoded.count);
    free_encoded_(&encoded, 1);
    return ids;
  }

  std::string decode(const Tokens &ids, bool skip_special_tokens) const {
    const std::vector<std::uint32_t> narrow(ids.begin(), ids.end());
    const std::uint32_t none = 0;  // an address for no tokens
    decode_(handle_.get(), narrow.empty() ? &none : narrow.data(), narrow.size(), skip_special_tokens);
    const char *text = nullptr;
    std::size_t size = 0;
    decoded_(handle_.get(), &text, &size);  // the library's memory, until its next call
    return std::string(text, size);
  }

  // See BytesOf.
  std::optional<std::string> bytes_of(std::int64_t id, bool skip_special_tokens) const {
    if (skip_special_tokens && special_.count(id)) return "";
    const char *data = nullptr;
    std::size_t size = 0;
    token_of_(handle_.get(), std::uint32_t(id), &data, &size);  // the library's memory; empty for unknown ids
    const std::string token(data, size);
    if (token.empty() || byte_level_) return byte_level_bytes(token);
    const bool byte = byte_fallback_ && size == 6 && token.compare(0, 3, "<0x") == 0 && token.back() == '>' &&
                      std::isxdigit(token[3]) && std::isxdigit(token[4]);
    if (!byte) return std::nullopt;
    return std::string(1, static_cast<char>(std::strtoul(token.substr(3, 2).c_str(), nullptr, 16)));
  }

  // Id of the special token configured for `role`: "bos_token" or "eos_token".
  std::optional<std::int64_t> special(const std::string &role, const Folder &folder) const {
    for (const char *file : {"tokenizer_config.json", "special_tokens_map.json"}) {
      const Json config = folder.json(file);
      if (!std::count(config.keys.begin(), config.keys.end(), role)) continue;
      const Json *named = config.find(role);
      if (named && named->kind == Json::Object) named = named->find("content");
      if (!named || named->kind != Json::Text) return std::nullopt;
      std::int32_t id = -1;
      id_of_(handle_.get(), named->text.data(), named->text.size(), &id);
      return id < 0 ? std::nullopt : std::optional<std::int64_t>(id);
    }
    return std::nullopt;
  }

 private:
  struct Encoded {  // TokenizerEncodeResult
    int *ids;
    std::size_t count;
  };

  template <typename Function>
  void find(Function *&function, const char *name) {
    function = reinterpret_cast<Function *>(dlsym(library_, name));
    if (!function)
      throw Failure(path_ + " has no " + name + "; give a shared library of mlc-ai/tokenizers-cpp's C interface.");
  }

  std::string path_;
  void *library_ = nullptr;
  void *(*create_)(const char *json, std::size_t size) = nullptr;
  void (*encode_)(void *, const char *text, std::size_t size, int add_special_tokens, Encoded *) = nullptr;
  void (*free_encoded_)(Encoded *, std::size_t count) = nullptr;
  void (*decode_)(void *, const std::uint32_t *ids, std::size_t count, int skip_special_tokens) = nullptr;
  void (*decoded_)(void *, const char **text, std::size_t *size) = nullptr;
  void (*id_of_)(void *, const char *token, std::size_t size, std::int32_t *id) = nullptr;
  void (*token_of_)(void *, std::uint32_t id, const char **token, std::size_t *size) = nullptr;
  void (*free_)(void *) = nullptr;
  bool byte_level_ = false, byte_fallback_ = false;
  std::set<std::int64_t> special_;
  std::unique_ptr<void, void (*)(void *)> handle_{nullptr, nullptr};
};

// Adds the begin token from the tokenizer's configuration.
inline void complete(Folder &folder, const Tokenizer &tokenizer) {
  if (!folder.begin) folder.begin = tokenizer.special("bos_token", folder);
  keep_drawable(folder.stated, folder.vocabulary);
}

}  // namespace topw

#endif
