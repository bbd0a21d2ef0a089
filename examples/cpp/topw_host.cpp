// Runs a folder that topw-export wrote, without Python: token ids in, token ids out as they are drawn.
//
// Decoder and Top-W sampler are one graph, so a step is one run of one onnxruntime session: it takes the last token and
// a random number, and gives the next token. The parts, in order: JSON, the folder's manifest, the random numbers,
// onnxruntime, the two forms of cache, the loop, the command line. What a folder is and how its graph is driven is in
// docs/graph.md (sections 8 and 9), where the random numbers come from in docs/random.md.
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iomanip>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ort_c_abi.h"

namespace fs = std::filesystem;

namespace {

// What went wrong, in one sentence: with the folder, the model or onnxruntime (exit code 1), or the command line (2).
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using Tokens = std::vector<std::int64_t>;
constexpr std::int64_t kMost = std::int64_t{1} << 40;  // of any count that is read

// ---------------------------------------------------------------------------------------------------------------------
// JSON: RFC 8259 and nothing more (no comments, no NaN, no repeated keys). Bytes above 127 are taken as they are.

struct Json {
  enum Kind { Null, Bool, Number, Text, List, Object } kind = Null;
  bool truth = false;
  double number = 0;
  std::string text;
  std::vector<std::string> keys;  // of an object: one for each of `items`
  std::vector<Json> items;
  std::string path;  // the file and the way to this value, which errors name

  std::string shown() const {
    if (kind == Text) return "'" + text.substr(0, 60) + "'";
    if (kind == Bool) return truth ? "true" : "false";
    std::ostringstream digits;
    digits << std::setprecision(15) << number;
    return kind == Number ? digits.str() : kind == List ? "a list" : "an object";
  }
  void need(bool holds, const std::string &what) const {
    if (!holds) throw Failure(path + " is " + shown() + ", but must be " + what + "; export the model again.");
  }
  const Json *find(std::string_view key) const {  // null where it is not there, or null
    const auto place = std::find(keys.begin(), keys.end(), key) - keys.begin();
    return place == std::ptrdiff_t(keys.size()) || items[place].kind == Null ? nullptr : &items[place];
  }
  const Json &at(const std::string &key) const {
    if (const Json *found = find(key)) return *found;
    throw Failure(path + " has no " + key + "; export the model again.");
  }
  const std::vector<Json> &as_list() const {
    need(kind == List, "a list");
    return items;
  }
  const std::string &as_text() const {
    need(kind == Text, "a text");
    return text;
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
};

class JsonReader {
 public:
  JsonReader(std::string_view text, std::string file) : text_(text), file_(std::move(file)) {}

  Json read() {
    Json value = read_value(file_, 0);
    skip_space();
    if (at_ != text_.size()) fail("something follows the value");
    return value;
  }

 private:
  static constexpr int kDeepest = 64;

  [[noreturn]] void fail(const char *what) const {
    throw Failure(file_ + " is not JSON (byte " + std::to_string(at_) + ": " + what + "); export the model again.");
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
      value.number = read_number();
    }
    return value;
  }

