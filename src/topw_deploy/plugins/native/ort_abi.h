// The part of onnxruntime's C interface that the operator uses, declared here to avoid vendor headers.
//
// The function table only grows at its end, and `version` fixes the size of an operator's struct, so table positions
// and struct offsets of version 17 (onnxruntime 1.17) hold in every later one; tests/plugins/test_ort_abi.py checks the
// installed runtime.
#ifndef TOPW_ORT_ABI_H
#define TOPW_ORT_ABI_H

#include <stddef.h>
#include <stdint.h>

namespace ort {

constexpr uint32_t kVersion = 17;

// Opaque types. A Status is an error; null is success.
struct Status;
struct SessionOptions;
struct Domain;
struct KernelInfo;
struct KernelContext;
struct Value;
struct TypeInfo;
struct TensorInfo;  // element type and dimensions
struct Operator;    // ours, below

using Function = void (*)();

struct ApiBase {
  const Function *(*get_api)(uint32_t version);  // null if the runtime is older than `version`
  const char *(*version_string)();
};
static_assert(sizeof(Function) == 8, "the interface is declared for 64-bit processors");
static_assert(sizeof(ApiBase) == 16, "two pointers");

// A function's table position and type.
template <typename Signature>
struct Slot {
  int position;
};

// Status codes.
constexpr int kFail = 1;
constexpr int kInvalidArgument = 2;

constexpr Slot<Status *(int code, const char *message)> create_status{0};
constexpr Slot<const char *(const Status *)> get_error_message{2};
constexpr Slot<Status *(const char *name, Domain **)> create_domain{26};
constexpr Slot<Status *(Domain *, const Operator *)> add_operator{27};  // keeps a reference to the operator
constexpr Slot<Status *(SessionOptions *, Domain *)> add_domain{28};
constexpr Slot<Status *(Value *, void **)> tensor_data{51};
constexpr Slot<Status *(const TypeInfo *, const TensorInfo **)> as_tensor_info{55};  // borrowed; null: not a tensor
constexpr Slot<Status *(const TensorInfo *, int *)> element_type{60};
constexpr Slot<Status *(const TensorInfo *, size_t *)> dimension_count{61};
constexpr Slot<Status *(const TensorInfo *, int64_t *, size_t)> dimensions{62};  // -1: unknown
constexpr Slot<Status *(const Value *, TensorInfo **)> tensor_info{65};
constexpr Slot<Status *(const KernelInfo *, const char *name, float *)> float_attribute{85};
constexpr Slot<Status *(const KernelInfo *, const char *name, int64_t *)> int_attribute{86};
// The size includes the final zero. A null buffer queries it.
constexpr Slot<Status *(const KernelInfo *, const char *name, char *, size_t *)> string_attribute{87};
constexpr Slot<Status *(const KernelContext *, size_t index, const Value **)> get_input{90};
constexpr Slot<Status *(KernelContext *, size_t index, const int64_t *shape, size_t rank, Value **)> get_output{91};
constexpr Slot<void(Status *)> release_status{93};
constexpr Slot<void(TypeInfo *)> release_type_info{98};
constexpr Slot<void(TensorInfo *)> release_tensor_info{99};
// A GPU provider's cudaStream_t; null on the CPU.
constexpr Slot<Status *(const KernelContext *, void **)> gpu_stream{193};
constexpr Slot<Status *(const KernelInfo *, size_t *)> input_count{230};
constexpr Slot<Status *(const KernelInfo *, size_t *)> output_count{231};
constexpr Slot<Status *(const KernelInfo *, size_t index, TypeInfo **)> input_type{234};
constexpr Slot<Status *(const KernelInfo *, size_t index, TypeInfo **)> output_type{235};
constexpr Slot<Status *(SessionOptions *, const char *key, const char *value)> add_config_entry{130};
constexpr Slot<Status *(const SessionOptions *, const char *key, int *)> has_config_entry{237};
// Runs function(data, i) for i < total on the session's threads, at most `batches` at a time (0: all).
constexpr Slot<Status *(const KernelContext *, void (*function)(void *, size_t), size_t total, size_t batches,
                        void *data)>
    parallel_for{274};

class Api {
 public:
  explicit Api(const Function *table = nullptr) : table_(table) {}
  template <typename Signature>
  Signature *operator[](Slot<Signature> slot) const {
    return reinterpret_cast<Signature *>(table_[slot.position]);
  }
  explicit operator bool() const { return table_ != nullptr; }
  bool operator==(const Api &other) const { return table_ == other.table_; }

 private:
  const Function *table_;
};

// ONNX element types.
enum Element { kAny = 0, kFloat = 1, kUint8 = 2, kInt32 = 6, kInt64 = 7, kBool = 9, kFloat16 = 10, kBfloat16 = 16 };
enum Presence { kRequired = 0, kOptional = 1, kVariadic = 2 };

// An operator as the runtime reads it. Later members replace make_v1 and compute_v1.
struct Operator {
  uint32_t version = kVersion;
  void *(*make_v1)(const Operator *, const Function *, const KernelInfo *) = nullptr;
  const char *(*name)(const Operator *) = nullptr;
  const char *(*provider)(const Operator *) = nullptr;
  int (*input_type)(const Operator *, size_t) = nullptr;
  size_t (*input_count)(const Operator *) = nullptr;
  int (*output_type)(const Operator *, size_t) = nullptr;
  size_t (*output_count)(const Operator *) = nullptr;
  void (*compute_v1)(void *, KernelContext *) = nullptr;
  void (*destroy)(void *) = nullptr;
  int (*input_presence)(const Operator *, size_t) = nullptr;
  int (*output_presence)(const Operator *, size_t) = nullptr;
  int (*input_memory)(const Operator *, size_t) = nullptr;  // 0: the provider's memory
  int (*least_variadic_inputs)(const Operator *) = nullptr;
  int (*variadic_inputs_alike)(const Operator *) = nullptr;
  int (*least_variadic_outputs)(const Operator *) = nullptr;
  int (*variadic_outputs_alike)(const Operator *) = nullptr;
  Status *(*make)(const Operator *, const Function *, const KernelInfo *, void **) = nullptr;
  Status *(*compute)(void *, KernelContext *) = nullptr;
  Status *(*infer_shapes)(const Operator *, void *) = nullptr;
  int (*first_version)(const Operator *) = nullptr;
  int (*last_version)(const Operator *) = nullptr;
};
static_assert(offsetof(Operator, name) == 16 && offsetof(Operator, destroy) == 72, "version 1's part");
static_assert(offsetof(Operator, input_memory) == 96 && offsetof(Operator, variadic_outputs_alike) == 128,
              "version 14's part");
static_assert(offsetof(Operator, make) == 136 && offsetof(Operator, compute) == 144, "version 16's part");
static_assert(offsetof(Operator, infer_shapes) == 152 && sizeof(Operator) == 176, "version 17's part");

}  // namespace ort

#endif
