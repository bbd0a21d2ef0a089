// topw::MatMulNBits for onnxruntime's CPU provider (docs/contract/graph.md, section 8).

#include <stdlib.h>

#include <new>

#include "ort_operator.h"
#include "ort_shape.h"
#include "product.h"

namespace topw {
namespace {

using ort::Api;
using ort::Status;

enum Input { kActivations, kCodes, kScales, kZeroPoints, kGroups, kBias, kOffsets, kInputs };
constexpr int64_t kInt8Activations = 4;  // the accuracy level
constexpr int64_t kTasks = 64;           // at most, for the session's threads
constexpr int64_t kSmallTask = 1 << 17;  // products of a code with a row: fewer take less time than waking a thread
constexpr size_t kAlignment = 64;

struct Kernel {
  Api api;
  Matrix matrix;  // without addresses
  bool has[kInputs];
};

struct Call {
  const Product &product;
  Matrix matrix;
  Rounded rounded;
  const float *x;
  float *y;
  int64_t tasks;
};

int64_t part(int64_t count, size_t task, int64_t tasks) { return count * static_cast<int64_t>(task) / tasks; }

void round_rows(void *data, size_t task) {
  const Call &call = *static_cast<const Call *>(data);
  const int64_t rows = call.rounded.rows, tasks = call.tasks < rows ? call.tasks : rows;
  for (int64_t row = part(rows, task, tasks); row < part(rows, task + 1, tasks); ++row)
    call.product.round_row(call.matrix, call.x + row * call.matrix.inputs, call.rounded, row);
}

void multiply(void *data, size_t task) {
  const Call &call = *static_cast<const Call *>(data);
  const int64_t tiles = call.matrix.tiles();
  call.product.multiply(call.matrix, call.rounded, part(tiles, task, call.tasks), part(tiles, task + 1, call.tasks),
                        call.y);
}

Status *run(const Api &api, ort::KernelContext *context, Call &call) {
  const int64_t rows = call.rounded.rows, tiles = call.matrix.tiles(), row_size = call.matrix.inputs;
  call.tasks = rows * row_size * call.matrix.outputs / kSmallTask;
  call.tasks = call.tasks < 1 ? 1 : call.tasks > kTasks ? kTasks : call.tasks;
  if (rows * row_size < kSmallTask) {
    for (int64_t row = 0; row < rows; ++row)
      call.product.round_row(call.matrix, call.x + row * row_size, call.rounded, row);
  } else {
    const size_t tasks = static_cast<size_t>(call.tasks < rows ? call.tasks : rows);
    TOPW_TRY(api[ort::parallel_for](context, round_rows, tasks, 0, &call));
  }
  if (call.tasks > tiles) call.tasks = tiles;
  if (call.tasks > 1) return api[ort::parallel_for](context, multiply, static_cast<size_t>(call.tasks), 0, &call);
  multiply(&call, 0);
  return nullptr;
}

// The activations' dimensions, the last of which must be the matrix's inputs.
Status *read_dimensions(const Api &api, const ort::KernelContext *context, int64_t inputs, int64_t *sizes,
                        size_t *rank) {
  TOPW_TRY(read_sizes(api, context, kActivations, sizes, rank));
  if (*rank >= 1 && *rank <= kMostDimensions && sizes[*rank - 1] == inputs) return nullptr;
  return refuse(api, ort::kInvalidArgument, "MatMulNBits needs 1 to %zu dimensions of activations, the last of %lld",
                kMostDimensions, static_cast<long long>(inputs));
}

Status *compute(void *kernel_data, ort::KernelContext *context) {
  const Kernel &kernel = *static_cast<const Kernel *>(kernel_data);
  const Api &api = kernel.api;
  Call call{product(), kernel.matrix, {}, nullptr, nullptr, 0};
  Matrix &matrix = call.matrix;
  int64_t sizes[kMostDimensions];
  size_t rank = 0;
  TOPW_TRY(read_dimensions(api, context, matrix.inputs, sizes, &rank));
  TOPW_TRY(address(api, context, true, kActivations, &call.x));
  TOPW_TRY(address(api, context, true, kCodes, &matrix.codes));
  TOPW_TRY(address(api, context, true, kScales, &matrix.scales));
  TOPW_TRY(address(api, context, kernel.has[kZeroPoints], kZeroPoints, &matrix.zero_points));
  TOPW_TRY(address(api, context, kernel.has[kBias], kBias, &matrix.bias));
  TOPW_TRY(address(api, context, kernel.has[kOffsets], kOffsets, &matrix.offsets));
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < rank; ++i) rows *= sizes[i];
  sizes[rank - 1] = matrix.outputs;
  ort::Value *output = nullptr;
  void *y = nullptr;
  TOPW_TRY(api[ort::get_output](context, 0, sizes, rank, &output));
  TOPW_TRY(api[ort::tensor_data](output, &y));
  if (rows == 0) return nullptr;
  call.y = static_cast<float *>(y);
  const size_t size = (rounded_size(matrix, rows) + kAlignment - 1) / kAlignment * kAlignment;
  void *memory = aligned_alloc(kAlignment, size);
  if (!memory) return refuse(api, ort::kFail, "out of memory");
  call.rounded = place_rounded(matrix, rows, memory);
  Status *failed = run(api, context, call);
  free(memory);
  return failed;
}

// The number of elements of an input with a fixed shape; -1 if the input does not exist, 0 for another type or shape.
Status *count_elements(const Api &api, const ort::KernelInfo *info, size_t index, int type, int64_t *count) {
  *count = -1;
  size_t inputs = 0, rank = 0;
  TOPW_TRY(api[ort::input_count](info, &inputs));
  if (index >= inputs) return nullptr;
  ort::TypeInfo *whole = nullptr;
  if (Status *absent = api[ort::input_type](info, index, &whole)) {  // an input with an empty name has no type
    api[ort::release_status](absent);
    return nullptr;
  }
  const ort::TensorInfo *tensor = nullptr;
  int found = ort::kAny;
  int64_t sizes[kMostDimensions];
  Status *failed = api[ort::as_tensor_info](whole, &tensor);
  if (!failed && tensor) failed = api[ort::element_type](tensor, &found);
  if (!failed && tensor) failed = api[ort::dimension_count](tensor, &rank);
  if (!failed && tensor && found != ort::kAny) {
    *count = found == type && rank <= kMostDimensions;
    if (*count) failed = api[ort::dimensions](tensor, sizes, rank);
    for (size_t i = 0; !failed && *count > 0 && i < rank; ++i) *count = sizes[i] > 0 ? *count * sizes[i] : 0;
  }
  api[ort::release_type_info](whole);
  return failed;
}

Status *read_matrix(const Api &api, const ort::KernelInfo *info, Kernel *kernel) {
  Matrix &matrix = kernel->matrix;
  int64_t bits = 0, level = 0;
  TOPW_TRY(api[ort::int_attribute](info, "accuracy_level", &level));
  if (level != kInt8Activations)
    return refuse(api, ort::kInvalidArgument, "MatMulNBits has the accuracy level %lld, but must have %lld",
                  static_cast<long long>(level), static_cast<long long>(kInt8Activations));
  TOPW_TRY(api[ort::int_attribute](info, "N", &matrix.outputs));
  TOPW_TRY(api[ort::int_attribute](info, "K", &matrix.inputs));
  TOPW_TRY(api[ort::int_attribute](info, "bits", &bits));
  TOPW_TRY(api[ort::int_attribute](info, "block_size", &matrix.block_size));
  const int64_t size = matrix.block_size, most = int64_t{1} << 31;
  if ((bits != 4 && bits != 8) || size < kSmallestBlock || size > kLargestBlock || (size & (size - 1)) ||
      matrix.outputs < 1 || matrix.inputs < 1 || matrix.outputs > most || matrix.inputs > most)
    return refuse(api, ort::kInvalidArgument, "MatMulNBits has %lld bits in blocks of %lld",
                  static_cast<long long>(bits), static_cast<long long>(size));
  matrix.bits = static_cast<int>(bits);
  const int64_t blocks = matrix.outputs * matrix.blocks();
  const int64_t counts[] = {0, blocks * matrix.block_bytes(), blocks, matrix.outputs * matrix.zero_bytes(), 0,
                            matrix.outputs, blocks};
  for (size_t index = kCodes; index < kInputs; ++index) {
    const bool is_bytes = index == kCodes || index == kZeroPoints;
    int64_t count = 0;
    TOPW_TRY(count_elements(api, info, index, is_bytes ? ort::kUint8 : ort::kFloat, &count));
    kernel->has[index] = count >= 0;
    if (count != counts[index] && (count >= 0 || index <= kScales))
      return refuse(api, ort::kInvalidArgument, "input %zu of MatMulNBits has another type or size", index);
  }
  return nullptr;
}

void destroy(void *data) { free(data); }

Status *make(const ort::Operator *, const ort::Function *table, const ort::KernelInfo *info, void **made) {
  const Api api(table);
  void *memory = malloc(sizeof(Kernel));
  if (!memory) return refuse(api, ort::kFail, "out of memory");
  Kernel *kernel = new (memory) Kernel{api, {}, {}};
  if (Status *failed = read_matrix(api, info, kernel)) {
    destroy(kernel);
    return failed;
  }
  *made = kernel;
  return nullptr;
}

ort::Operator make_product_operator(size_t inputs) {
  ort::Operator op = shared_operator();
  op.name = [](const ort::Operator *) { return are_operators_hidden() ? "MatMulNBitsHidden" : "MatMulNBits"; };
  if (inputs > kOffsets)
    op.name = [](const ort::Operator *) {
      return are_operators_hidden() ? "MatMulNBitsWithOffsetsHidden" : "MatMulNBitsWithOffsets";
    };
  op.provider = [](const ort::Operator *) { return "CPUExecutionProvider"; };
  op.input_count = [](const ort::Operator *) { return size_t{kOffsets}; };
  if (inputs > kOffsets) op.input_count = [](const ort::Operator *) { return size_t{kInputs}; };
  op.input_type = [](const ort::Operator *, size_t index) -> int {
    return index == kCodes || index == kZeroPoints ? ort::kUint8 : index == kGroups ? ort::kInt32 : ort::kFloat;
  };
  op.input_presence = [](const ort::Operator *, size_t index) -> int {
    return index <= kScales || index == kOffsets ? ort::kRequired : ort::kOptional;
  };
  op.output_count = [](const ort::Operator *) { return size_t{1}; };
  op.output_type = [](const ort::Operator *, size_t) -> int { return ort::kFloat; };
  op.output_presence = [](const ort::Operator *, size_t) -> int { return ort::kRequired; };
  op.make = make;
  op.compute = compute;
  op.destroy = destroy;
  return op;
}

}  // namespace

const ort::Operator product_operator = make_product_operator(kOffsets);
const ort::Operator offsets_product_operator = make_product_operator(kInputs);

}  // namespace topw
