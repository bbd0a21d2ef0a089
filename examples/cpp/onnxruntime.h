// onnxruntime, loaded at startup: the session and its bindings.
#ifndef TOPW_ONNXRUNTIME_H
#define TOPW_ONNXRUNTIME_H

#include <dlfcn.h>

#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "common.h"
#include "folder.h"
#include "ort_c_abi.h"

namespace topw {

inline const OrtApi *ort = nullptr;
inline std::string ort_name = "onnxruntime";  // and its version

#ifndef TOPW_ONNXRUNTIME
#define TOPW_ONNXRUNTIME "libonnxruntime.so"
#endif

inline void open_onnxruntime(const std::string &path) {
  setenv("ORT_DISABLE_TELEMETRY", "1", 0);  // official builds send telemetry and leave a file
  void *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  using GetBase = const OrtApiBase *();
  const auto base = library ? reinterpret_cast<GetBase *>(dlsym(library, "OrtGetApiBase")) : nullptr;
  if (!base) throw Failure("onnxruntime cannot be opened (" + std::string(dlerror()) + "); see --onnxruntime.");
  ort_name += std::string(" ") + base()->GetVersionString();
  ort = base()->GetApi(kOrtVersion);
  if (!ort) throw Failure(path + " is " + ort_name + ", which is older than 1.17; give a newer one.");
}

[[noreturn]] inline void fail(OrtStatus *status, const std::string &what) {
  std::istringstream words(ort->GetErrorMessage(status));
  ort->ReleaseStatus(status);
  std::string message, word;
  while (words >> word && message.size() < 300) message += (message.empty() ? "" : " ") + word;
  throw Failure(what + " (" + message + ").");
}
inline void check(OrtStatus *status) {
  if (status) fail(status, ort_name + " failed");
}

template <typename T>
using Owned = std::unique_ptr<T, void (*)(T *)>;

// The result that an onnxruntime function writes to its last argument.
template <typename T, typename Function, typename... Arguments>
Owned<T> make(void (*release)(T *), Function function, Arguments... arguments) {
  T *made = nullptr;
  check(function(arguments..., &made));
  return {made, release};
}

using Shape = std::vector<std::int64_t>;
using Value = Owned<OrtValue>;

// Adds the CUDA provider; returns the cache's memory.
inline Owned<OrtMemoryInfo> choose_cuda(OrtSessionOptions *options) {
  const std::string without =
      ort_name + " does not start CUDA; give one that does with --onnxruntime, or --provider cpu";
  OrtCUDAProviderOptionsV2 *raw = nullptr;
  if (OrtStatus *status = ort->CreateCUDAProviderOptions(&raw)) fail(status, without);
  const Owned<OrtCUDAProviderOptionsV2> cuda_options(raw, ort->ReleaseCUDAProviderOptions);
  if (OrtStatus *status = ort->SessionOptionsAppendExecutionProvider_CUDA_V2(options, cuda_options.get()))
    fail(status, without);
  // Some versions abort in this optimiser on half-precision rotary embeddings (onnxruntime issue 28604).
  check(ort->AddSessionConfigEntry(options, "optimization.disable_specified_optimizers", "GroupQueryAttentionFusion"));
  return make<OrtMemoryInfo>(ort->ReleaseMemoryInfo, ort->CreateMemoryInfo, "Cuda", OrtDeviceAllocator, 0,
                             OrtMemTypeDefault);
}

// `device`: the memory of the cache; `host`: the program's own memory.
struct Session {
  Session(const Folder &folder, bool cuda, int threads, const std::string &native_library) : on_device(cuda) {
    const auto options = make<OrtSessionOptions>(ort->ReleaseSessionOptions, ort->CreateSessionOptions);
    if (threads >= 0) check(ort->SetIntraOpNumThreads(options.get(), threads));
    if (!native_library.empty()) {
      const std::string path = fs::absolute(native_library).string();
      if (OrtStatus *status = ort->RegisterCustomOpsLibrary_V2(options.get(), path.c_str()))
        fail(status, path + " does not load");
    }
    if (on_device) device = choose_cuda(options.get());
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
  Owned<OrtAllocator> allocator{nullptr, ort->ReleaseAllocator};  // of `device`; must outlive its allocations
};

inline OrtAllocator *host_allocator() {
  OrtAllocator *borrowed = nullptr;
  check(ort->GetAllocatorWithDefaultOptions(&borrowed));
  return borrowed;
}

// Adds the names and element types of the graph's inputs or outputs to `found`; the functions list them.
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

// Requires manifest and graph to have the same tensors and types.
inline void check_graph(const Folder &folder, const OrtSession *graph) {
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

// Bound inputs and outputs. The program's memory is bound by address: it must not move, and each run reads its current
// contents. A provider with its own memory copies at binding, so changed inputs are bound again.
class Binding {
 public:
  explicit Binding(const Session &session)
      : session_(session), io_(make<OrtIoBinding>(ort->ReleaseIoBinding, ort->CreateIoBinding, session.graph.get())) {}

  void input(const std::string &name, const OrtValue *value) { check(ort->BindInput(io_.get(), name.c_str(), value)); }
  void output(const std::string &name, const OrtValue *value) {
    check(ort->BindOutput(io_.get(), name.c_str(), value));
  }
  void fresh_output(const std::string &name) {  // allocated by each run
    check(ort->BindOutputToDevice(io_.get(), name.c_str(), session_.device.get()));
  }
  template <typename T>
  void host_input(const std::string &name, T *data, const Shape &shape) {
    input(name, over(data, shape).get());
  }
  template <typename T>
  void changing_input(const std::string &name, T *data, const Shape &shape) {
    input(name, changing_.insert_or_assign(name, over(data, shape)).first->second.get());
  }
  template <typename T>
  void host_output(const std::string &name, T *data, const Shape &shape) {
    output(name, over(data, shape).get());
  }

  void run() {
    if (session_.on_device)
      for (const auto &[name, value] : changing_) input(name, value.get());
    check(ort->RunWithBinding(session_.graph.get(), nullptr, io_.get()));
  }

  // The last run's outputs, in the order of their first binding.
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

}  // namespace topw

#endif
