// topw::TopWSample for onnxruntime's CPU provider: the node of docs/graph.md, section 8, answered by topw_sample_row.
//
// A model that carries the node also carries a function of standard operators for it. Where this operator is registered
// the runtime prefers it; where it refuses a node, the session does not open, and its caller opens it without.

#include <atomic>
#include <new>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ort_abi.h"
#include "quantised.h"
#include "topw.h"

#define TRY(call)                                       \
  do {                                                  \
    if (ort::Status *topw_failed = (call)) return topw_failed; \
  } while (0)

namespace {

using ort::Api;
using ort::Status;

enum Input {
  kLogits, kEditIds, kEditPenalty, kEditBias, kTemperature, kSelectionTemperature, kLam, kBeta, kInitTopP, kGeomScale,
  kUniform, kMean, kInverseStd, kNeighbourBound, kTable, kScales, kZeroPoints
};  // fmt: skip
constexpr size_t kWithoutTable = kMean, kWithTable = kTable + 1;
enum Output { kNextToken, kLogprob, kKept, kCertified, kFirstOnRequest };
constexpr size_t kMostOutputs = kFirstOnRequest + 2;
constexpr int kNowhere = -1;

thread_local bool hidden = false;
thread_local int64_t kernels_made = 0;

template <typename... Values>
Status *refuse(const Api &api, int code, const char *format, Values... values) {
  char message[256] = "TopWSample: ";
  const size_t start = strlen(message);
  snprintf(message + start, sizeof message - start, format, values...);
  return api[ort::create_status](code, message);
}

// ---- shapes

struct Shape {
  int type = ort::kAny;
  size_t rank = 0;
  int64_t size[2] = {-1, -1};  // of the first two dimensions
};

Status *read_shape(const Api &api, const ort::TensorInfo *info, Shape *shape) {
  TRY(api[ort::element_type](info, &shape->type));
  TRY(api[ort::dimension_count](info, &shape->rank));
  if (shape->rank == 1 || shape->rank == 2) TRY(api[ort::dimensions](info, shape->size, shape->rank));
  return nullptr;
}

// What the graph says about an input (or output) of the node; sizes that it leaves open are -1, an unknown rank is 0.
Status *declared(const Api &api, const ort::KernelInfo *node, bool is_input, size_t index, Shape *shape) {
  ort::TypeInfo *type = nullptr;
  TRY(api[is_input ? ort::input_type : ort::output_type](node, index, &type));
  const ort::TensorInfo *info = nullptr;
  Status *failed = api[ort::as_tensor_info](type, &info);
  if (!failed && info) failed = read_shape(api, info, shape);
  api[ort::release_type_info](type);
  return failed;
}

struct Tensor {
  Shape shape;
  const void *data = nullptr;
};

Status *input_data(const Api &api, const ort::KernelContext *context, size_t index, const void **data) {
  const ort::Value *value = nullptr;
  TRY(api[ort::get_input](context, index, &value));
  void *found = nullptr;
  TRY(api[ort::tensor_data](const_cast<ort::Value *>(value), &found));
  *data = found;
  return nullptr;
}

Status *input_tensor(const Api &api, const ort::KernelContext *context, size_t index, Tensor *tensor) {
  const ort::Value *value = nullptr;
  TRY(api[ort::get_input](context, index, &value));
  ort::TensorInfo *info = nullptr;
  TRY(api[ort::tensor_info](value, &info));
  Status *failed = read_shape(api, info, &tensor->shape);
  api[ort::release_tensor_info](info);
  TRY(failed);
  void *found = nullptr;
  TRY(api[ort::tensor_data](const_cast<ort::Value *>(value), &found));
  tensor->data = found;
  return nullptr;
}

// ---- scratch memory

// Workspaces that no row is using: one is made when all are in use, so there are as many as threads ever met here.
class Workspaces {
 public:
  struct Entry {
    topw_workspace *workspace;
    Entry *next;
  };

