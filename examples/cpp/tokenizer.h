// The folder's tokenizer.json through the C interface of mlc-ai/tokenizers-cpp (its tokenizers_c.h), which wraps the
// tokenizers library: the one that the Python runtime uses. The shared library is opened when the program starts.
#ifndef TOPW_TOKENIZER_H
#define TOPW_TOKENIZER_H

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common.h"
#include "folder.h"
#include "json.h"
#include "text.h"

namespace topw {

// The JSON object `text` with null for what its own keys `names` hold. Nothing else is read: a vocabulary is large.
class WithoutKeys {
 public:
  WithoutKeys(std::string_view text, std::string_view first, std::string_view second)
      : text_(text), first_(first), second_(second) {}

  std::string write() {
    std::size_t copied = 0;
    std::string result;
    for (int depth = 0; at_ < text_.size();) {
      const char c = text_[at_];
      if (c == '"') {
        const std::string_view key = skip_text();
        if (depth != 1 || (key != first_ && key != second_) || !skip_colon()) continue;
        result.append(text_.substr(copied, at_ - copied)).append("null");
        skip_value();
        copied = at_;
        continue;
      }
      depth += (c == '{' || c == '[') - (c == '}' || c == ']');
      ++at_;
    }
    return result.append(text_.substr(copied));
  }

 private:
  std::string_view skip_text() {  // and give what is between the quotes
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
  void skip_value() {  // up to the comma or the brace behind it
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

  const std::string_view text_, first_, second_;
  std::size_t at_ = 0;
};

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
    find(free_, "tokenizers_free");
    if (!folder.has("tokenizer.json"))
      throw Failure(folder.path.string() + " has no tokenizer.json; export the model again from a folder with one.");
    // Settings for training batches: left in, they would silently cut or pad a prompt.
    const std::string json = WithoutKeys(read_file(folder.path / "tokenizer.json"), "truncation", "padding").write();
    handle_ = {create_(json.data(), json.size()), free_};
    if (!handle_) throw Failure((folder.path / "tokenizer.json").string() + " cannot be read; export the model again.");
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
    decoded_(handle_.get(), &text, &size);  // the library's own memory, until it decodes again
    return std::string(text, size);
  }

  // The id of the special token that the tokenizer's configuration names for `role`: "bos_token" or "eos_token".
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
  void (*free_)(void *) = nullptr;
  std::unique_ptr<void, void (*)(void *)> handle_{nullptr, nullptr};
};

// What the model's configurations do not state of where a sequence begins and ends, the tokenizer's may.
inline void complete(Folder &folder, const Tokenizer &tokenizer) {
  if (!folder.begin) folder.begin = tokenizer.special("bos_token", folder);
  const auto end = folder.stated.eos_token_id ? std::nullopt : tokenizer.special("eos_token", folder);
  if (end) folder.stated.eos_token_id = Tokens{*end};
  keep_drawable(folder.stated, folder.vocabulary);
}

}  // namespace topw

#endif
