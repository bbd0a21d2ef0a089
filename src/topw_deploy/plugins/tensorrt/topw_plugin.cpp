// TensorRT's plugin for the node topw::TopWSample (docs/contract/graph.md, section 8), a part of the library with the CUDA
// kernels.
//
// TensorRT is not linked: its plugin registry opens the library and calls getCreators.

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <new>

#include "control_memory.h"
#include "tensorrt_abi.h"
#include "topw_cuda.h"
#include "topw_node.h"

namespace topw {

constexpr char kName[] = "TopWSample", kVersion[] = "1", kNamespace[] = "topw";

// Prints to stderr: TensorRT's logger has another layout in TensorRT 10 than in 11.
void log_error(const char *format, ...) {
  char message[512];
  va_list values;
  va_start(values, format);
  vsnprintf(message, sizeof message, format, values);
  va_end(values);
  fprintf(stderr, "TopWSample: %s\n", message);
}

namespace {

// The plugin of a node. TensorRT clones it for each execution context, so concurrent contexts do not share control
// memory.
class Plugin final : public nvinfer1::IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public nvinfer1::IPluginV3OneBuild,
                     public nvinfer1::IPluginV3OneRuntime {
 public:
  explicit Plugin(const Settings &settings) : settings_(settings) {}

  nvinfer1::IPluginCapability *getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override {
    switch (type) {
      case nvinfer1::PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore *>(this);
      case nvinfer1::PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuild *>(this);
      case nvinfer1::PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime *>(this);
    }
    return nullptr;
  }

  nvinfer1::IPluginV3 *clone() noexcept override {
    Plugin *copy = new (std::nothrow) Plugin(settings_);
    if (copy) {
      copy->logits_type_ = logits_type_;
      copy->table_type_ = table_type_;
    }
    return copy;
  }

  const char *getPluginName() const noexcept override { return kName; }
  const char *getPluginVersion() const noexcept override { return kVersion; }
  const char *getPluginNamespace() const noexcept override { return kNamespace; }

  int32_t getNbOutputs() const noexcept override { return settings_.outputs(); }

  int32_t getOutputDataTypes(DataType *types, int32_t, const DataType *inputs, int32_t count) const noexcept override {
    if (!has_inputs(count)) return -1;
    logits_type_ = inputs[kLogits];
    if (settings_.has_table()) table_type_ = inputs[kTable];
    for (int32_t index = 0; index < settings_.outputs(); ++index) types[index] = output_type(index);
    return 0;
  }

  int32_t getOutputShapes(const nvinfer1::DimsExprs *inputs, int32_t count, const nvinfer1::DimsExprs *, int32_t,
                          nvinfer1::DimsExprs *outputs, int32_t, nvinfer1::IExprBuilder &) noexcept override {
    if (!has_inputs(count) || inputs[kLogits].nbDims != 2) return -1;
    for (int32_t index = 0; index < settings_.outputs(); ++index) {
      outputs[index].nbDims = is_keep_mask(index) ? 2 : 1;
      outputs[index].d[0] = inputs[kLogits].d[0];
      if (is_keep_mask(index)) outputs[index].d[1] = inputs[kLogits].d[1];
    }
    return 0;
  }

  // Accepts only the graph's types: the builder must not round logits for speed.
  bool supportsFormatCombination(int32_t place, const nvinfer1::DynamicPluginTensorDesc *tensors, int32_t inputs,
                                 int32_t) noexcept override {
    const nvinfer1::PluginTensorDesc &tensor = tensors[place].desc;
    if (tensor.format != nvinfer1::TensorFormat::kLINEAR) return false;
    if (place >= inputs) return tensor.type == output_type(place - inputs);
    switch (place) {
      case kLogits: return onnx_type(tensor.type) && tensor.type == logits_type_;
      case kEditIds: return tensor.type == DataType::kINT64;
      case kAllowed:
      case kRule: return tensor.type == DataType::kINT32;
      case kTable: return onnx_type(tensor.type) && tensor.type == table_type_;
      default: return tensor.type == DataType::kFLOAT;
    }
  }

  int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc *in, int32_t count,
                          const nvinfer1::DynamicPluginTensorDesc *, int32_t) noexcept override {
    topw_cuda_shape shape;
    return has_inputs(count) && largest_shape(in, &shape) ? 0 : -1;
  }

