// An exported folder: the graph's manifest (docs/contract/graph.md, sections 8 and 9) and the model's configuration
// files.
#ifndef TOPW_FOLDER_H
#define TOPW_FOLDER_H

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "common.h"
#include "json.h"
#include "ort_c_abi.h"
#include "parameters.h"

namespace topw {

namespace fs = std::filesystem;

constexpr const char *kManifest = "topw_manifest.json";
constexpr const char *kGenerationConfig = "generation_config.json";
constexpr int kFormatVersion = 1;

using ElementType = ONNXTensorElementDataType;
inline const std::map<std::string, ElementType> kElementTypes{  // by the manifest's names
    {"float", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},     {"int32", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32},
    {"int64", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64},     {"bool", ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL},
    {"float16", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16}, {"bfloat16", ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16}};

struct TensorSpec {
  ElementType type;
  std::vector<std::int64_t> shape;  // -1 for a named size
};
using TensorSpecs = std::map<std::string, TensorSpec>;

struct State {  // what a layer keeps between runs
  std::string past, present;
  ElementType type;
  std::vector<std::int64_t> shape;  // of a row; 0 is the axis of tokens

  std::vector<std::int64_t> sized(std::int64_t rows, std::int64_t tokens) const {
    std::vector<std::int64_t> sizes{rows};
    for (std::int64_t size : shape) sizes.push_back(size ? size : tokens);
    return sizes;
  }
};

struct Folder {
  fs::path path;
  Json files;  // of the manifest, by name
  TensorSpecs inputs, outputs;
  bool in_place = false;  // form of the cache: static if true, else concat
  bool pads = true;       // whether prompts of different lengths may share a batch
  std::vector<State> states;
  std::int64_t context = 0, buffer_least = 0, vocabulary = 0;
  Parameters exported;               // Top-W's six, from the export
  Given stated;                      // from generation_config.json, with the ids that end a sequence
  std::optional<std::int64_t> begin;  // replaces an empty prompt

  bool has(const std::string &name) const { return files.find(name) != nullptr; }
  Json json(const std::string &name) const {  // an empty object if the file is missing
    return has(name) ? read_json(path / name) : JsonReader("{}", name).read();
  }
  std::int64_t fixed_size(const std::string &input, std::size_t axis) const {  // -1 if dynamic
    const auto spec = inputs.find(input);
    return spec != inputs.end() && axis < spec->second.shape.size() ? spec->second.shape[axis] : -1;
  }
};

inline ElementType element_type(const Json &value) {
  const auto found = kElementTypes.find(value.as_text());
  value.need(found != kElementTypes.end(), "an element type that this program supports");
  return found->second;
}

inline std::size_t cache_element_bytes(ElementType type) {  // 0: not a cache type
  if (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) return 4;
  return type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 || type == ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16 ? 2 : 0;
}

inline TensorSpecs read_specs(const Json &list) {
  TensorSpecs specs;
  for (const Json &item : list.as_list()) {
    TensorSpec spec{element_type(item.at("dtype")), {}};
    for (const Json &size : item.at("shape").as_list())
      spec.shape.push_back(size.kind == Json::Text ? -1 : size.as_whole());
    specs[item.at("name").as_text()] = spec;
  }
  return specs;
}

// Requires every file of the manifest to be regular and of the stated size.
inline void check_files(const fs::path &folder, const Json &files) {
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

inline void read_decoder(const Json &decoder, Folder &folder) {
  const Json &form = decoder.at("kv_form");
  form.need(form.as_text() == "static" || form.text == "concat", "'static' or 'concat' for this program");
  folder.in_place = form.text == "static";
  folder.pads = folder.in_place || decoder.at("left_padding").as_flag();
  folder.context = decoder.at("context_length").as_whole(1);
  folder.buffer_least = decoder.at("buffer_least").as_whole();
  const Json &columns = decoder.at("most_columns");
  columns.need(columns.as_whole() == 0, "0: this program reads a prompt in one run");
  for (const Json &item : decoder.at("states").as_list()) {
    State state{item.at("past").as_text(), item.at("present").as_text(), element_type(item.at("dtype")), {}};
    item.at("dtype").need(cache_element_bytes(state.type) > 0, "'float', 'float16' or 'bfloat16'");
    for (const Json &size : item.at("shape").as_list()) state.shape.push_back(size.as_whole());
    folder.states.push_back(state);
    if (item.at("window").as_whole() > 0) folder.pads = false;
  }
  decoder.need(!folder.states.empty(), "one with states");
}

// Drops ids outside the vocabulary.
inline void keep_drawable(Given &stated, std::int64_t vocabulary) {
  const auto beyond = [&](std::int64_t id) { return id >= vocabulary; };
  for (const IdsField &ids : kIds)
    if (auto &list = stated.*ids.field) list->erase(std::remove_if(list->begin(), list->end(), beyond), list->end());
  if (auto &words = stated.bad_words_ids)
    words->erase(std::remove_if(words->begin(), words->end(),
                                [&](const Tokens &word) { return std::any_of(word.begin(), word.end(), beyond); }),
                 words->end());
}

// The model's parameters. Begin and end tokens may be in config.json only.
inline void read_configurations(Folder &folder) {
  const Json generation = folder.json(kGenerationConfig), model = folder.json("config.json");
  read_fields(generation, folder.stated);
  folder.stated.seed.reset();  // only a request may set it
  folder.stated.ignore_eos.reset();
  const Json *language_model = model.find("text_config");  // of a composite model
  for (const Json *config : {&generation, &model, language_model}) {
    if (!config || config->kind != Json::Object) continue;
    const Json *ends = config->find("eos_token_id"), *begin = config->find("bos_token_id");
    if (ends && !folder.stated.eos_token_id) folder.stated.eos_token_id = read_ids(*ends);
    if (begin && begin->kind == Json::Number && !folder.begin) folder.begin = begin->as_whole();
  }
}

inline Folder open_folder(const fs::path &path) {
  if (!fs::is_directory(path)) throw Failure(path.string() + " is not a folder; give the one that topw-export wrote.");
  if (!fs::is_regular_file(path / kManifest))
    throw Failure(path.string() + " has no " + kManifest + ", so it is not a finished export; run topw-export.");
  const Json manifest = read_json(path / kManifest);
  const Json &version = manifest.at("format_version"), &kind = manifest.at("kind");
  version.need(version.as_whole() == kFormatVersion, std::to_string(kFormatVersion) + " for this program");
  kind.need(kind.as_text() == "decoder", "'decoder' for this program");
  const Json &status = manifest.at("verification").at("status");
  status.need(status.as_text() != "provisional", "that of a finished export");
  check_files(path, manifest.at("files"));

  Folder folder;
  folder.path = path;
  folder.files = manifest.at("files");
  folder.inputs = read_specs(manifest.at("inputs"));
  folder.outputs = read_specs(manifest.at("outputs"));
  folder.vocabulary = manifest.at("sampler").at("vocab_size").as_whole(1);
  read_decoder(manifest.at("decoder"), folder);
  Given defaults;
  for (const Parameter &parameter : kParameters)
    read_field(parameter.name, manifest.at("defaults").at(parameter.name), defaults);
  folder.exported = defaults.top_w;
  read_configurations(folder);
  keep_drawable(folder.stated, folder.vocabulary);
  return folder;
}

}  // namespace topw

#endif