  ~Workspaces() {
    while (Entry *entry = free_) {
      free_ = entry->next;
      topw_workspace_destroy(entry->workspace);
      free(entry);
    }
  }

  Entry *take() {
    lock();
    Entry *entry = free_;
    if (entry) free_ = entry->next;
    unlock();
    if (entry) return entry;
    topw_workspace *workspace = topw_workspace_create();
    if (!workspace) return nullptr;
    entry = static_cast<Entry *>(malloc(sizeof(Entry)));
    if (!entry) {
      topw_workspace_destroy(workspace);
      return nullptr;
    }
    *entry = {workspace, nullptr};
    return entry;
  }

  void give_back(Entry *entry) {
    lock();
    entry->next = free_;
    free_ = entry;
    unlock();
  }

 private:
  void lock() {  // held for two assignments
    while (busy_.test_and_set(std::memory_order_acquire)) {
    }
  }
  void unlock() { busy_.clear(std::memory_order_release); }

  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
  Entry *free_ = nullptr;
};

// ---- the kernel

struct Kernel {
  Api api;
  topw_options options{};
  topw_table table{};  // sizes and type; the addresses come with each call
  int64_t bounds = 0;  // how many neighbour bounds there are: one per token or none
  bool has_zero_points = false;
  int mass_at = kNowhere, keep_mask_at = kNowhere;
  Workspaces workspaces;