  void read_items(Json &value, std::string_view end, int depth) {
    skip_space();
    if (take(end)) return;
    do {
      std::string name = std::to_string(value.items.size());
      if (value.kind == Json::Object) {
        skip_space();
        if (!take("\"")) fail("a key is missing");
        name = read_text();
        if (std::count(value.keys.begin(), value.keys.end(), name)) fail("a key is repeated");
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
  std::uint32_t read_escape() {  // a code point, behind the first \u
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
    const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;  // bytes behind the first
    text += char((0xFF00 >> (more + 1) & 0xFF) | code >> (6 * more));
    for (int i = more - 1; i >= 0; --i) text += char(0x80 | (code >> (6 * i) & 0x3F));
  }

  double read_number() {
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
    return std::strtod(std::string(text_.substr(start, at_ - start)).c_str(), nullptr);
  }

  std::string_view text_;
  std::string file_;
  std::size_t at_ = 0;
};

Json read_json(const fs::path &path) {
  std::ifstream stream(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(stream), {}};
  if (!stream) throw Failure(path.string() + " cannot be read; export or copy the folder again.");
  return JsonReader(text, path.filename().string()).read();
}

// ---------------------------------------------------------------------------------------------------------------------
// The folder: topw_manifest.json says what the graph takes and what it is run with.

constexpr const char *kManifest = "topw_manifest.json";
constexpr int kFormatVersion = 2;

struct Parameter {
  const char *name, *alias;  // the paper's, and that of its authors' code
  const char *bound;
  bool (*holds)(double);
};
bool not_negative(double value) { return value >= 0 && std::isfinite(value); }
constexpr std::array<Parameter, 6> kParameters{{
    {"lam", "lambda_geom", "a finite number >= 0", not_negative},
    {"beta", "beta", "a finite number >= 0", not_negative},
    {"temperature", "temperature", "a finite number >= 0", not_negative},
    {"selection_temperature", "selection_temperature", "a finite number >= 0", not_negative},
    {"init_top_p", "warm_p", "in (0, 1]", [](double value) { return value > 0 && value <= 1; }},
    {"geom_scale", "geom_scale", "finite", [](double value) { return std::isfinite(value); }},
}};
using Parameters = std::map<std::string, float>;

// The graph takes float32, so the number must be in its interval as such, too.
std::optional<float> in_range(const Parameter &parameter, double value) {
  const float rounded = std::fabs(value) > 3.4e38 ? INFINITY : float(value);
  return parameter.holds(value) && parameter.holds(rounded) ? std::optional(rounded) : std::nullopt;
}

using ElementType = ONNXTensorElementDataType;
const std::map<std::string, ElementType> kElementTypes{  // by the manifest's names
    {"float", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},     {"int32", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32},
    {"int64", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64},     {"bool", ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL},
    {"float16", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16}, {"bfloat16", ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16}};

struct TensorSpec {
  ElementType type;
  std::vector<std::int64_t> shape;  // -1 where the manifest has a name
};
using TensorSpecs = std::map<std::string, TensorSpec>;

struct CachePart {  // keys or values of a layer
  std::string past, present;
  std::int64_t heads, head_size;
};

struct Folder {
  fs::path path;
  TensorSpecs inputs, outputs;
  bool in_place = false;  // the cache's form: static, or else concat
  ElementType cache_type{};
  std::vector<CachePart> cache;
  std::int64_t context = 0, buffer_least = 0, vocabulary = 0;
  Parameters defaults;
  std::set<std::int64_t> ends;  // ids that end a sequence

  std::int64_t fixed_size(const std::string &input, std::size_t axis) const {  // -1 where the graph leaves it open
    const auto spec = inputs.find(input);
    return spec != inputs.end() && axis < spec->second.shape.size() ? spec->second.shape[axis] : -1;
  }
};

ElementType element_type(const Json &value) {
  const auto found = kElementTypes.find(value.as_text());
  value.need(found != kElementTypes.end(), "an element type of this program's");
  return found->second;
}

std::size_t cache_element_bytes(ElementType type) {  // 0: not a type of caches
  if (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) return 4;
  return type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 || type == ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16 ? 2 : 0;
}

TensorSpecs read_specs(const Json &list) {
  TensorSpecs specs;
  for (const Json &item : list.as_list()) {
    TensorSpec spec{element_type(item.at("dtype")), {}};
    for (const Json &size : item.at("shape").as_list())
      spec.shape.push_back(size.kind == Json::Text ? -1 : size.as_whole());
    specs[item.at("name").as_text()] = spec;
  }
  return specs;
}

// Every file that the manifest lists is a plain one of the folder, of the size that it states.
void check_files(const fs::path &folder, const Json &files) {
  files.at("model.onnx");
  for (std::size_t i = 0; i < files.keys.size(); ++i) {
    const fs::path name = files.keys[i];
    std::error_code error;
    const bool inside = name.is_relative() && fs::canonical(folder / name, error) == fs::canonical(folder) / name;
    if (!inside || double(fs::file_size(folder / name, error)) != files.items[i].at("size").as_number())
      throw Failure(name.string() + " is listed in " + kManifest + ", but it is missing, a link or of another size; " +
                    "export or copy the folder again.");
  }
}

void read_decoder(const Json &decoder, Folder &folder) {
  const Json &form = decoder.at("kv_form");
  form.need(form.as_text() == "static" || form.text == "concat", "'static' or 'concat' for this program");
  folder.in_place = form.text == "static";
  folder.cache_type = element_type(decoder.at("kv_dtype"));
  decoder.at("kv_dtype").need(cache_element_bytes(folder.cache_type) > 0, "'float', 'float16' or 'bfloat16'");
  folder.context = decoder.at("context_length").as_whole(1);
  folder.buffer_least = decoder.at("buffer_least").as_whole();
  const auto &heads = decoder.at("num_kv_heads").as_list(), &sizes = decoder.at("head_dim").as_list();
  const std::size_t layers = decoder.at("num_layers").as_whole(1);
  decoder.need(heads.size() == layers && sizes.size() == layers, "one with a number of heads and their size per layer");
  for (std::size_t i = 0; i < layers; ++i)
    for (const char *part : {".key", ".value"})
      folder.cache.push_back({"past_key_values." + std::to_string(i) + part, "present." + std::to_string(i) + part,
                              heads[i].as_whole(1), sizes[i].as_whole(1)});
}

void read_default(const Json &field, const Parameter &parameter, Parameters &defaults) {
  const auto value = in_range(parameter, field.as_number());
  field.need(value.has_value(), parameter.bound);
  defaults[parameter.name] = *value;
}

// What the model's maker asks for; what of it this program does not do is said.
void read_generation_config(const Json &config, Folder &folder) {
  for (const Parameter &parameter : kParameters)
    for (const char *name : {parameter.alias, parameter.name})
      if (const Json *field = config.find(name)) read_default(*field, parameter, folder.defaults);
  const Json *sample = config.find("do_sample");
  if (sample && sample->kind == Json::Bool && !sample->truth) folder.defaults["temperature"] = 0;
  for (const char *name :
       {"max_new_tokens", "max_length", "min_new_tokens", "min_length", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "no_repeat_ngram_size", "suppress_tokens", "bad_words_ids", "logit_bias", "stop_strings"})
    if (const Json *stated = config.find(name)) {
      const double neutral = std::string_view(name) == "repetition_penalty" ? 1 : 0;
      if (stated->kind == Json::Number ? stated->number != neutral : !stated->items.empty() || !stated->text.empty())
        std::fprintf(stderr, "note: %s has %s, which this program leaves out\n", config.path.c_str(), name);
    }
}

void read_ends(const Json &config, std::set<std::int64_t> &ends) {
  const Json *stated = config.find("eos_token_id");
  if (stated && stated->kind == Json::Number) ends.insert(stated->as_whole());
  if (stated && stated->kind != Json::Number)
    for (const Json &id : stated->as_list()) ends.insert(id.as_whole());
  const Json *language_model = config.find("text_config");  // of a composite one
  if (ends.empty() && language_model) read_ends(*language_model, ends);
}

Folder open_folder(const fs::path &path) {
  if (!fs::is_directory(path)) throw Failure(path.string() + " is not a folder; give the one that topw-export wrote.");
  if (!fs::is_regular_file(path / kManifest))
    throw Failure(path.string() + " has no " + kManifest + ", so it is not a finished export; run topw-export.");
  const Json manifest = read_json(path / kManifest);
  const Json &version = manifest.at("format_version"), &kind = manifest.at("kind");
  version.need(version.as_whole() == kFormatVersion, std::to_string(kFormatVersion) + " for this program");
  kind.need(kind.as_text() == "decoder", "'decoder' for this program");
  const Json &status = manifest.at("verification").at("status"), &files = manifest.at("files");
  status.need(status.as_text() != "provisional", "that of a finished export");
  check_files(path, files);

  Folder folder;
  folder.path = path;
  folder.inputs = read_specs(manifest.at("inputs"));
  folder.outputs = read_specs(manifest.at("outputs"));
  folder.vocabulary = manifest.at("sampler").at("vocab_size").as_whole(1);
  read_decoder(manifest.at("decoder"), folder);
  for (const Parameter &parameter : kParameters)
    read_default(manifest.at("defaults").at(parameter.name), parameter, folder.defaults);
  if (files.find("generation_config.json")) {
    const Json config = read_json(path / "generation_config.json");
    read_generation_config(config, folder);
    read_ends(config, folder.ends);
  }
  if (folder.ends.empty() && files.find("config.json")) read_ends(read_json(path / "config.json"), folder.ends);
  return folder;
}

// ---------------------------------------------------------------------------------------------------------------------
// The random numbers (docs/random.md): one of (seed, position, sample), whatever was drawn before.

__extension__ typedef unsigned __int128 Product;

// The first word of Philox 4x64-10 with the key (seed, 0) and the counter position + 2^64 sample + 1.
std::uint64_t philox(std::uint64_t seed, std::uint64_t position, std::uint64_t sample) {
  std::uint64_t x0 = position + 1, x1 = sample + (x0 == 0), x2 = x0 == 0 && x1 == 0, x3 = 0, k0 = seed, k1 = 0;
  for (int round = 0; round < 10; ++round) {
    const Product a = Product{0xD2E7470EE14C6C93} * x0, b = Product{0xCA5A826395121157} * x2;
    x0 = std::uint64_t(b >> 64) ^ x1 ^ k0;
    x1 = std::uint64_t(b);
    x2 = std::uint64_t(a >> 64) ^ x3 ^ k1;
    x3 = std::uint64_t(a);
    k0 += 0x9E3779B97F4A7C15;
    k1 += 0xBB67AE8584CAA73B;
  }
  return x0;
}

float uniform_for(std::uint64_t seed, std::uint64_t position, std::uint64_t sample = 0) {
  return float(philox(seed, position, sample) >> 40) * 0x1p-24F;  // exact, and below 1
}

// The table of docs/random.md: seed, position, sample, word, u * 2^24.
int self_test() {
  constexpr std::uint64_t kMax = ~std::uint64_t{0}, kHalf = std::uint64_t{1} << 63;
  static const std::array<std::array<std::uint64_t, 5>, 11> kVectors{{
      {0, 0, 0, 0x02f4ba6408e4d89b, 193722},
      {0, 1, 0, 0x809bf322883987c3, 8428531},
      {0, 0, 1, 0x363c6d54f81ba26e, 3554413},
      {7, 3, 0, 0x712a540f349a5c44, 7416404},
      {7, 3, 1, 0xe53f27f8c7154287, 15023911},
      {42, 1024, 0, 0x1e70f3916f9d3cf6, 1994995},
      {2026, 99999, 5, 0x7a88abbf723bafa7, 8030379},
      {4294967296, 12, 0, 0xb9f33da716ea8074, 12186429},
      {kHalf, 0, 0, 0xf0f36415f37c24e2, 15790948},
      {kMax, kMax, 0, 0xe23d141355b65d09, 14826772},
      {kMax, 0, kMax, 0x4ebd9b5c78bbc980, 5160347},
  }};
  std::size_t right = 0;
  for (const auto &[seed, position, sample, word, top] : kVectors)
    right += philox(seed, position, sample) == word &&
             double(uniform_for(seed, position, sample)) * 16777216 == double(top);
  std::printf("self-test: %zu of %zu random numbers are those of docs/random.md\n", right, kVectors.size());
  return right == kVectors.size() ? 0 : 1;
}

// ---------------------------------------------------------------------------------------------------------------------
// onnxruntime, opened when the program starts. A function that fails gives a status with words.

const OrtApi *ort = nullptr;
std::string ort_name = "onnxruntime";  // and its version

#ifndef TOPW_ONNXRUNTIME
#define TOPW_ONNXRUNTIME "libonnxruntime.so"
#endif

void open_onnxruntime(const std::string &path) {
  setenv("ORT_DISABLE_TELEMETRY", "1", 0);  // its official builds would report to their maker, and leave a file behind
  void *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  using GetBase = const OrtApiBase *();
  const auto base = library ? reinterpret_cast<GetBase *>(dlsym(library, "OrtGetApiBase")) : nullptr;
  if (!base) throw Failure("onnxruntime cannot be opened (" + std::string(dlerror()) + "); see --onnxruntime.");
  ort_name += std::string(" ") + base()->GetVersionString();
  ort = base()->GetApi(kOrtVersion);
  if (!ort) throw Failure(path + " is " + ort_name + ", which is older than 1.17; give a newer one.");
}

[[noreturn]] void fail(OrtStatus *status, const std::string &what) {
  std::istringstream words(ort->GetErrorMessage(status));
  ort->ReleaseStatus(status);
  std::string message, word;
  while (words >> word && message.size() < 300) message += (message.empty() ? "" : " ") + word;
  throw Failure(what + " (" + message + ").");
}
void check(OrtStatus *status) {
  if (status) fail(status, ort_name + " failed");
}

template <typename T>
using Owned = std::unique_ptr<T, void (*)(T *)>;

// What a function of onnxruntime gives as its last argument.
template <typename T, typename Function, typename... Arguments>
Owned<T> make(void (*release)(T *), Function function, Arguments... arguments) {
  T *made = nullptr;
  check(function(arguments..., &made));
  return {made, release};
}

using Shape = std::vector<std::int64_t>;
using Value = Owned<OrtValue>;

// The graph, ready to run. `device` is the memory that its cache lives in, `host` the program's own.
struct Session {
  Session(const Folder &folder, bool cuda, int threads, const std::string &native_library) : on_device(cuda) {
    const auto options = make<OrtSessionOptions>(ort->ReleaseSessionOptions, ort->CreateSessionOptions);
    if (threads >= 0) check(ort->SetIntraOpNumThreads(options.get(), threads));
    if (!native_library.empty()) {
      const std::string path = fs::absolute(native_library).string();
      if (OrtStatus *status = ort->RegisterCustomOpsLibrary_V2(options.get(), path.c_str()))
        fail(status, path + " does not load");
    }
    if (on_device) {
      const std::string without = ort_name + " does not start CUDA; give one that does with --onnxruntime, or --provider cpu";
      OrtCUDAProviderOptionsV2 *raw = nullptr;
      if (OrtStatus *status = ort->CreateCUDAProviderOptions(&raw)) fail(status, without);
      const Owned<OrtCUDAProviderOptionsV2> cuda_options(raw, ort->ReleaseCUDAProviderOptions);
      if (OrtStatus *status = ort->SessionOptionsAppendExecutionProvider_CUDA_V2(options.get(), cuda_options.get()))
        fail(status, without);
      // Some versions end the process when this optimiser meets rotary embeddings in half precision (issue 28604).
      check(ort->AddSessionConfigEntry(options.get(), "optimization.disable_specified_optimizers",
                                       "GroupQueryAttentionFusion"));
      device = make<OrtMemoryInfo>(ort->ReleaseMemoryInfo, ort->CreateMemoryInfo, "Cuda", OrtDeviceAllocator, 0,
                                   OrtMemTypeDefault);
    }
    const std::string model = (folder.path / "model.onnx").string();
    OrtSession *made = nullptr;
    if (OrtStatus *status = ort->CreateSession(environment.get(), model.c_str(), options.get(), &made))
      fail(status, ort_name + " refuses " + model);
    graph.reset(made);
    allocator = make<OrtAllocator>(ort->ReleaseAllocator, ort->CreateAllocator, graph.get(), device.get());
  }

  const bool on_device;
  Owned<OrtEnv> environment = make<OrtEnv>(ort->ReleaseEnv, ort->CreateEnv, ORT_LOGGING_LEVEL_FATAL, "topw_host");
  Owned<OrtMemoryInfo> host = make<OrtMemoryInfo>(ort->ReleaseMemoryInfo, ort->CreateCpuMemoryInfo, OrtDeviceAllocator,
                                                  OrtMemTypeDefault);
  Owned<OrtMemoryInfo> device = make<OrtMemoryInfo>(ort->ReleaseMemoryInfo, ort->CreateCpuMemoryInfo,
                                                    OrtDeviceAllocator, OrtMemTypeDefault);
  Owned<OrtSession> graph{nullptr, ort->ReleaseSession};
  Owned<OrtAllocator> allocator{nullptr, ort->ReleaseAllocator};  // of `device`; must outlive what it allocates
};

OrtAllocator *host_allocator() {
  OrtAllocator *borrowed = nullptr;
  check(ort->GetAllocatorWithDefaultOptions(&borrowed));
  return borrowed;
}

// Names and element types of the graph's inputs or outputs: those that these three functions list.
template <typename Count, typename Name, typename Type>
void list_tensors(const OrtSession *graph, Count count, Name name, Type type, std::map<std::string, int> &found) {
  std::size_t tensors = 0;
  check(count(graph, &tensors));
  for (std::size_t i = 0; i < tensors; ++i) {
    char *text = nullptr;
    check(name(graph, i, host_allocator(), &text));
    int &element = found[text];
    check(ort->AllocatorFree(host_allocator(), text));
    const auto info = make<OrtTypeInfo>(ort->ReleaseTypeInfo, type, graph, i);
    const OrtTensorTypeAndShapeInfo *tensor = nullptr;
    ElementType read{};
    check(ort->CastTypeInfoToTensorInfo(info.get(), &tensor));
    if (tensor) check(ort->GetTensorElementType(tensor, &read));
    element = read;
  }
}

// The manifest and the graph must name the same tensors, of the same types.
void check_graph(const Folder &folder, const OrtSession *graph) {
  std::map<std::string, int> stated, found;
  for (const TensorSpecs *specs : {&folder.inputs, &folder.outputs})
    for (const auto &[name, spec] : *specs) stated[name] = spec.type;
  list_tensors(graph, ort->SessionGetInputCount, ort->SessionGetInputName, ort->SessionGetInputTypeInfo, found);
  list_tensors(graph, ort->SessionGetOverridableInitializerCount, ort->SessionGetOverridableInitializerName,
               ort->SessionGetOverridableInitializerTypeInfo, found);
  list_tensors(graph, ort->SessionGetOutputCount, ort->SessionGetOutputName, ort->SessionGetOutputTypeInfo, found);
  for (const auto *names : {&stated, &found})
    for (const auto &[name, type] : *names)
      if (!stated.count(name) || !found.count(name) || stated[name] != found[name])
        throw Failure(name + " is not the same in model.onnx and in " + kManifest + "; export the model again.");
}

template <typename T>
constexpr ElementType kElementType = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
template <>
constexpr ElementType kElementType<std::int32_t> = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
template <>
constexpr ElementType kElementType<std::int64_t> = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
template <>
constexpr ElementType kElementType<bool> = ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL;

// What the graph reads and writes. Memory of the program is bound by address and must stay where it is: each run sees
// what it holds then. A provider with memory of its own copies it when it is bound; what changes is bound anew there.
class Binding {
 public:
  explicit Binding(const Session &session)
      : session_(session), io_(make<OrtIoBinding>(ort->ReleaseIoBinding, ort->CreateIoBinding, session.graph.get())) {}

  void input(const std::string &name, const OrtValue *value) { check(ort->BindInput(io_.get(), name.c_str(), value)); }
  void output(const std::string &name, const OrtValue *value) {
    check(ort->BindOutput(io_.get(), name.c_str(), value));
  }
  void fresh_output(const std::string &name) {  // that each run allocates
    check(ort->BindOutputToDevice(io_.get(), name.c_str(), session_.device.get()));
  }
  template <typename T>
  void host_input(const std::string &name, T *data, const Shape &shape) {
    input(name, over(data, shape).get());
  }
  template <typename T>
  void changing_input(const std::string &name, T *data, const Shape &shape) {
    input(name, changing_.emplace(name, over(data, shape)).first->second.get());
  }
  template <typename T>
  void host_output(const std::string &name, T *data) {
    output(name, over(data, {1}).get());
  }

  void run() {
    if (session_.on_device)
      for (const auto &[name, value] : changing_) input(name, value.get());
    check(ort->RunWithBinding(session_.graph.get(), nullptr, io_.get()));
  }

  // What the last run gave, in the order in which the outputs were first bound.
  std::vector<Value> outputs() {
    OrtValue **values = nullptr;
    std::size_t count = 0;
    check(ort->GetBoundOutputValues(io_.get(), host_allocator(), &values, &count));
    std::vector<Value> owned;
    for (std::size_t i = 0; i < count; ++i) owned.emplace_back(values[i], ort->ReleaseValue);
    check(ort->AllocatorFree(host_allocator(), values));
    return owned;
  }

 private:
  template <typename T>
  Value over(T *data, const Shape &shape) const {
    const auto count = std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
    return make<OrtValue>(ort->ReleaseValue, ort->CreateTensorWithDataAsOrtValue, session_.host.get(),
                          static_cast<void *>(data), count * sizeof(T), shape.data(), shape.size(), kElementType<T>);
  }

  const Session &session_;
  Owned<OrtIoBinding> io_;
  std::map<std::string, Value> changing_;
};

// ---------------------------------------------------------------------------------------------------------------------
// The two forms of the key-value cache, for a batch of one. S: the tokens of the prompt.

class Cache {
 public:
  virtual ~Cache() = default;
  virtual void feed_prompt(Tokens &ids) = 0;     // [1, S], in one run
  virtual void feed_token(std::int64_t id) = 0;  // [1, 1]
};

// static: one buffer per part, bound once as past and as present. A step changes two numbers, where they lie.
class StaticCache : public Cache {
 public:
  StaticCache(const Session &session, const Folder &folder, Binding &binding, std::int64_t tokens)
      : session_(session), binding_(binding), told_reach_(folder.inputs.count("total_sequence_length") > 0) {
    const std::int64_t rounded = std::min((tokens + 63) / 64 * 64, std::max(folder.context, tokens));
    for (const CachePart &part : folder.cache) {
      const std::int64_t fixed = folder.fixed_size(part.past, 2);
      if (fixed >= 0 && fixed < tokens)
        throw Failure("prompt and answer may have " + std::to_string(tokens) + " tokens, this export's cache holds " +
                      std::to_string(fixed) + "; lower --max-new-tokens.");
      room_ = fixed >= 0 ? fixed : std::max(rounded, folder.buffer_least);
      bind(part, folder.cache_type);
    }
  }

  void feed_prompt(Tokens &ids) override {
    length_ = std::int64_t(ids.size());
    binding_.host_input("input_ids", ids.data(), {1, length_});
    binding_.changing_input("write_indices", &written_, {1});
    binding_.host_input("row_lengths", &length_, {1});
    bind_reach(length_);
  }
  void feed_token(std::int64_t id) override {
    const bool bound = written_ > 0;
    id_ = id;
    written_ += length_;
    length_ = 1;
    if (bound) return;
    binding_.changing_input("input_ids", &id_, {1, 1});
    binding_.host_input("row_lengths", &length_, {1});
    bind_reach(room_);
  }

 private:
  // How far a run may reach, which GroupQueryAttention reads on the host, wherever it computes.
  void bind_reach(std::int64_t tokens) {
    reach_ = std::int32_t(tokens);
    if (told_reach_) binding_.host_input("total_sequence_length", &reach_, {1});
  }
  void bind(const CachePart &part, ElementType type) {
    const Shape shape{1, part.heads, room_, part.head_size};
    const Value value = make<OrtValue>(ort->ReleaseValue, ort->CreateTensorAsOrtValue, session_.allocator.get(),
                                       shape.data(), shape.size(), type);
    void *data = nullptr;
    check(ort->GetTensorMutableData(value.get(), &data));
    clear(data, part.heads * room_ * part.head_size * cache_element_bytes(type));
    binding_.input(part.past, value.get());  // which keeps the tensor
    binding_.output(part.present, value.get());
  }
  // The buffers must be finite: what is masked may still be multiplied.
  void clear(void *data, std::size_t bytes) const {
    if (!session_.on_device) {
      std::memset(data, 0, bytes);
      return;
    }
    using Set = int(unsigned long long address, unsigned char value, std::size_t count);
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    const auto set = driver ? reinterpret_cast<Set *>(dlsym(driver, "cuMemsetD8_v2")) : nullptr;
    if (!set || set(reinterpret_cast<std::uintptr_t>(data), 0, bytes) != 0)
      throw Failure("the cache cannot be cleared on the device; check NVIDIA's driver.");
  }

  const Session &session_;
  Binding &binding_;
  const bool told_reach_;
  std::int32_t reach_ = 0;
  std::int64_t room_ = 0;  // slots of the buffers
  std::int64_t id_ = 0, written_ = 0, length_ = 0;  // the token fed, those in the buffer, and those that a run adds
};

// concat: the present of a run is the past of the next one, handed over as onnxruntime's own values.
class ConcatCache : public Cache {
 public:
  ConcatCache(const Session &session, const Folder &folder, Binding &binding, std::int64_t tokens)
      : folder_(folder), binding_(binding), mask_(tokens, 1), positions_(tokens) {
    std::iota(positions_.begin(), positions_.end(), 0);
    for (const CachePart &part : folder.cache) {
      const Shape shape{1, part.heads, 0, part.head_size};
      const Value nothing = make<OrtValue>(ort->ReleaseValue, ort->CreateTensorWithDataAsOrtValue, session.host.get(),
                                           static_cast<void *>(&id_), std::size_t{0}, shape.data(), shape.size(),
                                           folder.cache_type);
      binding.input(part.past, nothing.get());
      binding.fresh_output(part.present);
    }
  }

  void feed_prompt(Tokens &ids) override { bind(ids.data(), std::int64_t(ids.size())); }
  void feed_token(std::int64_t id) override {
    const std::vector<Value> presents = binding_.outputs();  // which were bound before all others
    for (std::size_t i = 0; i < folder_.cache.size(); ++i) {
      binding_.input(folder_.cache[i].past, presents[i].get());
      binding_.fresh_output(folder_.cache[i].present);
    }
    id_ = id;
    bind(&id_, 1);
  }

 private:
  void bind(std::int64_t *ids, std::int64_t count) {
    binding_.host_input("input_ids", ids, {1, count});
    if (folder_.inputs.count("position_ids"))
      binding_.host_input("position_ids", &positions_[length_], {1, count});
    length_ += count;
    if (folder_.inputs.count("attention_mask")) binding_.host_input("attention_mask", mask_.data(), {1, length_});
  }

  const Folder &folder_;
  Binding &binding_;
  std::vector<std::int64_t> mask_, positions_;
  std::int64_t id_ = 0, length_ = 0;  // the token fed, and those in the cache after the run
};

// ---------------------------------------------------------------------------------------------------------------------
// The loop.

struct Options {
  std::string folder, native_library, onnxruntime = TOPW_ONNXRUNTIME;
  Tokens prompt;
  std::int64_t max_new_tokens = 256;
  std::optional<std::uint64_t> seed;
  std::set<std::int64_t> ends;
  Parameters parameters;
  int threads = -1;  // onnxruntime's choice
  bool cuda = false, ignore_ends = false, stats = false, self_test = false;
};

struct Figures {
  std::uint64_t seed = 0;
  std::int64_t drawn = 0, kept = 0, certified = 0;
  bool stopped = false;             // at an end of sequence
  double prompt = 0, decoding = 0;  // seconds: to the first token, and for the others
};

// What crosses between the program and the graph's sampler, where it is bound.
struct Sampler {
  Sampler(const Parameters &given, const Folder &folder, Binding &binding) : parameters(folder.defaults) {
    for (const auto &[name, value] : given) parameters[name] = value;
    for (auto &[name, value] : parameters) binding.host_input(name, &value, {1});
    // Edits of the logits: none, or as many without effect as the graph fixes. One more, so that there is an address.
    const std::int64_t edits = std::max<std::int64_t>(folder.fixed_size("edit_ids", 1), 0);
    edit_ids.assign(edits + 1, -1);
    edit_penalty.assign(edits + 1, 1);
    edit_bias.assign(edits + 1, 0);
    binding.host_input("edit_ids", edit_ids.data(), {1, edits});
    binding.host_input("edit_penalty", edit_penalty.data(), {1, edits});
    binding.host_input("edit_bias", edit_bias.data(), {1, edits});
    binding.changing_input("uniform", &uniform, {1});
    binding.host_output("next_token", &token);
    binding.host_output("kept", &kept);
    binding.host_output("certified", &certified);
  }

  Parameters parameters;
  Tokens edit_ids;
  std::vector<float> edit_penalty, edit_bias;
  float uniform = 0;
  std::int64_t token = -1;
  std::int32_t kept = 0;
  bool certified = false;
};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::uint64_t fresh_seed() {
  std::random_device device;
  return (std::uint64_t{device()} << 32 | device()) >> 11;
}

// Draw after `prompt`, printing each token.
Figures generate(const Options &options, const Folder &folder, const Session &session, Tokens prompt) {
  const auto length = std::int64_t(prompt.size());
  const std::int64_t budget = std::min(options.max_new_tokens, folder.context - length);
  const std::set<std::int64_t> &ends = options.ends.empty() ? folder.ends : options.ends;
  Figures figures;
  figures.seed = options.seed ? *options.seed : fresh_seed();
  if (ends.empty() && !options.ignore_ends)
    std::fputs("note: the model states no end of sequence; see --eos\n", stderr);

  Binding binding(session);
  std::unique_ptr<Cache> cache;
  if (folder.in_place)  // first of all: its outputs are found by their place
    cache = std::make_unique<StaticCache>(session, folder, binding, length + budget);
  else
    cache = std::make_unique<ConcatCache>(session, folder, binding, length + budget);

  Sampler sampler(options.parameters, folder, binding);
  auto start = std::chrono::steady_clock::now();
  while (figures.drawn < budget && !figures.stopped) {
    if (figures.drawn == 0)
      cache->feed_prompt(prompt);
    else
      cache->feed_token(sampler.token);
    sampler.uniform = uniform_for(figures.seed, std::uint64_t(length + figures.drawn));
    binding.run();
    if (sampler.token < 0)
      throw Failure("the logits of step " + std::to_string(figures.drawn) + " hold NaN or +infinity; try topw verify.");
    std::printf("%lld\n", static_cast<long long>(sampler.token));
    if (std::fflush(stdout) != 0) throw Failure("standard output cannot be written.");
    if (figures.drawn++ == 0) figures.prompt = seconds_since(std::exchange(start, std::chrono::steady_clock::now()));
    figures.kept += sampler.kept;
    figures.certified += sampler.certified;
    figures.stopped = !options.ignore_ends && ends.count(sampler.token) > 0;
  }
  figures.decoding = seconds_since(start);
  return figures;
}

void print(const Figures &f, std::size_t prompt) {
  const double drawn = std::max(double(f.drawn), 1.0);
  std::fprintf(stderr,
               "%lld tokens after %zu (%s), the first in %.1f ms, then %.1f tokens/s; certified %.1f %%, kept %.2f on "
               "average; seed %llu; %s\n",
               static_cast<long long>(f.drawn), prompt, f.stopped ? "stop" : "length", 1e3 * f.prompt,
               f.drawn > 1 ? (drawn - 1) / f.decoding : 0.0, 100 * double(f.certified) / drawn, double(f.kept) / drawn,
               static_cast<unsigned long long>(f.seed), ort_name.c_str());
}

// ---------------------------------------------------------------------------------------------------------------------
// The command line.

constexpr const char *kHelp = R"(Usage: topw_host FOLDER [OPTIONS] [TOKEN_ID ...]

Runs the folder that topw-export wrote: reads token ids, from standard input where none are given, and prints those
that it draws, one per line.

  --max-new-tokens N         most tokens to draw (256); never more than the model's context holds
  --seed N                   in [0, 2^64): the same seed, prompt and parameters give the same tokens (fresh)
  --eos ID                   drawing it ends the answer; repeatable (the model's)
  --ignore-eos               do not end there
  --temperature X            sampling temperature, >= 0; below 1e-5 greedy
  --selection-temperature X  temperature that chooses the crop; 0: as --temperature
  --lam X, --beta X          weights of the entropy term and of the log-mass reward, >= 0
  --init-top-p X             mass of the nucleus warm start, in (0, 1]
  --geom-scale X             factor on distances; negative repels
                             (these six: generation_config.json's, else the export's)
  --provider cpu|cuda        where the graph runs (cpu)
  --threads N                of an operator, in [0, 1024]; 0: onnxruntime's choice
  --native-library PATH      libtopw.so, which answers the sampler's node faster than the graph
  --onnxruntime PATH         onnxruntime's shared library ()" TOPW_ONNXRUNTIME R"()
  --stats                    a line of figures on standard error
  --self-test                compare the random numbers with the published ones, and end
  --help                     this text

Exit codes: 0, 1 (failed), 2 (usage).
)";

template <typename Number>
std::optional<Number> parse(std::string_view text) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(number) : std::nullopt;
}

template <typename Number>
Number whole(const std::string &name, const std::string &text, Number most) {
  const auto number = parse<Number>(text);
  if (!number || *number < 0 || *number > most)
    throw UsageError(name + " is '" + text + "', but must be an integer in [0, " + std::to_string(most) + "].");
  return *number;
}

float parameter_value(const std::string &name, const std::string &text, const Parameter &parameter) {
  char *end = nullptr;
  const auto value = in_range(parameter, std::strtod(text.c_str(), &end));
  if (text.empty() || *end || !value)
    throw UsageError(name + " is '" + text + "', but must be " + parameter.bound + ", in float32 too.");
  return *value;
}

using Take = std::function<void(const std::string &name, const std::string &value)>;

std::map<std::string, Take> options_with_values(Options &o) {
  std::map<std::string, Take> takes{
      {"--max-new-tokens", [&](auto &name, auto &value) { o.max_new_tokens = whole(name, value, kMost); }},
      {"--seed", [&](auto &name, auto &value) { o.seed = whole(name, value, ~std::uint64_t{0}); }},
      {"--eos", [&](auto &name, auto &value) { o.ends.insert(whole(name, value, kMost)); }},
      {"--threads", [&](auto &name, auto &value) { o.threads = whole(name, value, 1024); }},
      {"--native-library", [&](auto &, auto &value) { o.native_library = value; }},
      {"--onnxruntime", [&](auto &, auto &value) { o.onnxruntime = value; }},
      {"--provider",
       [&](auto &name, auto &value) {
         o.cuda = value == "cuda";
         if (!o.cuda && value != "cpu") throw UsageError(name + " is '" + value + "', but must be cpu or cuda.");
       }},
  };
  for (const Parameter &parameter : kParameters)
    for (std::string option : {parameter.name, parameter.alias}) {
      std::replace(option.begin(), option.end(), '_', '-');
      takes["--" + option] = [&](auto &name, auto &value) {
        o.parameters[parameter.name] = parameter_value(name, value, parameter);
      };
    }
  return takes;
}

Options parse_command_line(const std::vector<std::string> &arguments) {
  Options o;
  const std::map<std::string, Take> takes = options_with_values(o);
  const std::map<std::string, bool *> flags{
      {"--ignore-eos", &o.ignore_ends}, {"--stats", &o.stats}, {"--self-test", &o.self_test}};
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
      o.prompt.push_back(*id);
    } else {
      throw UsageError("'" + argument + "' is not a token id, which is an integer; see --help.");
    }
  }
  if (o.folder.empty() && !o.self_test) throw UsageError("no folder is given; see --help.");
  return o;
}

Tokens read_prompt(const Options &options, const Folder &folder) {
  Tokens prompt = options.prompt;
  std::string word;
  while (options.prompt.empty() && std::cin >> word) {
    const auto id = parse<std::int64_t>(word);
    if (!id) throw Failure("'" + word + "' on standard input is not a token id, which is an integer.");
    prompt.push_back(*id);
  }
  if (prompt.empty()) throw Failure("the prompt is empty; give token ids behind the folder or on standard input.");
  for (const std::int64_t id : prompt)
    if (id < 0 || id >= folder.vocabulary)
      throw Failure("the prompt holds the token id " + std::to_string(id) + ", but ids go from 0 to " +
                    std::to_string(folder.vocabulary - 1) + ".");
  if (std::int64_t(prompt.size()) > folder.context)
    throw Failure("the prompt has " + std::to_string(prompt.size()) + " tokens, the model's context holds " +
                  std::to_string(folder.context) + "; shorten it.");
  return prompt;
}

int run(const std::vector<std::string> &arguments) {
  if (std::find(arguments.begin(), arguments.end(), "--help") != arguments.end()) return std::fputs(kHelp, stdout) < 0;
  const Options options = parse_command_line(arguments);
  if (options.self_test) return self_test();
  const Folder folder = open_folder(options.folder);
  const Tokens prompt = read_prompt(options, folder);
  open_onnxruntime(options.onnxruntime);
  const Session session(folder, options.cuda, options.threads, options.native_library);
  check_graph(folder, session.graph.get());
  const Figures figures = generate(options, folder, session, prompt);
  if (options.stats) print(figures, prompt.size());
  return 0;
}

}  // namespace

int main(int count, char **arguments) {
  int code = 1;
  try {
    return run({arguments + 1, arguments + count});
  } catch (const UsageError &error) {
    std::fprintf(stderr, "topw_host: %s\n", error.what());
    code = 2;
  } catch (const std::exception &error) {
    std::fprintf(stderr, "topw_host: %s\n", error.what());
  }
  return code;
}
