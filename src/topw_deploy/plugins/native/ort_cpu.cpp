// topw::TopWSample for onnxruntime's CPU provider (docs/contract/graph.md, section 8).

#include <stdlib.h>

#include <atomic>
#include <new>

#include "ort_call.h"
#include "ort_node.h"
#include "ort_operator.h"
#include "ort_shape.h"
#include "ort_workspaces.h"

namespace topw {
namespace {

using ort::Api;
using ort::Status;

struct Kernel {
  Api api;
  Node node;
  Workspaces workspaces;
};

struct Batch {
  Kernel &kernel;
  OrtCall call;
  std::atomic<bool> out_of_memory;
};

void sample_row(void *data, size_t row) {
  Batch &batch = *static_cast<Batch *>(data);
  Kernel &kernel = batch.kernel;
  OrtCall &call = batch.call;
  Workspaces::Entry *scratch = kernel.workspaces.take();
  const bool failed =
      !scratch || topw_sample_row(&kernel.node.options, kernel.node.has_table() ? &call.table : nullptr, &call.inputs,
                                  static_cast<int64_t>(row), scratch->workspace, &call.outputs) != 0;
  if (scratch) kernel.workspaces.give_back(scratch);
  if (failed) batch.out_of_memory.store(true, std::memory_order_relaxed);
}

Status *compute(void *kernel_data, ort::KernelContext *context) {
  Kernel &kernel = *static_cast<Kernel *>(kernel_data);
  Batch batch{kernel, {}, {false}};
  TOPW_TRY(bind_call(kernel.api, context, kernel.node, &batch.call));
  const size_t rows = static_cast<size_t>(batch.call.inputs.batch);
  if (rows == 1)
    sample_row(&batch, 0);
  else if (rows > 1)
    TOPW_TRY(kernel.api[ort::parallel_for](context, sample_row, rows, 0, &batch));
  if (batch.out_of_memory) return refuse(kernel.api, ort::kFail, "out of memory");
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
  count_kernel();
  *made = kernel;
  return nullptr;
}

ort::Operator make_cpu_operator() {
  ort::Operator op = shared_operator();
  op.provider = [](const ort::Operator *) { return "CPUExecutionProvider"; };
  op.make = make;
  op.compute = compute;
  op.destroy = destroy;
  return op;
}

}  // namespace

const ort::Operator cpu_operator = make_cpu_operator();

}  // namespace topw
