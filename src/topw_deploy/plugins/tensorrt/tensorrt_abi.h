// TensorRT's plugin interface, declared as in NVIDIA's headers of TensorRT 10.15 to 11.1 (Apache-2.0), so that one library
// works with all of them and is built without their headers. Only layouts matter: the order of virtual functions, the
// fields of structures, and the values of enumerators. Those that the plugin does not use have no names.
#ifndef TOPW_TENSORRT_ABI_H
#define TOPW_TENSORRT_ABI_H

#include <stddef.h>
#include <stdint.h>

struct CUstream_st;

namespace nvinfer1 {

using Stream = CUstream_st *;  // cudaStream_t

enum class DataType : int32_t { kFLOAT = 0, kHALF = 1, kINT32 = 3, kBOOL = 4, kBF16 = 7, kINT64 = 8 };
enum class TensorFormat : int32_t { kLINEAR = 0 };
enum class PluginFieldType : int32_t { kINT32 = 5, kCHAR = 6, kUNKNOWN = 8, kINT64 = 10 };
enum class PluginCapabilityType : int32_t { kCORE = 0, kBUILD = 1, kRUNTIME = 2 };
enum class TensorRTPhase : int32_t { kBUILD = 0, kRUNTIME = 1 };
enum class APILanguage : int32_t { kCPP = 0 };

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
class ILoggerFinder;

struct PluginTensorDesc {
  Dims dims;
  DataType type;
  TensorFormat format;
  float scale;
};
struct DynamicPluginTensorDesc {
  PluginTensorDesc desc;
  Dims min, max, opt;
};

struct PluginField {
  explicit PluginField(const char *name = nullptr, const void *data = nullptr,
                       PluginFieldType type = PluginFieldType::kUNKNOWN, int32_t length = 0) noexcept
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

struct InterfaceInfo {
  const char *kind;
  int32_t major, minor;
};

class IVersionedInterface {
 public:
  virtual APILanguage getAPILanguage() const noexcept { return APILanguage::kCPP; }
  virtual InterfaceInfo getInterfaceInfo() const noexcept = 0;
  virtual ~IVersionedInterface() noexcept = default;
};

inline namespace v_1_0 {  // part of the types' names, as in NVIDIA's libraries

class IPluginCapability : public IVersionedInterface {};

class IPluginV3 : public IVersionedInterface {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN", 1, 0}; }
  virtual IPluginCapability *getCapabilityInterface(PluginCapabilityType) noexcept = 0;
  virtual IPluginV3 *clone() noexcept = 0;
};

class IPluginV3OneCore : public IPluginCapability {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_CORE", 1, 0}; }
  virtual const char *getPluginName() const noexcept = 0;
  virtual const char *getPluginVersion() const noexcept = 0;
  virtual const char *getPluginNamespace() const noexcept = 0;
};

class IPluginV3OneBuild : public IPluginCapability {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_BUILD", 1, 0}; }
  virtual int32_t configurePlugin(const DynamicPluginTensorDesc *, int32_t, const DynamicPluginTensorDesc *,
                                  int32_t) noexcept = 0;
  virtual int32_t getOutputDataTypes(DataType *, int32_t, const DataType *, int32_t) const noexcept = 0;
  virtual int32_t getOutputShapes(const DimsExprs *, int32_t, const DimsExprs *, int32_t, DimsExprs *, int32_t,
                                  IExprBuilder &) noexcept = 0;
  virtual bool supportsFormatCombination(int32_t, const DynamicPluginTensorDesc *, int32_t, int32_t) noexcept = 0;
  virtual int32_t getNbOutputs() const noexcept = 0;
  virtual size_t getWorkspaceSize(const DynamicPluginTensorDesc *, int32_t, const DynamicPluginTensorDesc *,
                                  int32_t) const noexcept = 0;
  virtual int32_t getValidTactics(int32_t *, int32_t) noexcept { return 0; }
  virtual int32_t getNbTactics() noexcept { return 0; }
  virtual const char *getTimingCacheID() noexcept { return nullptr; }
  virtual int32_t getFormatCombinationLimit() noexcept { return 100; }
  virtual const char *getMetadataString() noexcept { return nullptr; }
};

class IPluginV3OneRuntime : public IPluginCapability {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_RUNTIME", 1, 0}; }
  virtual int32_t setTactic(int32_t) noexcept { return 0; }
  virtual int32_t onShapeChange(const PluginTensorDesc *, int32_t, const PluginTensorDesc *, int32_t) noexcept = 0;
  virtual int32_t enqueue(const PluginTensorDesc *, const PluginTensorDesc *, const void *const *, void *const *, void *,
                          Stream) noexcept = 0;
  virtual IPluginV3 *attachToContext(IPluginResourceContext *) noexcept = 0;
  virtual const PluginFieldCollection *getFieldsToSerialize() noexcept = 0;
};

class IPluginCreatorInterface : public IVersionedInterface {};

class IPluginCreatorV3One : public IPluginCreatorInterface {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN CREATOR_V3ONE", 1, 0}; }
  virtual IPluginV3 *createPlugin(const char *, const PluginFieldCollection *, TensorRTPhase) noexcept = 0;
  virtual const PluginFieldCollection *getFieldNames() noexcept = 0;
  virtual const char *getPluginName() const noexcept = 0;
  virtual const char *getPluginVersion() const noexcept = 0;
  virtual const char *getPluginNamespace() const noexcept = 0;
};

}  // namespace v_1_0

}  // namespace nvinfer1

#endif
