// The plugin as TensorRT calls it, over the emulated kernels; test_library.py reads its output.
//
// plugin_steps INPUTS OUTPUTS. INPUTS: batch, vocab, edits, words and hidden as int64_t, then the node's inputs in order,
// for the uniform metric if hidden is 0, else for the unit metric. OUTPUTS: the six outputs of the last step of each of
// two contexts.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <string>
#include <vector>

#include "tensorrt_abi.h"
#include "topw_cuda.h"

extern "C" nvinfer1::IPluginCreatorInterface *const *getCreators(int32_t &count);
extern "C" void topw_emulate(uint64_t seed, uint32_t threads, uint32_t blocks);
// In kernels_watched.cpp.
extern int allocated, released, unclean;
extern bool is_full;
extern const void *last_control;

namespace {

using nvinfer1::DataType;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;
using Bytes = std::vector<unsigned char>;

constexpr int kOfRows = 14, kInputs = 18, kOutputs = 6;  // the first kOfRows inputs have an element per row

struct Rows {
  int64_t batch, vocab, edits, words, hidden;
  Bytes data[kInputs];

  int inputs() const { return hidden ? kInputs : kOfRows; }
  int64_t rows(int input) const {
    return input < kOfRows ? batch : input == 17 ? vocab : input == 16 ? 0 : hidden;  // no neighbour bounds
  }
  int64_t elements(int input) const {
    return input == 0 ? vocab : input <= 3 ? edits : input == 4 ? words : input == 13 ? 2 : input == 17 ? hidden : 1;
  }
  size_t bytes_of_row(int input) const { return elements(input) * (input == 1 ? sizeof(int64_t) : sizeof(float)); }

  // These rows, repeated to `rows` rows.
  Rows repeated(int64_t rows) const {
    Rows made{rows, vocab, edits, words, hidden, {}};
    for (int input = kOfRows; input < kInputs; ++input) made.data[input] = data[input];
    for (int input = 0; input < kOfRows; ++input) {
      const size_t row = bytes_of_row(input);
      for (int64_t index = 0; index < rows; ++index) {
        const unsigned char *const from = data[input].data() + index % batch * row;
        made.data[input].insert(made.data[input].end(), from, from + row);
      }
    }
    return made;
  }
};

Rows read(const char *path) {
  Rows rows{};
  FILE *const file = fopen(path, "rb");
  bool done = file && fread(&rows.batch, sizeof(int64_t), 5, file) == 5;
  for (int input = 0; done && input < rows.inputs(); ++input) {
    rows.data[input].resize(rows.rows(input) * rows.bytes_of_row(input));
    done = fread(rows.data[input].data(), 1, rows.data[input].size(), file) == rows.data[input].size();
  }
  if (!done) exit(2);
  fclose(file);
  return rows;
}

nvinfer1::IPluginV3OneRuntime &runtime(nvinfer1::IPluginV3 *plugin) {
  return *static_cast<nvinfer1::IPluginV3OneRuntime *>(
      plugin->getCapabilityInterface(nvinfer1::PluginCapabilityType::kRUNTIME));
}

std::vector<nvinfer1::PluginTensorDesc> described(const Rows &rows) {
  std::vector<nvinfer1::PluginTensorDesc> all(rows.inputs());
  for (int input = 0; input < rows.inputs(); ++input) {
    all[input].dims.nbDims = input <= 4 || input == 13 || input == 17 ? 2 : 1;
    all[input].dims.d[0] = rows.rows(input);
    all[input].dims.d[1] = rows.elements(input);
    all[input].type =
        input == 1 ? DataType::kINT64 : input == 4 || input == 12 ? DataType::kINT32 : DataType::kFLOAT;
  }
  return all;
}

bool shape(nvinfer1::IPluginV3 *plugin, const Rows &rows) {
  return runtime(plugin).onShapeChange(described(rows).data(), rows.inputs(), nullptr, 0) == 0;
}

// A step in a workspace dirtied by other layers. Returns its outputs concatenated; empty if it failed.
Bytes step(nvinfer1::IPluginV3 *plugin, const Rows &rows) {
  topw_cuda_shape size = {{64, 3, rows.hidden ? TOPW_UNIT : TOPW_UNIFORM, 0}, {}, rows.batch, rows.vocab, rows.edits,
                          TOPW_FLOAT32, 0};  // fmt: skip
  size.table.tokens = rows.hidden ? rows.vocab : 0;
  size.table.hidden = rows.hidden;
  size.table.dtype = rows.hidden ? TOPW_FLOAT32 : 0;
  const size_t room = static_cast<size_t>(topw_cuda_workspace_bytes(&size));
  unsigned char *const workspace = static_cast<unsigned char *>(aligned_alloc(256, room));
  for (size_t index = 0; index < room; ++index) workspace[index] = 0xA5;
  const size_t sizes[kOutputs] = {sizeof(int64_t), sizeof(float), sizeof(int32_t), 1, sizeof(float), size_t(rows.vocab)};
  Bytes results[kOutputs], all;
  const void *inputs[kInputs];
  void *outputs[kOutputs];
  for (int input = 0; input < rows.inputs(); ++input) inputs[input] = rows.data[input].data();
  for (int output = 0; output < kOutputs; ++output) {
    results[output].resize(rows.batch * sizes[output]);
    outputs[output] = results[output].data();
  }
  const bool failed = runtime(plugin).enqueue(described(rows).data(), nullptr, inputs, outputs, workspace, nullptr);
  free(workspace);
  if (!failed)
    for (const Bytes &result : results) all.insert(all.end(), result.begin(), result.end());
  return all;
}

void say(const char *name, long long value) { printf("%s %lld\n", name, value); }

// From an engine built with this kernel interface and `fewer` fields fewer. NULL if refused.
nvinfer1::IPluginV3 *created(bool table, int32_t kernels = TOPW_CUDA_ABI_VERSION, int32_t fewer = 0) {
  const int32_t top_m = 64, alt_iters = 3, zero = 0, one = 1;
  const char *const metric = table ? "unit" : "uniform", *const form = table ? "Gather(axis=0)" : "";
  const PluginField fields[] = {PluginField("top_m", &top_m, PluginFieldType::kINT32, 1),
                                PluginField("alt_iters", &alt_iters, PluginFieldType::kINT32, 1),
                                PluginField("knn_k", &zero, PluginFieldType::kINT32, 1),
                                PluginField("with_mass", &one, PluginFieldType::kINT32, 1),
                                PluginField("with_keep_mask", &one, PluginFieldType::kINT32, 1),
                                PluginField("metric", metric, PluginFieldType::kCHAR, static_cast<int32_t>(strlen(metric))),
                                PluginField("table_form", form, PluginFieldType::kCHAR, static_cast<int32_t>(strlen(form))),
                                PluginField("kernels", &kernels, PluginFieldType::kINT32, 1)};
  const nvinfer1::PluginFieldCollection collection = {8 - fewer, fields};
  int32_t count = 0;
  auto *const creator = static_cast<nvinfer1::IPluginCreatorV3One *>(getCreators(count)[0]);
  return creator->createPlugin("node", &collection, nvinfer1::TensorRTPhase::kRUNTIME);
}

// Whether a plugin can be recreated from what an engine stores.
bool is_taken_back(nvinfer1::IPluginV3 *plugin) {
  int32_t count = 0;
  auto *const creator = static_cast<nvinfer1::IPluginCreatorV3One *>(getCreators(count)[0]);
  const nvinfer1::PluginFieldCollection *const kept = runtime(plugin).getFieldsToSerialize();
  if (kept->nbFields != creator->getFieldNames()->nbFields + 1) return false;
  nvinfer1::IPluginV3 *const again = creator->createPlugin("node", kept, nvinfer1::TensorRTPhase::kRUNTIME);
  delete again;
  return again != nullptr;
}

}  // namespace

