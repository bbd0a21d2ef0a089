// topw::TopWSample for onnxruntime's CPU provider: the node of docs/graph.md, section 8, answered by topw_sample_row.
//
// A model that carries the node also carries a function of standard operators for it. Where this operator is registered
// the runtime prefers it; where it refuses a node, the session does not open, and its caller opens it without.

#include <stdlib.h>

#include <atomic>
#include <new>

#include "ort_abi.h"
#include "ort_node.h"
#include "ort_shape.h"
#include "ort_workspaces.h"
#include "quantised.h"
#include "topw.h"

namespace topw {
namespace {

using ort::Api;
using ort::Status;

thread_local bool hidden = false;
thread_local int64_t kernels_made = 0;

struct Kernel {
  Api api;
  Node node;
  Workspaces workspaces;
};

struct Tensor {
  Shape shape;
  const void *data = nullptr;
};

Status *input_data(const Api &api, const ort::KernelContext *context, size_t index, const void **data) {
  const ort::Value *value = nullptr;
  TOPW_TRY(api[ort::get_input](context, index, &value));
  void *found = nullptr;
  TOPW_TRY(api[ort::tensor_data](const_cast<ort::Value *>(value), &found));
  *data = found;
  return nullptr;
}

Status *input_tensor(const Api &api, const ort::KernelContext *context, size_t index, Tensor *tensor) {
  const ort::Value *value = nullptr;
  TOPW_TRY(api[ort::get_input](context, index, &value));
  ort::TensorInfo *info = nullptr;
  TOPW_TRY(api[ort::tensor_info](value, &info));
  Status *failed = read_shape(api, info, &tensor->shape);
  api[ort::release_tensor_info](info);
  TOPW_TRY(failed);
  void *found = nullptr;
  TOPW_TRY(api[ort::tensor_data](const_cast<ort::Value *>(value), &found));
  tensor->data = found;
  return nullptr;
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
    TOPW_TRY(input_tensor(api, context, index, &tensor));
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
  const Node &node = kernel.node;
  const int64_t vocab = call->inputs.vocab;
  if (vocab > node.table.tokens || (node.bounds != 0 && node.bounds != vocab))
    return refuse(api, ort::kInvalidArgument, "the table or the bounds do not fit %lld tokens",
                  static_cast<long long>(vocab));
  call->table = node.table;
  const void *mean = nullptr, *inverse_std = nullptr, *bound = nullptr;
  TOPW_TRY(input_data(api, context, kMean, &mean));
  TOPW_TRY(input_data(api, context, kInverseStd, &inverse_std));
  TOPW_TRY(input_data(api, context, kTable, &call->table.rows));
  if (node.quantised()) TOPW_TRY(input_data(api, context, kScales, &call->table.blocks.scales));
  if (node.has_zero_points) TOPW_TRY(input_data(api, context, kZeroPoints, &call->table.blocks.zero_points));
  if (node.bounds != 0) TOPW_TRY(input_data(api, context, kNeighbourBound, &bound));
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
  TOPW_TRY(api[ort::get_output](context, static_cast<size_t>(index), shape, rank, &value));
  void *made = nullptr;
  TOPW_TRY(api[ort::tensor_data](value, &made));
  *data = static_cast<Element *>(made);
  return nullptr;
}

Status *bind_outputs(const Kernel &kernel, ort::KernelContext *context, const topw_inputs &in, topw_outputs *out) {
  const Api &api = kernel.api;
  TOPW_TRY(make_output(api, context, kNextToken, in, 1, &out->next_token));
  TOPW_TRY(make_output(api, context, kLogprob, in, 1, &out->logprob));
  TOPW_TRY(make_output(api, context, kKept, in, 1, &out->kept));
  TOPW_TRY(make_output(api, context, kCertified, in, 1, &out->certified));
  const Node &node = kernel.node;
  if (node.mass_at != kNowhere) TOPW_TRY(make_output(api, context, node.mass_at, in, 1, &out->mass));
  if (node.keep_mask_at != kNowhere) TOPW_TRY(make_output(api, context, node.keep_mask_at, in, 2, &out->keep_mask));
  return nullptr;
}

void sample_row(void *data, size_t row) {
  Call &call = *static_cast<Call *>(data);
  Kernel &kernel = *call.kernel;
  Workspaces::Entry *scratch = kernel.workspaces.take();
  const bool failed =
      !scratch || topw_sample_row(&kernel.node.options, kernel.node.has_table() ? &call.table : nullptr, &call.inputs,
                                  static_cast<int64_t>(row), scratch->workspace, &call.outputs) != 0;
  if (scratch) kernel.workspaces.give_back(scratch);
  if (failed) call.out_of_memory.store(true, std::memory_order_relaxed);
}

Status *compute(void *kernel_data, ort::KernelContext *context) {
  Kernel &kernel = *static_cast<Kernel *>(kernel_data);
  Call call{&kernel, {}, {}, {}, {false}};
  TOPW_TRY(bind_inputs(kernel, context, &call));
  if (kernel.node.has_table()) TOPW_TRY(bind_table(kernel, context, &call));
  TOPW_TRY(bind_outputs(kernel, context, call.inputs, &call.outputs));
  const size_t rows = static_cast<size_t>(call.inputs.batch);
  if (rows == 1)
    sample_row(&call, 0);
  else if (rows > 1)
    TOPW_TRY(kernel.api[ort::parallel_for](context, sample_row, rows, 0, &call));
  if (call.out_of_memory) return refuse(kernel.api, ort::kFail, "out of memory");
  return nullptr;
}

void destroy(void *data) {
  static_cast<Kernel *>(data)->~Kernel();
  free(data);
}

Status *make(const ort::Operator *, const ort::Function *table, const ort::KernelInfo *info, void **made) {
  const Api api(table);
  void *memory = malloc(sizeof(Kernel));
  if (!memory) return refuse(api, ort::kFail, "out of memory");
  Kernel *kernel = new (memory) Kernel;
  kernel->api = api;
  if (Status *failed = read_node(api, info, &kernel->node)) {
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
  TOPW_TRY(api[ort::has_config_entry](options, kRegistered, &registered));
  if (registered) return nullptr;
  ort::Domain *domain = nullptr;  // stays: sessions made from these options refer to it for as long as they live
  TOPW_TRY(api[ort::create_domain]("topw", &domain));
  TOPW_TRY(api[ort::add_operator](domain, &sampler));
  TOPW_TRY(api[ort::add_domain](options, domain));
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
  return read_table_form(form, &blocks);
}
}

}  // namespace topw
