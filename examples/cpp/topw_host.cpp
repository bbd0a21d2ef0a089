// Runs an exported folder without Python; see README.md.
#include <cstdio>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "command_line.h"
#include "common.h"
#include "folder.h"
#include "json.h"
#include "loop.h"
#include "onnxruntime.h"
#include "prompts.h"
#include "random.h"
#include "request.h"
#include "tokenizer.h"

namespace topw {
namespace {

void print(const std::string &text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0)
    throw Failure("standard output cannot be written.");
}

template <typename Values, typename Write>
std::string listed(const Values &values, Write write) {
  std::string list;
  for (const auto &value : values) list += (list.empty() ? "" : ", ") + write(value);
  return "[" + list + "]";
}

std::string digits_of(float value) {  // enough to restore the float32
  std::ostringstream digits;
  digits << std::setprecision(9) << value;
  return digits.str();
}

// An answer as JSON of the Python runtime's command, with its batch row.
std::string as_json(std::size_t index, const Row &row) {
  const auto whole = [](std::int64_t value) { return std::to_string(value); };
  std::string stop = "null";
  if (row.stop_token) stop = std::to_string(*row.stop_token);
  if (row.stop_string) stop = as_json_text(*row.stop_string);
  return "{\"row\": " + std::to_string(index) + ", \"text\": " + (row.text ? as_json_text(row.shown) : "null") +
         ", \"token_ids\": " + listed(row.tokens, whole) + ", \"logprobs\": " + listed(row.logprobs, digits_of) +
         ", \"kept\": " + listed(row.kept, whole) +
         ", \"certified\": " + listed(row.certified, [](bool value) { return std::string(value ? "true" : "false"); }) +
         ", \"seed\": " + std::to_string(row.request.seed) +
         ", \"finish_reason\": \"" + (row.stopped() ? "stop" : "length") + "\", \"stop\": " + stop +
         ", \"prompt_tokens\": " + std::to_string(row.request.prompt.size()) + "}\n";
}

double seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

void print_figures(const Row &row, Clock::time_point start, Clock::time_point first) {
  const double drawn = std::max(double(row.tokens.size()), 1.0);
  const double certified = double(std::count(row.certified.begin(), row.certified.end(), true));
  const double kept = std::accumulate(row.kept.begin(), row.kept.end(), 0.0);
  std::fprintf(stderr,
               "%zu tokens after %zu (%s), the first in %.1f ms, then %.1f tokens/s; certified %.1f %%, kept %.2f on "
               "average; seed %llu; %s\n",
               row.tokens.size(), row.request.prompt.size(), row.stopped() ? "stop" : "length",
               1e3 * seconds(first - start), drawn > 1 ? (drawn - 1) / seconds(row.ended_at - first) : 0.0,
               100 * certified / drawn, kept / drawn, static_cast<unsigned long long>(row.request.seed),
               ort_name.c_str());
}

std::vector<Row> open_rows(const std::vector<RowRequest> &requests, const Tokenizer *tokenizer, bool skip_special) {
  std::vector<Row> rows;
  for (const RowRequest &request : requests) {
    std::optional<RowText> text;
    if (tokenizer) {
      const Decode decode = [=](const Tokens &ids) { return tokenizer->decode(ids, skip_special); };
      const BytesOf bytes_of = [=](std::int64_t id) { return tokenizer->bytes_of(id, skip_special); };
      text.emplace(IncrementalDecoder(decode, bytes_of, request.prompt), request.stop_strings, request.min_new_tokens);
    }
    rows.emplace_back(request, std::move(text));
  }
  return rows;
}

void print_notes(const Folder &folder, const std::vector<RowRequest> &requests, bool text) {
  if (folder.stated.stop_strings && !text)
    std::fprintf(stderr, "note: %s has stop_strings, which have no effect without --tokenizer-library\n",
                 kGenerationConfig);
  for (const RowRequest &request : requests)
    if (request.ends.empty() && !request.ignore_eos) {
      std::fputs("note: the model states no end of sequence; see --eos\n", stderr);
      return;
    }
}

// Prints token ids or text of a single answer as they arrive, others when they end.
std::string shown(std::size_t index, const Row &row, const std::string &gained, bool json) {
  if (json) return row.ended ? as_json(index, row) : "";
  if (row.text) return gained + (row.ended ? "\n" : "");
  return row.tokens.empty() ? "" : std::to_string(row.tokens.back()) + "\n";
}

int run(const std::vector<std::string> &arguments) {
  if (std::find(arguments.begin(), arguments.end(), "--help") != arguments.end()) return std::fputs(kHelp, stdout) < 0;
  const Options options = parse_command_line(arguments);
  if (options.self_test) return self_test();
  Folder folder = open_folder(options.folder);
  std::unique_ptr<Tokenizer> tokenizer;
  if (!options.tokenizer_library.empty()) {
    tokenizer = std::make_unique<Tokenizer>(options.tokenizer_library, folder);
    complete(folder, *tokenizer);
  }
  const std::vector<RowRequest> requests =
      resolve_all(PromptReader(options, folder, tokenizer.get()).read(), folder, options.samples);
  open_onnxruntime(options.onnxruntime);
  const Session session(folder, options.cuda, options.threads, options.native_library);
  check_graph(folder, session.graph.get());
  print_notes(folder, requests, tokenizer != nullptr);
  std::vector<Row> rows = open_rows(requests, tokenizer.get(), !options.special_text);
  const bool json = options.json || options.batch || rows.size() > 1;
  Generation generation(session, folder, requests, rows);
  const auto start = Clock::now();
  const auto first = generation.run(
      [&](std::size_t i, const Row &row, const std::string &gained) { print(shown(i, row, gained, json)); });
  if (options.stats)
    for (const Row &row : rows) print_figures(row, start, first);
  return 0;
}

}  // namespace
}  // namespace topw

int main(int count, char **arguments) {
  int code = 1;
  try {
    return topw::run({arguments + 1, arguments + count});
  } catch (const topw::UsageError &error) {
    std::fprintf(stderr, "topw_host: %s\n", error.what());
    code = 2;
  } catch (const std::exception &error) {
    std::fprintf(stderr, "topw_host: %s\n", error.what());
  }
  return code;
}