  size_t getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc *in, int32_t count,
                          const nvinfer1::DynamicPluginTensorDesc *, int32_t) const noexcept override {
    topw_cuda_shape shape;
    return has_inputs(count) && largest_shape(in, &shape) ? static_cast<size_t>(topw_cuda_workspace_bytes(&shape)) : 0;
  }

  // Allocates on the current device, which is the engine's. TensorRT calls this in the first run after a shape or
  // address changed, and forbids capturing that run.
  int32_t onShapeChange(const nvinfer1::PluginTensorDesc *in, int32_t count, const nvinfer1::PluginTensorDesc *,
                        int32_t) noexcept override {
    topw_cuda_shape shape;
    return has_inputs(count) && actual_shape(in, &shape) && reserve(shape) ? 0 : -1;
  }

  // Enqueues only kernels, so a CUDA graph can capture a step. Allocates only if onShapeChange was not called, for
  // example by a builder that times layers.
  int32_t enqueue(const nvinfer1::PluginTensorDesc *in, const nvinfer1::PluginTensorDesc *, const void *const *inputs,
                  void *const *outputs, void *workspace, nvinfer1::Stream stream) noexcept override {
    topw_cuda_shape shape;
    void *const control = actual_shape(in, &shape) ? reserve(shape) : nullptr;
    if (!control) return -1;
    const topw_inputs arguments = bound_inputs(shape, in[kAllowed].dims.d[1], inputs);
    const topw_outputs results = bound_outputs(outputs);
    topw_table table = shape.table;
    if (settings_.has_table()) {
      table.rows = inputs[kTable];
      table.mean = static_cast<const float *>(inputs[kMean]);
      table.inverse_std = static_cast<const float *>(inputs[kInverseStd]);
      table.neighbour_bound =
          in[kNeighbourBound].dims.d[0] ? static_cast<const float *>(inputs[kNeighbourBound]) : nullptr;
    }
    const int failed = topw_cuda_launch(&shape, settings_.has_table() ? &table : nullptr, &arguments, &results, control,
                                        workspace, stream);
    if (failed) log_error("CUDA answers %s", topw_cuda_error(failed));
    return failed ? -1 : 0;
  }

  nvinfer1::IPluginV3 *attachToContext(nvinfer1::IPluginResourceContext *) noexcept override { return clone(); }

  const nvinfer1::PluginFieldCollection *getFieldsToSerialize() noexcept override {
    written_ = {write_fields(settings_, fields_) + 1, fields_};
    return &written_;
  }

 private:
  bool has_inputs(int32_t inputs) const {
    if (inputs != settings_.inputs()) log_error("the node has %d inputs, not %d", inputs, settings_.inputs());
    return inputs == settings_.inputs();
  }

  bool is_keep_mask(int32_t output) const { return settings_.with_keep_mask && output == settings_.outputs() - 1; }

  DataType output_type(int32_t index) const {
    constexpr DataType types[] = {DataType::kINT64, DataType::kFLOAT, DataType::kINT32, DataType::kBOOL};
    return index < kFirstOnRequest ? types[index] : is_keep_mask(index) ? DataType::kBOOL : DataType::kFLOAT;
  }

  bool read_supported_shape(const Tensor *tensors, topw_cuda_shape *shape) const {
    const char *reason = read_call_shape(settings_, tensors, shape);
    if (!reason) reason = topw_cuda_refusal(shape);
    if (reason) log_error("%s", reason);
    return !reason;
  }

  bool largest_shape(const nvinfer1::DynamicPluginTensorDesc *in, topw_cuda_shape *shape) const {
    Tensor tensors[kWithTable];
    for (int32_t index = 0; index < settings_.inputs(); ++index) tensors[index] = {in[index].max, in[index].desc.type};
    return read_supported_shape(tensors, shape);
  }

  bool actual_shape(const nvinfer1::PluginTensorDesc *in, topw_cuda_shape *shape) const {
    Tensor tensors[kWithTable];
    for (int32_t index = 0; index < settings_.inputs(); ++index) tensors[index] = {in[index].dims, in[index].type};
    return read_supported_shape(tensors, shape);
  }

