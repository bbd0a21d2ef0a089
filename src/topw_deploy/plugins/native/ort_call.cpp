// Inputs and outputs of a call, for every provider: uses only shapes and addresses, which are always on the host.

#include "ort_call.h"

#include "ort_shape.h"
#include "parameters.h"

namespace topw {

using ort::Api;
using ort::Status;

namespace {

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

// A mask has no words, or one for every 32 columns of the logits.
Status *check_mask(const Api &api, const topw_inputs &in) {
  if (in.words == 0 || in.words == words_of_mask(in.vocab)) return nullptr;
  return refuse(api, ort::kInvalidArgument, "allowed has %lld words per row, but must have 0 or %lld for %lld tokens",
                static_cast<long long>(in.words), static_cast<long long>(words_of_mask(in.vocab)),
                static_cast<long long>(in.vocab));
}

Status *bind_inputs(const Api &api, const ort::KernelContext *context, topw_inputs *inputs) {
  Tensor found[kWithoutTable];
  for (size_t index = 0; index < kWithoutTable; ++index) {
    Tensor &tensor = found[index];
    TOPW_TRY(input_tensor(api, context, index, &tensor));
    const bool fits = tensor.shape.rank == input_rank(index) && tensor.shape.size[0] == found[kLogits].shape.size[0];
    const bool is_edit = index == kEditIds || index == kEditPenalty || index == kEditBias;
    if (!fits || tensor.shape.type != kInputTypes[index] ||
        (is_edit && tensor.shape.size[1] != found[kEditIds].shape.size[1]))
      return refuse(api, ort::kInvalidArgument, "input %zu does not have the shape or type of docs/contract/graph.md",
                    index);
  }
  topw_inputs &in = *inputs;
  in.batch = found[kLogits].shape.size[0];
  in.vocab = found[kLogits].shape.size[1];
  in.edits = found[kEditIds].shape.size[1];
  in.logits = static_cast<const float *>(found[kLogits].data);
  in.words = found[kAllowed].shape.size[1];
  in.edit_ids = static_cast<const int64_t *>(found[kEditIds].data);
  in.edit_penalty = static_cast<const float *>(found[kEditPenalty].data);
  in.edit_bias = static_cast<const float *>(found[kEditBias].data);
  in.allowed = static_cast<const int32_t *>(found[kAllowed].data);
  const float **columns[] = {&in.temperature, &in.selection_temperature, &in.lam, &in.beta, &in.init_top_p,
                             &in.geom_scale, &in.uniform};  // fmt: skip
  for (size_t index = kTemperature; index <= kUniform; ++index)
    *columns[index - kTemperature] = static_cast<const float *>(found[index].data);
  in.rule = static_cast<const int32_t *>(found[kRule].data);
  in.rule_values = static_cast<const float *>(found[kRuleValues].data);
  if (found[kRuleValues].shape.size[1] != 2)
    return refuse(api, ort::kInvalidArgument, "rule_values has %lld columns, but must have 2",
                  static_cast<long long>(found[kRuleValues].shape.size[1]));
  if (in.vocab < 1) return refuse(api, ort::kInvalidArgument, "the logits have no columns");
  return check_mask(api, in);
}

Status *bind_table(const Api &api, const ort::KernelContext *context, const Node &node, int64_t vocab,
                   topw_table *table) {
  if (vocab > node.table.tokens || (node.bounds != 0 && node.bounds != vocab))
    return refuse(api, ort::kInvalidArgument, "the table or the bounds do not fit %lld tokens",
                  static_cast<long long>(vocab));
  *table = node.table;
  const void *mean = nullptr, *inverse_std = nullptr, *bound = nullptr;
  TOPW_TRY(input_data(api, context, kMean, &mean));
  TOPW_TRY(input_data(api, context, kInverseStd, &inverse_std));
  TOPW_TRY(input_data(api, context, kTable, &table->rows));
  if (node.is_quantised()) TOPW_TRY(input_data(api, context, kScales, &table->blocks.scales));
  if (node.has_zero_points) TOPW_TRY(input_data(api, context, kZeroPoints, &table->blocks.zero_points));
  if (node.bounds != 0) TOPW_TRY(input_data(api, context, kNeighbourBound, &bound));
  table->mean = static_cast<const float *>(mean);
  table->inverse_std = static_cast<const float *>(inverse_std);
  table->neighbour_bound = static_cast<const float *>(bound);
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

Status *bind_outputs(const Api &api, ort::KernelContext *context, const Node &node, const topw_inputs &in,
                     topw_outputs *out) {
  TOPW_TRY(make_output(api, context, kNextToken, in, 1, &out->next_token));
  TOPW_TRY(make_output(api, context, kLogprob, in, 1, &out->logprob));
  TOPW_TRY(make_output(api, context, kKept, in, 1, &out->kept));
  TOPW_TRY(make_output(api, context, kCertified, in, 1, &out->certified));
  if (node.mass_at != kNowhere) TOPW_TRY(make_output(api, context, node.mass_at, in, 1, &out->mass));
  if (node.keep_mask_at != kNowhere) TOPW_TRY(make_output(api, context, node.keep_mask_at, in, 2, &out->keep_mask));
  return nullptr;
}

}  // namespace

Status *bind_call(const Api &api, ort::KernelContext *context, const Node &node, OrtCall *call) {
  TOPW_TRY(bind_inputs(api, context, &call->inputs));
  if (node.has_table()) TOPW_TRY(bind_table(api, context, node, call->inputs.vocab, &call->table));
  return bind_outputs(api, context, node, call->inputs, &call->outputs);
}

}  // namespace topw
