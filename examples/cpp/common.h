// Errors, token ids and number parsing.
#ifndef TOPW_COMMON_H
#define TOPW_COMMON_H

#include <charconv>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace topw {

// A one-sentence error: of the folder, request, model or a library (exit code 1), or the command line (2).
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using Tokens = std::vector<std::int64_t>;
constexpr std::int64_t kMost = std::int64_t{1} << 40;  // largest accepted count

// `text` as a number, without trailing characters.
template <typename Number>
std::optional<Number> parse(std::string_view text) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(number) : std::nullopt;
}

}  // namespace topw

#endif