  void *reserve(const topw_cuda_shape &shape) {
    int failed = 0;
    const int64_t bytes = topw_cuda_control_bytes(&shape);
    void *const memory = control_.reserve(bytes, &failed);
    if (failed)
      log_error("no control memory for %lld rows: CUDA answers %s; free memory of the device, and run a new shape once "
               "before it is captured", static_cast<long long>(shape.batch), topw_cuda_error(failed));
    return memory;
  }

  static topw_inputs bound_inputs(const topw_cuda_shape &shape, int64_t words, const void *const *inputs) {
    topw_inputs bound{};
    bound.batch = shape.batch;
    bound.vocab = shape.vocab;
    bound.edits = shape.edits;
    bound.words = words;
    bound.logits = static_cast<const float *>(inputs[kLogits]);  // of shape.logits_type
    bound.edit_ids = static_cast<const int64_t *>(inputs[kEditIds]);
    bound.edit_penalty = static_cast<const float *>(inputs[kEditPenalty]);
    bound.edit_bias = static_cast<const float *>(inputs[kEditBias]);
    bound.allowed = static_cast<const int32_t *>(inputs[kAllowed]);
    const float **columns[] = {&bound.temperature, &bound.selection_temperature, &bound.lam, &bound.beta,
                               &bound.init_top_p, &bound.geom_scale, &bound.uniform};  // fmt: skip
    for (int32_t index = kTemperature; index <= kUniform; ++index)
      *columns[index - kTemperature] = static_cast<const float *>(inputs[index]);
    bound.rule = static_cast<const int32_t *>(inputs[kRule]);
    bound.rule_values = static_cast<const float *>(inputs[kRuleValues]);
    return bound;
  }

  topw_outputs bound_outputs(void *const *outputs) const {
    topw_outputs bound{};
    bound.next_token = static_cast<int64_t *>(outputs[kNextToken]);
    bound.logprob = static_cast<float *>(outputs[kLogprob]);
    bound.kept = static_cast<int32_t *>(outputs[kKept]);
    bound.certified = static_cast<uint8_t *>(outputs[kCertified]);
    if (settings_.with_mass) bound.mass = static_cast<float *>(outputs[kFirstOnRequest]);
    if (settings_.with_keep_mask) bound.keep_mask = static_cast<uint8_t *>(outputs[settings_.outputs() - 1]);
    return bound;
  }

  const Settings settings_;
  // The graph's types; float32 until TensorRT passes them.
  mutable DataType logits_type_ = DataType::kFLOAT, table_type_ = DataType::kFLOAT;
  ControlMemory control_;
  PluginField fields_[kFields];
  nvinfer1::PluginFieldCollection written_{};
};

class Creator final : public nvinfer1::IPluginCreatorV3One {
 public:
  Creator() : names_{write_fields(known_, fields_), fields_} {}

  nvinfer1::IPluginV3 *createPlugin(const char *, const nvinfer1::PluginFieldCollection *fields,
                                    nvinfer1::TensorRTPhase phase) noexcept override {
    Settings settings;
    if (fields && phase == nvinfer1::TensorRTPhase::kRUNTIME && !check_engine(*fields)) return nullptr;
    return fields && read_settings(*fields, &settings) ? new (std::nothrow) Plugin(settings) : nullptr;
  }

  const nvinfer1::PluginFieldCollection *getFieldNames() noexcept override { return &names_; }
  const char *getPluginName() const noexcept override { return kName; }
  const char *getPluginVersion() const noexcept override { return kVersion; }
  const char *getPluginNamespace() const noexcept override { return kNamespace; }

 private:
  Settings known_;
  PluginField fields_[kFields];
  nvinfer1::PluginFieldCollection names_;
};

}  // namespace

}  // namespace topw

// Entry points for TensorRT's registry (IPluginRegistry::loadLibrary, trtexec --dynamicPlugins).
extern "C" TOPW_EXPORT nvinfer1::IPluginCreatorInterface *const *getCreators(int32_t &count) {
  static topw::Creator creator;
  static nvinfer1::IPluginCreatorInterface *const creators[] = {&creator};
  count = 1;
  return creators;
}

extern "C" TOPW_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder *) {}  // TensorRT requires it
