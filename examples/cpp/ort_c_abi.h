// The part of onnxruntime's C interface that topw_host.cpp uses: from the vendor's header if TOPW_VENDOR_HEADER is
// defined, else declared here, so only the shared library is needed.
//
// onnxruntime's table of function pointers only grows at its end. The positions below are of version 17 and valid in
// every later one; the assertions at the end also check them against the vendor's header.
#ifndef TOPW_ORT_C_ABI_H
#define TOPW_ORT_C_ABI_H

#include <stddef.h>
#include <stdint.h>

#ifdef TOPW_VENDOR_HEADER
#include <onnxruntime_c_api.h>
#else

// Opaque types. A status is an error; null is success.
struct OrtStatus;
struct OrtEnv;
struct OrtSession;
struct OrtSessionOptions;
struct OrtRunOptions;
struct OrtIoBinding;
struct OrtValue;
struct OrtTypeInfo;
struct OrtTensorTypeAndShapeInfo;
struct OrtMemoryInfo;
struct OrtAllocator;
struct OrtCUDAProviderOptionsV2;

// ONNX's numbers.
enum ONNXTensorElementDataType {
  ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED = 0,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT = 1,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8 = 2,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8 = 3,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 = 6,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 = 7,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL = 9,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 = 10,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16 = 16,
};
enum OrtLoggingLevel { ORT_LOGGING_LEVEL_FATAL = 4 };
enum OrtAllocatorType { OrtDeviceAllocator = 0 };
enum OrtMemType { OrtMemTypeDefault = 0 };

struct OrtApi {
  void *to_2[2];
  const char *(*GetErrorMessage)(const OrtStatus *);
  OrtStatus *(*CreateEnv)(OrtLoggingLevel, const char *name, OrtEnv **);
  void *to_7[3];
  OrtStatus *(*CreateSession)(const OrtEnv *, const char *path, const OrtSessionOptions *, OrtSession **);
  void *to_10[2];
  OrtStatus *(*CreateSessionOptions)(OrtSessionOptions **);
  void *to_24[13];
  OrtStatus *(*SetIntraOpNumThreads)(OrtSessionOptions *, int);
  void *to_30[5];
  OrtStatus *(*SessionGetInputCount)(const OrtSession *, size_t *);
  OrtStatus *(*SessionGetOutputCount)(const OrtSession *, size_t *);
  OrtStatus *(*SessionGetOverridableInitializerCount)(const OrtSession *, size_t *);
  OrtStatus *(*SessionGetInputTypeInfo)(const OrtSession *, size_t, OrtTypeInfo **);
  OrtStatus *(*SessionGetOutputTypeInfo)(const OrtSession *, size_t, OrtTypeInfo **);
  OrtStatus *(*SessionGetOverridableInitializerTypeInfo)(const OrtSession *, size_t, OrtTypeInfo **);
  OrtStatus *(*SessionGetInputName)(const OrtSession *, size_t, OrtAllocator *, char **);
  OrtStatus *(*SessionGetOutputName)(const OrtSession *, size_t, OrtAllocator *, char **);
  OrtStatus *(*SessionGetOverridableInitializerName)(const OrtSession *, size_t, OrtAllocator *, char **);
  void *to_48[9];
  OrtStatus *(*CreateTensorAsOrtValue)(OrtAllocator *, const int64_t *shape, size_t rank, ONNXTensorElementDataType,
                                       OrtValue **);
  OrtStatus *(*CreateTensorWithDataAsOrtValue)(const OrtMemoryInfo *, void *data, size_t bytes, const int64_t *shape,
                                               size_t rank, ONNXTensorElementDataType, OrtValue **);
  void *to_51[1];
  OrtStatus *(*GetTensorMutableData)(OrtValue *, void **);
  void *to_55[3];
  OrtStatus *(*CastTypeInfoToTensorInfo)(const OrtTypeInfo *, const OrtTensorTypeAndShapeInfo **);  // borrowed
  void *to_60[4];
  OrtStatus *(*GetTensorElementType)(const OrtTensorTypeAndShapeInfo *, ONNXTensorElementDataType *);
  void *to_68[7];
  OrtStatus *(*CreateMemoryInfo)(const char *name, OrtAllocatorType, int device, OrtMemType, OrtMemoryInfo **);
  OrtStatus *(*CreateCpuMemoryInfo)(OrtAllocatorType, OrtMemType, OrtMemoryInfo **);
  void *to_76[6];
  OrtStatus *(*AllocatorFree)(OrtAllocator *, void *);
  void *to_78[1];
  OrtStatus *(*GetAllocatorWithDefaultOptions)(OrtAllocator **);  // borrowed
  void *to_92[13];
  void (*ReleaseEnv)(OrtEnv *);
  void (*ReleaseStatus)(OrtStatus *);
  void (*ReleaseMemoryInfo)(OrtMemoryInfo *);
  void (*ReleaseSession)(OrtSession *);
  void (*ReleaseValue)(OrtValue *);
  void *to_98[1];
  void (*ReleaseTypeInfo)(OrtTypeInfo *);
  void *to_100[1];
  void (*ReleaseSessionOptions)(OrtSessionOptions *);
  void *to_130[29];
  OrtStatus *(*AddSessionConfigEntry)(OrtSessionOptions *, const char *key, const char *value);
  OrtStatus *(*CreateAllocator)(const OrtSession *, const OrtMemoryInfo *, OrtAllocator **);
  void (*ReleaseAllocator)(OrtAllocator *);
  OrtStatus *(*RunWithBinding)(OrtSession *, const OrtRunOptions *, const OrtIoBinding *);
  OrtStatus *(*CreateIoBinding)(OrtSession *, OrtIoBinding **);
  void (*ReleaseIoBinding)(OrtIoBinding *);
  OrtStatus *(*BindInput)(OrtIoBinding *, const char *name, const OrtValue *);
  OrtStatus *(*BindOutput)(OrtIoBinding *, const char *name, const OrtValue *);
  OrtStatus *(*BindOutputToDevice)(OrtIoBinding *, const char *name, const OrtMemoryInfo *);
  void *to_140[1];
  OrtStatus *(*GetBoundOutputValues)(const OrtIoBinding *, OrtAllocator *, OrtValue ***, size_t *count);
  void *to_204[63];
  OrtStatus *(*SessionOptionsAppendExecutionProvider_CUDA_V2)(OrtSessionOptions *, const OrtCUDAProviderOptionsV2 *);
  OrtStatus *(*CreateCUDAProviderOptions)(OrtCUDAProviderOptionsV2 **);
  void *to_208[2];
  void (*ReleaseCUDAProviderOptions)(OrtCUDAProviderOptionsV2 *);
  void *to_228[19];
  OrtStatus *(*RegisterCustomOpsLibrary_V2)(OrtSessionOptions *, const char *path);
};

