// Reads a node (docs/contract/graph.md, section 8): attributes, types and sizes of inputs and outputs.

#include "ort_node.h"

#include <string.h>

#include "ort_shape.h"
#include "quantised.h"

namespace topw {

using ort::Api;
using ort::Status;

namespace {

// The declared shape of an input (or output); unknown sizes are -1, an unknown rank 0.
Status *read_declared_shape(const Api &api, const ort::KernelInfo *info, bool is_input, size_t index, Shape *shape) {
  ort::TypeInfo *type = nullptr;
  TOPW_TRY(api[is_input ? ort::input_type : ort::output_type](info, index, &type));
  const ort::TensorInfo *tensor = nullptr;
  Status *failed = api[ort::as_tensor_info](type, &tensor);
  if (!failed && tensor) failed = read_shape(api, tensor, shape);
  api[ort::release_type_info](type);
  return failed;
}

constexpr struct {
  const char *name;
  int32_t metric;
} kMetrics[] = {{"mahalanobis", TOPW_MAHALANOBIS}, {"unit", TOPW_UNIT}, {"cosine", TOPW_COSINE},
                {"uniform", TOPW_UNIFORM}};  // fmt: skip

bool fits_metric(int32_t metric, const char *form, topw_blocks *blocks) {
  return metric == TOPW_UNIFORM ? form[0] == '\0' : read_table_form(form, blocks);
}

Status *read_string(const Api &api, const ort::KernelInfo *info, const char *name, char *text, size_t room) {
  size_t size = 0;
  TOPW_TRY(api[ort::string_attribute](info, name, nullptr, &size));
  if (size > room) return refuse(api, ort::kInvalidArgument, "the attribute %s is too long", name);
  size = room;
  return api[ort::string_attribute](info, name, text, &size);
}

Status *read_options(const Api &api, const ort::KernelInfo *info, topw_options *options, topw_blocks *blocks) {
  int64_t neighbours = 0;
  TOPW_TRY(api[ort::int_attribute](info, "top_m", &options->top_m));
  TOPW_TRY(api[ort::int_attribute](info, "alt_iters", &options->alt_iters));
  TOPW_TRY(api[ort::int_attribute](info, "knn_k", &neighbours));
  if (options->top_m < 1 || options->alt_iters < 1 || neighbours < 0 || neighbours > INT32_MAX)
    return refuse(api, ort::kInvalidArgument, "top_m, alt_iters or knn_k is out of range");
  options->knn_k = static_cast<int32_t>(neighbours);
  char text[128] = "";
  TOPW_TRY(read_string(api, info, "metric", text, sizeof text));
  options->metric = kNowhere;
  for (const auto &known : kMetrics)
    if (strcmp(text, known.name) == 0) options->metric = known.metric;
  if (options->metric == kNowhere) return refuse(api, ort::kInvalidArgument, "the metric %s is not known", text);
  TOPW_TRY(read_string(api, info, "table_form", text, sizeof text));
  if (!fits_metric(options->metric, text, blocks))
    return refuse(api, ort::kInvalidArgument, "the table form '%s' is not known", text);
  return nullptr;
}

Status *check_inputs(const Api &api, const ort::KernelInfo *info, Node *node) {
  size_t count = 0;
  TOPW_TRY(api[ort::input_count](info, &count));
  node->has_zero_points = node->is_quantised() && count == kZeroPoints + 1;
  const size_t with_table = node->is_quantised() ? kZeroPoints + node->has_zero_points : kWithTable;
  if (count != (node->has_table() ? with_table : kWithoutTable))
    return refuse(api, ort::kInvalidArgument, "the node has %zu inputs", count);
  for (size_t index = 0; index < kWithoutTable; ++index) {
    Shape shape;
    TOPW_TRY(read_declared_shape(api, info, true, index, &shape));
    if (shape.type != kInputTypes[index] || (shape.rank != 0 && shape.rank != input_rank(index)))
      return refuse(api, ort::kInvalidArgument, "input %zu has the element type %d and %zu dimensions", index,
                    shape.type, shape.rank);
    if (index == kLogits) node->vocab = shape.size[1];
  }
  return nullptr;
}

// Scales and zero points of a quantised table; its own sizes are already in `table`.
Status *read_blocks(const Api &api, const ort::KernelInfo *info, bool has_zero_points, topw_table *table) {
  Shape scales, zeros;
  TOPW_TRY(read_declared_shape(api, info, true, kScales, &scales));
  if (has_zero_points) TOPW_TRY(read_declared_shape(api, info, true, kZeroPoints, &zeros));
  table->blocks.scale_type = scales.type;
  table->blocks.scales = table;  // only its non-nullness is tested here
  const bool rows = scales.rank == 2 && scales.size[0] == table->tokens && scales.size[1] == blocks_in_row(*table);
  const bool fits = !has_zero_points || (zeros.type == table->dtype && zeros.rank == 2 &&
                                         zeros.size[0] == table->tokens && zeros.size[1] == zero_points_in_row(*table));
  if (!is_readable_quantised(*table) || !rows || !fits)
    return refuse(api, ort::kInvalidArgument, "the table's codes, scales and zero points do not fit together");
  return nullptr;
}

// Table and statistics are constants of the model, so their sizes are known.
Status *read_table(const Api &api, const ort::KernelInfo *info, Node *node) {
  const int64_t vocab = node->vocab;
  Shape mean, inverse_std, bound, rows;
  TOPW_TRY(read_declared_shape(api, info, true, kMean, &mean));
  TOPW_TRY(read_declared_shape(api, info, true, kInverseStd, &inverse_std));
  TOPW_TRY(read_declared_shape(api, info, true, kNeighbourBound, &bound));
  TOPW_TRY(read_declared_shape(api, info, true, kTable, &rows));
  if (!node->is_quantised() && rows.type != TOPW_FLOAT32 && rows.type != TOPW_FLOAT16 && rows.type != TOPW_BFLOAT16)
    return refuse(api, ort::kInvalidArgument, "the table's element type %d is not known", rows.type);
  const bool floats = mean.type == ort::kFloat && inverse_std.type == ort::kFloat && bound.type == ort::kFloat;
  const bool ranks = mean.rank == 1 && inverse_std.rank == 1 && bound.rank == 1 && rows.rank == 2;
  const int64_t hidden_size = rows.size[1] * codes_per_element(rows.type, node->table.blocks);
  if (!floats || !ranks || rows.size[0] < 1 || hidden_size < 1 || mean.size[0] != hidden_size ||
      inverse_std.size[0] != hidden_size || bound.size[0] < 0)
    return refuse(api, ort::kInvalidArgument, "the table, its statistics or its bounds are not of the shapes expected");
  if (vocab > rows.size[0] || (bound.size[0] != 0 && vocab >= 0 && bound.size[0] != vocab))
    return refuse(api, ort::kInvalidArgument, "the table or the bounds do not fit %lld tokens",
                  static_cast<long long>(vocab));
  node->table.tokens = rows.size[0];
  node->table.hidden = hidden_size;
  node->table.dtype = rows.type;
  node->bounds = bound.size[0];
  return node->is_quantised() ? read_blocks(api, info, node->has_zero_points, &node->table) : nullptr;
}

// Which optional outputs are present; a single one is identified by its element type.
Status *read_outputs(const Api &api, const ort::KernelInfo *info, Node *node) {
  size_t count = 0;
  TOPW_TRY(api[ort::output_count](info, &count));
  if (count < kFirstOnRequest || count > kMostOutputs)
    return refuse(api, ort::kInvalidArgument, "the node has %zu outputs", count);
  for (size_t index = kFirstOnRequest; index < count; ++index) {
    Shape shape;
    TOPW_TRY(read_declared_shape(api, info, false, index, &shape));
    int *place = shape.type == ort::kFloat  ? &node->mass_at
                 : shape.type == ort::kBool ? &node->keep_mask_at
                                            : nullptr;
    if (!place || *place != kNowhere || (place == &node->mass_at && index != kFirstOnRequest))
      return refuse(api, ort::kInvalidArgument, "output %zu has the element type %d", index, shape.type);
    *place = static_cast<int>(index);
  }
  return nullptr;
}

}  // namespace

Status *read_node(const Api &api, const ort::KernelInfo *info, Node *node) {
  TOPW_TRY(read_options(api, info, &node->options, &node->table.blocks));
  TOPW_TRY(check_inputs(api, info, node));
  if (node->has_table()) TOPW_TRY(read_table(api, info, node));
  return read_outputs(api, info, node);
}

}  // namespace topw