  bool has_table() const { return options.metric != TOPW_UNIFORM; }
};

constexpr struct {
  const char *name;
  int32_t metric;
} kMetrics[] = {{"mahalanobis", TOPW_MAHALANOBIS}, {"unit", TOPW_UNIT}, {"cosine", TOPW_COSINE},
                {"uniform", TOPW_UNIFORM}};  // fmt: skip

bool fits_metric(int32_t metric, const char *form, topw_blocks *blocks) {
  return metric == TOPW_UNIFORM ? form[0] == '\0' : topw::read_table_form(form, blocks);
}

Status *read_string(const Api &api, const ort::KernelInfo *node, const char *name, char *text, size_t room) {
  size_t size = 0;
  TRY(api[ort::string_attribute](node, name, nullptr, &size));
  if (size > room) return refuse(api, ort::kInvalidArgument, "the attribute %s is too long", name);
  size = room;
  return api[ort::string_attribute](node, name, text, &size);
}

Status *read_options(const Api &api, const ort::KernelInfo *node, topw_options *options, topw_blocks *blocks) {
  int64_t neighbours = 0;
  TRY(api[ort::int_attribute](node, "top_m", &options->top_m));
  TRY(api[ort::int_attribute](node, "alt_iters", &options->alt_iters));
  TRY(api[ort::int_attribute](node, "knn_k", &neighbours));
  if (options->top_m < 1 || options->alt_iters < 1 || neighbours < 0 || neighbours > INT32_MAX)
    return refuse(api, ort::kInvalidArgument, "top_m, alt_iters or knn_k is out of range");
  options->knn_k = static_cast<int32_t>(neighbours);
  char text[128] = "";
  TRY(read_string(api, node, "metric", text, sizeof text));
  options->metric = kNowhere;
  for (const auto &known : kMetrics)
    if (strcmp(text, known.name) == 0) options->metric = known.metric;
  if (options->metric == kNowhere) return refuse(api, ort::kInvalidArgument, "the metric %s is not known", text);
  TRY(read_string(api, node, "table_form", text, sizeof text));
  if (!fits_metric(options->metric, text, blocks))
    return refuse(api, ort::kInvalidArgument, "the table form '%s' is not known", text);
  return nullptr;
}

constexpr int kInputTypes[] = {ort::kFloat, ort::kInt64, ort::kFloat, ort::kFloat, ort::kFloat, ort::kFloat,
                               ort::kFloat, ort::kFloat, ort::kFloat, ort::kFloat, ort::kFloat};  // fmt: skip
static_assert(sizeof kInputTypes / sizeof kInputTypes[0] == kWithoutTable, "one for each input of every node");

size_t input_rank(size_t index) { return index <= kEditBias ? 2 : 1; }

Status *check_inputs(const Api &api, const ort::KernelInfo *node, Kernel *kernel, int64_t *vocab) {
  size_t count = 0;
  TRY(api[ort::input_count](node, &count));
  const bool quantised = kernel->table.blocks.bits != 0;
  kernel->has_zero_points = quantised && count == kZeroPoints + 1;
  const size_t with_table = quantised ? kZeroPoints + kernel->has_zero_points : kWithTable;
  if (count != (kernel->has_table() ? with_table : kWithoutTable))
    return refuse(api, ort::kInvalidArgument, "the node has %zu inputs", count);
  for (size_t index = 0; index < kWithoutTable; ++index) {
    Shape shape;
    TRY(declared(api, node, true, index, &shape));
    if (shape.type != kInputTypes[index] || (shape.rank != 0 && shape.rank != input_rank(index)))
      return refuse(api, ort::kInvalidArgument, "input %zu has the element type %d and %zu dimensions", index,
                    shape.type, shape.rank);
    if (index == kLogits) *vocab = shape.size[1];
  }
  return nullptr;
}

// Scales and zero points beside a quantised table, whose own sizes are in `table` already.
Status *read_blocks(const Api &api, const ort::KernelInfo *node, bool has_zero_points, topw_table *table) {
  Shape scales, zeros;
  TRY(declared(api, node, true, kScales, &scales));
  if (has_zero_points) TRY(declared(api, node, true, kZeroPoints, &zeros));
  table->blocks.scale_type = scales.type;
  table->blocks.scales = table;  // there will be some: only that is asked of it here
  const bool rows = scales.rank == 2 && scales.size[0] == table->tokens && scales.size[1] == topw::blocks_in_row(*table);
  const bool fits = !has_zero_points || (zeros.type == table->dtype && zeros.rank == 2 &&
                                         zeros.size[0] == table->tokens &&
                                         zeros.size[1] == topw::zero_points_in_row(*table));
  if (!topw::quantised_readable(*table) || !rows || !fits)
    return refuse(api, ort::kInvalidArgument, "the table's codes, scales and zero points do not fit together");
  return nullptr;
}

// The table and what belongs to it lie in the model, so all their sizes are known here.
Status *read_table(const Api &api, const ort::KernelInfo *node, int64_t vocab, Kernel *kernel) {
  Shape mean, inverse_std, bound, rows;
  TRY(declared(api, node, true, kMean, &mean));
  TRY(declared(api, node, true, kInverseStd, &inverse_std));
  TRY(declared(api, node, true, kNeighbourBound, &bound));
  TRY(declared(api, node, true, kTable, &rows));
  const bool quantised = kernel->table.blocks.bits != 0;
  if (!quantised && rows.type != TOPW_FLOAT32 && rows.type != TOPW_FLOAT16 && rows.type != TOPW_BFLOAT16)
    return refuse(api, ort::kInvalidArgument, "the table's element type %d is not known", rows.type);
  const bool floats = mean.type == ort::kFloat && inverse_std.type == ort::kFloat && bound.type == ort::kFloat;
  const bool ranks = mean.rank == 1 && inverse_std.rank == 1 && bound.rank == 1 && rows.rank == 2;
  const int64_t hidden_size = rows.size[1] * topw::codes_per_element(rows.type, kernel->table.blocks);
  if (!floats || !ranks || rows.size[0] < 1 || hidden_size < 1 || mean.size[0] != hidden_size ||
      inverse_std.size[0] != hidden_size || bound.size[0] < 0)
    return refuse(api, ort::kInvalidArgument, "the table, its statistics or its bounds are not of the shapes expected");
  if (vocab > rows.size[0] || (bound.size[0] != 0 && vocab >= 0 && bound.size[0] != vocab))
    return refuse(api, ort::kInvalidArgument, "the table or the bounds do not fit %lld tokens",
                  static_cast<long long>(vocab));
  kernel->table.tokens = rows.size[0];
  kernel->table.hidden = hidden_size;
  kernel->table.dtype = rows.type;
  kernel->bounds = bound.size[0];
  return quantised ? read_blocks(api, node, kernel->has_zero_points, &kernel->table) : nullptr;
}

// Which of the two outputs on request are there: of one, its element type tells.
Status *read_outputs(const Api &api, const ort::KernelInfo *node, Kernel *kernel) {
  size_t count = 0;
  TRY(api[ort::output_count](node, &count));
  if (count < kFirstOnRequest || count > kMostOutputs)
    return refuse(api, ort::kInvalidArgument, "the node has %zu outputs", count);
  for (size_t index = kFirstOnRequest; index < count; ++index) {
    Shape shape;
    TRY(declared(api, node, false, index, &shape));
    int *place = shape.type == ort::kFloat  ? &kernel->mass_at
                 : shape.type == ort::kBool ? &kernel->keep_mask_at
                                            : nullptr;
    if (!place || *place != kNowhere || (place == &kernel->mass_at && index != kFirstOnRequest))
      return refuse(api, ort::kInvalidArgument, "output %zu has the element type %d", index, shape.type);
    *place = static_cast<int>(index);
  }
  return nullptr;
}

Status *prepare(const ort::KernelInfo *node, Kernel *kernel) {
  int64_t vocab = -1;
  TRY(read_options(kernel->api, node, &kernel->options, &kernel->table.blocks));
  TRY(check_inputs(kernel->api, node, kernel, &vocab));
  if (kernel->has_table()) TRY(read_table(kernel->api, node, vocab, kernel));
  return read_outputs(kernel->api, node, kernel);
}

// ---- one call

struct Call {
  Kernel *kernel;
  topw_inputs inputs;
  topw_table table;
  topw_outputs outputs;
  std::atomic<bool> out_of_memory;
};

Status *bind_inputs(Kernel &kernel, const ort::KernelContext *context, Call *call) {
  const Api &api = kernel.api;
  Tensor found[kWithoutTable];
  for (size_t index = 0; index < kWithoutTable; ++index) {
    Tensor &tensor = found[index];
    TRY(input_tensor(api, context, index, &tensor));
    const bool fits = tensor.shape.rank == input_rank(index) && tensor.shape.size[0] == found[kLogits].shape.size[0];
    const bool is_edit = index == kEditIds || index == kEditPenalty || index == kEditBias;
    if (!fits || tensor.shape.type != kInputTypes[index] ||
        (is_edit && tensor.shape.size[1] != found[kEditIds].shape.size[1]))
      return refuse(api, ort::kInvalidArgument, "input %zu does not have the shape or type of docs/graph.md", index);
  }
  topw_inputs &in = call->inputs;
  in.batch = found[kLogits].shape.size[0];
  in.vocab = found[kLogits].shape.size[1];
  in.edits = found[kEditIds].shape.size[1];
  in.logits = static_cast<const float *>(found[kLogits].data);
  in.edit_ids = static_cast<const int64_t *>(found[kEditIds].data);
  const float **columns[] = {&in.edit_penalty, &in.edit_bias, &in.temperature, &in.selection_temperature, &in.lam,
                             &in.beta, &in.init_top_p, &in.geom_scale, &in.uniform};  // fmt: skip
  for (size_t index = kEditPenalty; index < kWithoutTable; ++index)
    *columns[index - kEditPenalty] = static_cast<const float *>(found[index].data);
  if (in.vocab < 1) return refuse(api, ort::kInvalidArgument, "the logits have no columns");
  return nullptr;
}

Status *bind_table(Kernel &kernel, const ort::KernelContext *context, Call *call) {
  const Api &api = kernel.api;
  const int64_t vocab = call->inputs.vocab;
  if (vocab > kernel.table.tokens || (kernel.bounds != 0 && kernel.bounds != vocab))
    return refuse(api, ort::kInvalidArgument, "the table or the bounds do not fit %lld tokens",
                  static_cast<long long>(vocab));
  call->table = kernel.table;
  const void *mean = nullptr, *inverse_std = nullptr, *bound = nullptr;
  TRY(input_data(api, context, kMean, &mean));
  TRY(input_data(api, context, kInverseStd, &inverse_std));
  TRY(input_data(api, context, kTable, &call->table.rows));
  if (kernel.table.blocks.bits != 0) TRY(input_data(api, context, kScales, &call->table.blocks.scales));
  if (kernel.has_zero_points) TRY(input_data(api, context, kZeroPoints, &call->table.blocks.zero_points));
  if (kernel.bounds != 0) TRY(input_data(api, context, kNeighbourBound, &bound));
  call->table.mean = static_cast<const float *>(mean);
  call->table.inverse_std = static_cast<const float *>(inverse_std);
  call->table.neighbour_bound = static_cast<const float *>(bound);
  return nullptr;
}

template <typename Element>
Status *make_output(const Api &api, ort::KernelContext *context, int index, const topw_inputs &in, size_t rank,
                    Element **data) {
  const int64_t shape[2] = {in.batch, in.vocab};
  ort::Value *value = nullptr;
  TRY(api[ort::get_output](context, static_cast<size_t>(index), shape, rank, &value));
  void *made = nullptr;
  TRY(api[ort::tensor_data](value, &made));
  *data = static_cast<Element *>(made);
  return nullptr;
}

Status *bind_outputs(const Kernel &kernel, ort::KernelContext *context, const topw_inputs &in, topw_outputs *out) {
  const Api &api = kernel.api;
  TRY(make_output(api, context, kNextToken, in, 1, &out->next_token));
  TRY(make_output(api, context, kLogprob, in, 1, &out->logprob));
  TRY(make_output(api, context, kKept, in, 1, &out->kept));
  TRY(make_output(api, context, kCertified, in, 1, &out->certified));
  if (kernel.mass_at != kNowhere) TRY(make_output(api, context, kernel.mass_at, in, 1, &out->mass));
  if (kernel.keep_mask_at != kNowhere) TRY(make_output(api, context, kernel.keep_mask_at, in, 2, &out->keep_mask));
  return nullptr;
}

void sample_row(void *data, size_t row) {
  Call &call = *static_cast<Call *>(data);
  Kernel &kernel = *call.kernel;
  Workspaces::Entry *scratch = kernel.workspaces.take();
  const bool failed =
      !scratch || topw_sample_row(&kernel.options, kernel.has_table() ? &call.table : nullptr, &call.inputs,
                                  static_cast<int64_t>(row), scratch->workspace, &call.outputs) != 0;
  if (scratch) kernel.workspaces.give_back(scratch);
  if (failed) call.out_of_memory.store(true, std::memory_order_relaxed);
}

Status *compute(void *kernel_data, ort::KernelContext *context) {
  Kernel &kernel = *static_cast<Kernel *>(kernel_data);
  Call call{&kernel, {}, {}, {}, {false}};
  TRY(bind_inputs(kernel, context, &call));
  if (kernel.has_table()) TRY(bind_table(kernel, context, &call));
  TRY(bind_outputs(kernel, context, call.inputs, &call.outputs));
  const size_t rows = static_cast<size_t>(call.inputs.batch);
  if (rows == 1)
    sample_row(&call, 0);
  else if (rows > 1)
    TRY(kernel.api[ort::parallel_for](context, sample_row, rows, 0, &call));
  if (call.out_of_memory) return refuse(kernel.api, ort::kFail, "out of memory");
  return nullptr;
}

void destroy(void *data) {
  static_cast<Kernel *>(data)->~Kernel();
  free(data);
}

Status *make(const ort::Operator *, const ort::Function *table, const ort::KernelInfo *node, void **made) {
  const Api api(table);
  void *memory = malloc(sizeof(Kernel));
  if (!memory) return refuse(api, ort::kFail, "out of memory");
  Kernel *kernel = new (memory) Kernel;
  kernel->api = api;
  if (Status *failed = prepare(node, kernel)) {
    destroy(kernel);
    return failed;
  }
  ++kernels_made;
  *made = kernel;
  return nullptr;
}

// ---- what the runtime asks about the operator

ort::Operator describe() {
  using ort::Operator;
  Operator op;
  op.name = [](const Operator *) { return hidden ? "TopWSampleHidden" : "TopWSample"; };
  op.provider = [](const Operator *) { return "CPUExecutionProvider"; };
  op.input_count = [](const Operator *) { return kWithoutTable + 1; };
  op.input_type = [](const Operator *, size_t index) -> int {
    return index < kWithoutTable ? kInputTypes[index] : ort::kAny;
  };
  op.input_presence = [](const Operator *, size_t index) -> int {
    return index < kWithoutTable ? ort::kRequired : ort::kVariadic;
  };
  op.output_count = [](const Operator *) { return size_t{kFirstOnRequest + 1}; };
  op.output_type = [](const Operator *, size_t index) -> int {
    constexpr int types[] = {ort::kInt64, ort::kFloat, ort::kInt32, ort::kBool};
    return index < kFirstOnRequest ? types[index] : ort::kAny;
  };
  op.output_presence = [](const Operator *, size_t index) -> int {
    return index < kFirstOnRequest ? ort::kRequired : ort::kVariadic;
  };
  op.input_memory = [](const Operator *, size_t) { return 0; };
  op.least_variadic_inputs = [](const Operator *) { return 0; };
  op.variadic_inputs_alike = [](const Operator *) { return 0; };
  op.least_variadic_outputs = [](const Operator *) { return 0; };
  op.variadic_outputs_alike = [](const Operator *) { return 0; };
  op.first_version = [](const Operator *) { return 1; };
  op.last_version = [](const Operator *) { return 1; };
  op.make = make;
  op.compute = compute;
  op.destroy = destroy;
  return op;
}

const ort::Operator sampler = describe();
constexpr char kRegistered[] = "topw.registered";  // an entry of the options that have the operator already

}  // namespace