int main(int, char **words) {
  const Rows rows = read(words[1]);
  const Rows few = rows.repeated(2), many = rows.repeated(80), more = rows.repeated(300);
  topw_emulate(1, 64, 3);
  nvinfer1::IPluginV3 *const engine = created(rows.hidden);
  say("engines of other kernels refused",
      !created(rows.hidden, TOPW_CUDA_ABI_VERSION - 1) && !created(rows.hidden, TOPW_CUDA_ABI_VERSION, 1));
  say("its own fields taken", is_taken_back(engine));
  nvinfer1::IPluginV3 *const contexts[] = {runtime(engine).attachToContext(nullptr),
                                           runtime(engine).attachToContext(nullptr)};
  say("allocated by attaching", allocated);

  FILE *const file = fopen(words[2], "wb");
  const void *addresses[2];
  for (int index = 0; index < 2; ++index) {
    say("shape taken", shape(contexts[index], rows));
    const int before = allocated;
    step(contexts[index], rows);
    addresses[index] = last_control;
    const Bytes answer = step(contexts[index], rows);
    say("allocated by steps", allocated - before);
    say("kept its address", last_control == addresses[index]);
    fwrite(answer.data(), 1, answer.size(), file);
  }
  fclose(file);
  say("contexts share memory", addresses[0] == addresses[1]);

  say("fewer rows taken", shape(contexts[0], few) && !step(contexts[0], few).empty());
  say("fewer rows keep the address", last_control == addresses[0]);
  const int before = allocated;
  say("more rows taken", shape(contexts[0], many) && !step(contexts[0], many).empty());
  say("allocated for more rows", allocated - before);
  say("more rows have other memory", last_control != addresses[0]);
  say("released while contexts live", released);
  say("no shape announced", !step(engine, rows).empty());

  is_full = true;
  const int there = allocated;
  say("a full device refused", !shape(contexts[1], more) && step(contexts[1], more).empty());
  say("smaller steps go on", shape(contexts[1], rows) && !step(contexts[1], rows).empty());
  say("allocated on a full device", allocated - there);

  for (nvinfer1::IPluginV3 *plugin : {contexts[0], contexts[1], engine}) delete plugin;
  say("left", allocated - released);
  say("control bytes left behind by a step", unclean);
  return 0;
}