struct OrtApiBase {
  const OrtApi *(*GetApi)(uint32_t version);  // null if the library is older than `version`
  const char *(*GetVersionString)();
};

#endif  // TOPW_VENDOR_HEADER

constexpr uint32_t kOrtVersion = 17;

#define TOPW_AT(position, function) static_assert(offsetof(OrtApi, function) == (position) * sizeof(void *), #function)
TOPW_AT(2, GetErrorMessage);
TOPW_AT(3, CreateEnv);
TOPW_AT(7, CreateSession);
TOPW_AT(10, CreateSessionOptions);
TOPW_AT(24, SetIntraOpNumThreads);
TOPW_AT(30, SessionGetInputCount);
TOPW_AT(31, SessionGetOutputCount);
TOPW_AT(32, SessionGetOverridableInitializerCount);
TOPW_AT(33, SessionGetInputTypeInfo);
TOPW_AT(34, SessionGetOutputTypeInfo);
TOPW_AT(35, SessionGetOverridableInitializerTypeInfo);
TOPW_AT(36, SessionGetInputName);
TOPW_AT(37, SessionGetOutputName);
TOPW_AT(38, SessionGetOverridableInitializerName);
TOPW_AT(48, CreateTensorAsOrtValue);
TOPW_AT(49, CreateTensorWithDataAsOrtValue);
TOPW_AT(51, GetTensorMutableData);
TOPW_AT(55, CastTypeInfoToTensorInfo);
TOPW_AT(60, GetTensorElementType);
TOPW_AT(68, CreateMemoryInfo);
TOPW_AT(69, CreateCpuMemoryInfo);
TOPW_AT(76, AllocatorFree);
TOPW_AT(78, GetAllocatorWithDefaultOptions);
TOPW_AT(92, ReleaseEnv);
TOPW_AT(93, ReleaseStatus);
TOPW_AT(94, ReleaseMemoryInfo);
TOPW_AT(95, ReleaseSession);
TOPW_AT(96, ReleaseValue);
TOPW_AT(98, ReleaseTypeInfo);
TOPW_AT(100, ReleaseSessionOptions);
TOPW_AT(130, AddSessionConfigEntry);
TOPW_AT(131, CreateAllocator);
TOPW_AT(132, ReleaseAllocator);
TOPW_AT(133, RunWithBinding);
TOPW_AT(134, CreateIoBinding);
TOPW_AT(135, ReleaseIoBinding);
TOPW_AT(136, BindInput);
TOPW_AT(137, BindOutput);
TOPW_AT(138, BindOutputToDevice);
TOPW_AT(140, GetBoundOutputValues);
TOPW_AT(204, SessionOptionsAppendExecutionProvider_CUDA_V2);
TOPW_AT(205, CreateCUDAProviderOptions);
TOPW_AT(208, ReleaseCUDAProviderOptions);
TOPW_AT(228, RegisterCustomOpsLibrary_V2);
#undef TOPW_AT

#endif