extern "C" {

// What onnxruntime calls in a library of operators. It refuses a session whose options have one domain twice; so for
// options that were here before, this does nothing.
TOPW_EXPORT Status *RegisterCustomOps(ort::SessionOptions *options, const ort::ApiBase *base) {
  const Api api(base->get_api(ort::kVersion));
  if (!api)  // making a Status is in every version
    return refuse(Api(base->get_api(1)), ort::kFail, "needs onnxruntime 1.17 or newer, this is %s",
                  base->version_string());
  int registered = 0;
  TRY(api[ort::has_config_entry](options, kRegistered, &registered));
  if (registered) return nullptr;
  ort::Domain *domain = nullptr;  // stays: sessions made from these options refer to it for as long as they live
  TRY(api[ort::create_domain]("topw", &domain));
  TRY(api[ort::add_operator](domain, &sampler));
  TRY(api[ort::add_domain](options, domain));
  return api[ort::add_config_entry](options, kRegistered, "1");
}

// Whether sessions that this thread opens from now on see the operator (1, as at first) or run the model's own function
// (0), though their options have it: options cannot be copied or cleared.
TOPW_EXPORT void topw_ort_show(int shown) { hidden = !shown; }

// How many nodes this thread's sessions have given to the operator so far.
TOPW_EXPORT int64_t topw_ort_kernels(void) { return kernels_made; }

// Whether the operator reads tables of this form, the node's attribute `table_form`.
TOPW_EXPORT int topw_ort_knows_table_form(const char *form) {
  topw_blocks blocks;
  return topw::read_table_form(form, &blocks);
}
}
