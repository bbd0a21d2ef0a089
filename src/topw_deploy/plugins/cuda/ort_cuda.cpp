// topw::TopWSample for onnxruntime's CUDA provider (docs/contract/graph.md, section 8).
//
// The first call of a size allocates its workspace; later ones only launch, so a CUDA graph can capture them.

#include <stdlib.h>

#include <new>

#include "../native/ort_call.h"
#include "../native/ort_node.h"
#include "../native/ort_operator.h"
#include "../native/ort_shape.h"
#include "ort_device_memory.h"
#include "topw_cuda.h"

namespace topw {
namespace {

using ort::Api;
using ort::Status;

struct Kernel {
  Api api;
  Node node;
  DeviceWorkspaces workspaces;
};

topw_cuda_shape shape_of(const Node &node, int64_t batch, int64_t vocab, int64_t edits) {
  topw_cuda_shape shape = {};
  shape.options = node.options;
  shape.table = node.table;
  shape.batch = batch;
  shape.vocab = vocab;
  shape.edits = edits;
  shape.logits_type = TOPW_FLOAT32;
  return shape;
}

Status *compute(void *data, ort::KernelContext *context) {
  Kernel &kernel = *static_cast<Kernel *>(data);
  const Api &api = kernel.api;
  OrtCall call = {};
  TOPW_TRY(bind_call(api, context, kernel.node, &call));
  if (call.inputs.batch == 0) return nullptr;
  void *stream = nullptr;
  TOPW_TRY(api[ort::gpu_stream](context, &stream));
  const topw_cuda_shape shape = shape_of(kernel.node, call.inputs.batch, call.inputs.vocab, call.inputs.edits);
  const char *refusal = topw_cuda_refusal(&shape);
  if (refusal) return refuse(api, ort::kInvalidArgument, "%s", refusal);
  int failed = 0;
  const DeviceWorkspaces::Turn turn(kernel.workspaces);
  const DeviceWorkspace *workspace = kernel.workspaces.find(shape, stream, &failed);
  if (!failed)
    failed = topw_cuda_launch(&workspace->shape, kernel.node.has_table() ? &call.table : nullptr, &call.inputs,
                              &call.outputs, workspace->control, workspace->scratch(), stream);
  return failed ? refuse(api, ort::kFail, "%s", topw_cuda_error(failed)) : nullptr;
}

void destroy(void *data) {
  static_cast<Kernel *>(data)->~Kernel();
  free(data);
}

// An error for a node the kernels refuse; the session is then opened without this operator.
Status *check(const Api &api, const Node &node) {
  const int64_t vocab = node.vocab > 0 ? node.vocab : node.has_table() ? node.table.tokens : 1;
  const topw_cuda_shape shape = shape_of(node, 1, vocab, 0);
  const char *refusal = topw_cuda_refusal(&shape);
  return refusal ? refuse(api, ort::kInvalidArgument, "%s", refusal) : nullptr;
}

Status *make(const ort::Operator *, const ort::Function *table, const ort::KernelInfo *info, void **made) {
  const Api api(table);
  void *memory = malloc(sizeof(Kernel));
  if (!memory) return refuse(api, ort::kFail, "out of memory");
  Kernel *kernel = new (memory) Kernel;
  kernel->api = api;
  Status *failed = read_node(api, info, &kernel->node);
  if (!failed) failed = check(api, kernel->node);
  if (failed) {
    destroy(kernel);
    return failed;
  }
  count_kernel();
  *made = kernel;
  return nullptr;
}

ort::Operator on_a_gpu() {
  ort::Operator op = shared_operator();
  op.provider = [](const ort::Operator *) { return "CUDAExecutionProvider"; };
  op.make = make;
  op.compute = compute;
  op.destroy = destroy;
  return op;
}

}  // namespace

const ort::Operator cuda_operator = on_a_gpu();

// The library's architectures, separated by points: 87 is sm_87.
#define TOPW_TEXT_OF(words) #words
#define TOPW_TEXT(words) TOPW_TEXT_OF(words)
extern "C" TOPW_EXPORT const char *topw_cuda_architectures(void) { return TOPW_TEXT(TOPW_WITH_CUDA); }

}  // namespace topw
