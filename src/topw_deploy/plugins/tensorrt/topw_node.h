// A node topw::TopWSample in TensorRT's terms: attributes, types and sizes of inputs.
#ifndef TOPW_TENSORRT_NODE_H
#define TOPW_TENSORRT_NODE_H

#include <string.h>

#include "../native/parameters.h"
#include "tensorrt_abi.h"
#include "topw_cuda.h"

namespace topw {

using nvinfer1::DataType;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

constexpr char kTableForm[] = "Gather(axis=0)";

enum Input {
  kLogits, kEditIds, kEditPenalty, kEditBias, kAllowed, kTemperature, kSelectionTemperature, kLam, kBeta, kInitTopP,
  kGeomScale, kUniform, kRule, kRuleValues, kMean, kInverseStd, kNeighbourBound, kTable
};  // fmt: skip
constexpr int32_t kWithoutTable = kMean, kWithTable = kTable + 1;
enum Output { kNextToken, kLogprob, kKept, kCertified, kFirstOnRequest };

void log_error(const char *format, ...);

// ---- attributes

struct Settings {
  int32_t top_m = -1, alt_iters = -1, knn_k = -1, with_mass = -1, with_keep_mask = -1;  // -1: not given
  char metric[16] = "", table_form[128] = "";

  int32_t metric_number() const {
    constexpr const char *names[] = {"mahalanobis", "unit", "cosine", "uniform"};
    for (int32_t number = TOPW_MAHALANOBIS; number <= TOPW_UNIFORM; ++number)
      if (strcmp(metric, names[number]) == 0) return number;
    return -1;
  }
  bool has_table() const { return metric_number() != TOPW_UNIFORM; }
  int32_t inputs() const { return has_table() ? kWithTable : kWithoutTable; }
  int32_t outputs() const { return kFirstOnRequest + with_mass + with_keep_mask; }
};

struct Number {
  const char *name;
  int32_t Settings::*place;
  int32_t least, most;
};
constexpr Number kNumbers[] = {{"top_m", &Settings::top_m, 1, INT32_MAX},
                               {"alt_iters", &Settings::alt_iters, 1, INT32_MAX},
                               {"knn_k", &Settings::knn_k, 0, INT32_MAX},
                               {"with_mass", &Settings::with_mass, 0, 1},
                               {"with_keep_mask", &Settings::with_keep_mask, 0, 1}};
constexpr int32_t kAttributes = sizeof kNumbers / sizeof kNumbers[0] + 2;

// An engine's field with the kernels' interface version; not an attribute.
constexpr char kKernels[] = "kernels";
constexpr int32_t kKernelsHere = TOPW_CUDA_ABI_VERSION, kFields = kAttributes + 1;

inline bool read_number(const PluginField &field, const Number &number, Settings *settings) {
  int64_t value = -1;
  if (field.length == 1 && field.data && field.type == PluginFieldType::kINT32)
    value = *static_cast<const int32_t *>(field.data);
  else if (field.length == 1 && field.data && field.type == PluginFieldType::kINT64)
    value = *static_cast<const int64_t *>(field.data);
  if (value < number.least || value > number.most) return false;
  settings->*number.place = static_cast<int32_t>(value);
  return true;
}

// A string of up to room - 1 characters, with or without its final zero.
inline bool read_text(const PluginField &field, char *text, size_t room) {
  if (field.type != PluginFieldType::kCHAR || field.length < 0 || (field.length > 0 && !field.data)) return false;
  const size_t length = field.length ? strnlen(static_cast<const char *>(field.data), field.length) : 0;
  if (length >= room) return false;
  if (length) memcpy(text, field.data, length);
  text[length] = '\0';
  return true;
}

inline bool read_field(const PluginField &field, Settings *settings) {
  if (strcmp(field.name, "metric") == 0) return read_text(field, settings->metric, sizeof settings->metric);
  if (strcmp(field.name, "table_form") == 0)
    return read_text(field, settings->table_form, sizeof settings->table_form);
  for (const Number &number : kNumbers)
    if (strcmp(field.name, number.name) == 0) return read_number(field, number, settings);
  return true;  // a field that only finds the plugin, or one of a later version
}

inline bool read_settings(const nvinfer1::PluginFieldCollection &fields, Settings *settings) {
  for (int32_t index = 0; index < fields.nbFields; ++index)
    if (!read_field(fields.fields[index], settings)) {
      log_error("the attribute %s is of the wrong type or out of range", fields.fields[index].name);
      return false;
    }
  for (const Number &number : kNumbers)
    if (settings->*number.place < 0) {
      log_error("the attribute %s is missing", number.name);
      return false;
    }
  if (settings->metric_number() < 0) {
    log_error("the metric is missing or unknown (it is '%s')", settings->metric);
    return false;
  }
  if (settings->has_table() ? strcmp(settings->table_form, kTableForm) != 0 : settings->table_form[0] != '\0') {
    log_error("the kernels do not read the table form '%s'; let the parser inline the function",
             settings->table_form);
    return false;
  }
  return true;
}

// Whether the engine was built for this version of the kernels' interface. Kernels of another version might write
// beyond the engine's workspace.
inline bool check_engine(const nvinfer1::PluginFieldCollection &fields) {
  for (int32_t index = 0; index < fields.nbFields; ++index) {
    const PluginField &field = fields.fields[index];
    if (strcmp(field.name, kKernels) == 0 && field.type == PluginFieldType::kINT32 && field.length == 1 &&
        field.data && *static_cast<const int32_t *>(field.data) == kKernelsHere)
      return true;
  }
  log_error("the engine was built for another version of the kernels' interface than %d; build the engine again",
            kKernelsHere);
  return false;
}

// Writes `fields` that point into `settings`: the attributes, then kKernels. Returns the number of attributes.
inline int32_t write_fields(const Settings &settings, PluginField (&fields)[kFields]) {
  int32_t count = 0;
  for (const Number &number : kNumbers)
    fields[count++] = PluginField(number.name, &(settings.*number.place), PluginFieldType::kINT32, 1);
  const auto text = [&](const char *name, const char *value) {
    fields[count++] = PluginField(name, value, PluginFieldType::kCHAR, static_cast<int32_t>(strlen(value)) + 1);
  };
  text("metric", settings.metric);
  text("table_form", settings.table_form);
  fields[count] = PluginField(kKernels, &kKernelsHere, PluginFieldType::kINT32, 1);
  return count;
}

// ---- types and sizes

inline int32_t onnx_type(DataType type) {
  return type == DataType::kFLOAT  ? TOPW_FLOAT32
         : type == DataType::kHALF ? TOPW_FLOAT16
         : type == DataType::kBF16 ? TOPW_BFLOAT16
                                   : 0;
}

struct Tensor {
  nvinfer1::Dims dims;
  DataType type;
};

inline bool has_shape(const Tensor &tensor, int32_t rank, int64_t first, int64_t second = 0) {
  return tensor.dims.nbDims == rank && tensor.dims.d[0] == first && (rank == 1 || tensor.dims.d[1] == second);
}

// The shape of a call with these inputs. Returns NULL, or why they do not fit, as a clause.
inline const char *read_call_shape(const Settings &settings, const Tensor *in, topw_cuda_shape *shape) {
  *shape = {};
  shape->options = {settings.top_m, settings.alt_iters, settings.metric_number(), settings.knn_k};
  if (in[kLogits].dims.nbDims != 2 || in[kEditIds].dims.nbDims != 2) return "logits or edits are not matrices";
  shape->batch = in[kLogits].dims.d[0];
  shape->vocab = in[kLogits].dims.d[1];
  shape->edits = in[kEditIds].dims.d[1];
  shape->logits_type = onnx_type(in[kLogits].type);
  for (int32_t index = kEditIds; index <= kEditBias; ++index)
    if (!has_shape(in[index], 2, shape->batch, shape->edits)) return "the edits' shapes differ";
  const int64_t words = words_of_mask(shape->vocab);
  if (!has_shape(in[kAllowed], 2, shape->batch, 0) && !has_shape(in[kAllowed], 2, shape->batch, words))
    return "the mask must have no words, or one per 32 tokens";
  for (int32_t index = kTemperature; index <= kUniform; ++index)
    if (!has_shape(in[index], 1, shape->batch)) return "a parameter is not one number per row";
  if (!has_shape(in[kRule], 1, shape->batch) || !has_shape(in[kRuleValues], 2, shape->batch, 2))
    return "a rule is not one number and two values per row";
  if (!settings.has_table()) return nullptr;
  if (in[kTable].dims.nbDims != 2 || in[kTable].dims.d[0] < shape->vocab)
    return "the table has fewer rows than there are tokens";
  const int64_t bounds = in[kNeighbourBound].dims.d[0];
  shape->table.tokens = in[kTable].dims.d[0];
  shape->table.hidden = in[kTable].dims.d[1];
  shape->table.dtype = onnx_type(in[kTable].type);
  if (!has_shape(in[kMean], 1, shape->table.hidden) || !has_shape(in[kInverseStd], 1, shape->table.hidden) ||
      in[kNeighbourBound].dims.nbDims != 1 || (bounds != 0 && bounds != shape->vocab))
    return "the table's statistics or bounds do not fit its size";
  return nullptr;
}

}  // namespace topw

#endif
