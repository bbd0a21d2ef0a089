// A stand-in for the header of TensorRT's plugins with what topw_plugin.cpp uses: types, names and virtual functions.
// Layouts and values are not TensorRT's, so nothing built with it works with TensorRT.
#ifndef TOPW_TESTS_NV_INFER_RUNTIME_H
#define TOPW_TESTS_NV_INFER_RUNTIME_H

#include <stddef.h>
#include <stdint.h>

#define NV_TENSORRT_MAJOR 10
#define NV_TENSORRT_MINOR 3

typedef struct CUstream_st *cudaStream_t;

namespace nvinfer1 {

enum class DataType : int32_t { kFLOAT, kHALF, kINT8, kINT32, kBOOL, kINT64, kBF16 };
enum class TensorFormat : int32_t { kLINEAR, kCHW2 };
enum class PluginFieldType : int32_t { kCHAR, kINT32, kINT64 };
enum class PluginCapabilityType : int32_t { kCORE, kBUILD, kRUNTIME };
enum class TensorRTPhase : int32_t { kBUILD, kRUNTIME };

struct Dims {
  int32_t nbDims;
  int64_t d[8];
};
class IDimensionExpr;
struct DimsExprs {
  int32_t nbDims;
  const IDimensionExpr *d[8];
};
class IExprBuilder;
class IPluginResourceContext;

struct PluginTensorDesc {
  Dims dims;
  DataType type;
  TensorFormat format;
};
struct DynamicPluginTensorDesc {
  PluginTensorDesc desc;
  Dims min, max, opt;
};

struct PluginField {
  explicit PluginField(const char *name = nullptr, const void *data = nullptr,
                       PluginFieldType type = PluginFieldType::kCHAR, int32_t length = 0)
      : name(name), data(data), type(type), length(length) {}
  const char *name;
  const void *data;
  PluginFieldType type;
  int32_t length;
};
struct PluginFieldCollection {
  int32_t nbFields;
  const PluginField *fields;
};

class ILogger {
 public:
  enum class Severity : int32_t { kERROR };
  virtual ~ILogger() = default;
  virtual void log(Severity, const char *) noexcept = 0;
};
class ILoggerFinder {
 public:
  virtual ~ILoggerFinder() = default;
  virtual ILogger *findLogger() = 0;
};

class IPluginCapability {
 public:
  virtual ~IPluginCapability() = default;
};

class IPluginV3 {
 public:
  virtual ~IPluginV3() = default;
  virtual IPluginCapability *getCapabilityInterface(PluginCapabilityType) noexcept = 0;
  virtual IPluginV3 *clone() noexcept = 0;
};

class IPluginV3OneCore : public IPluginCapability {
 public:
  virtual const char *getPluginName() const noexcept = 0;
  virtual const char *getPluginVersion() const noexcept = 0;
  virtual const char *getPluginNamespace() const noexcept = 0;
};

class IPluginV3OneBuild : public IPluginCapability {
 public:
  virtual int32_t configurePlugin(const DynamicPluginTensorDesc *, int32_t, const DynamicPluginTensorDesc *,
                                  int32_t) noexcept = 0;
  virtual int32_t getOutputDataTypes(DataType *, int32_t, const DataType *, int32_t) const noexcept = 0;
  virtual int32_t getOutputShapes(const DimsExprs *, int32_t, const DimsExprs *, int32_t, DimsExprs *, int32_t,
                                  IExprBuilder &) noexcept = 0;
  virtual bool supportsFormatCombination(int32_t, const DynamicPluginTensorDesc *, int32_t, int32_t) noexcept = 0;
  virtual int32_t getNbOutputs() const noexcept = 0;
  virtual size_t getWorkspaceSize(const DynamicPluginTensorDesc *, int32_t, const DynamicPluginTensorDesc *,
                                  int32_t) const noexcept = 0;
};

class IPluginV3OneRuntime : public IPluginCapability {
 public:
  virtual int32_t onShapeChange(const PluginTensorDesc *, int32_t, const PluginTensorDesc *, int32_t) noexcept = 0;
  virtual int32_t enqueue(const PluginTensorDesc *, const PluginTensorDesc *, const void *const *, void *const *,
                          void *, cudaStream_t) noexcept = 0;
  virtual IPluginV3 *attachToContext(IPluginResourceContext *) noexcept = 0;
  virtual const PluginFieldCollection *getFieldsToSerialize() noexcept = 0;
};

class IPluginCreatorInterface {
 public:
  virtual ~IPluginCreatorInterface() = default;
};
class IPluginCreatorV3One : public IPluginCreatorInterface {
 public:
  virtual IPluginV3 *createPlugin(const char *, const PluginFieldCollection *, TensorRTPhase) noexcept = 0;
  virtual const PluginFieldCollection *getFieldNames() noexcept = 0;
  virtual const char *getPluginName() const noexcept = 0;
  virtual const char *getPluginVersion() const noexcept = 0;
  virtual const char *getPluginNamespace() const noexcept = 0;
};

}  // namespace nvinfer1

#endif
