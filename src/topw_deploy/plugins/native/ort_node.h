// The operator's node in a graph, read and checked when its session opens.
#ifndef TOPW_ORT_NODE_H
#define TOPW_ORT_NODE_H

#include "ort_abi.h"
#include "topw.h"

namespace topw {

enum Input {
  kLogits, kEditIds, kEditPenalty, kEditBias, kAllowed, kTemperature, kSelectionTemperature, kLam, kBeta, kInitTopP,
  kGeomScale, kUniform, kRule, kRuleValues, kMean, kInverseStd, kNeighbourBound, kTable, kScales, kZeroPoints
};  // fmt: skip
constexpr size_t kWithoutTable = kMean, kWithTable = kTable + 1;
enum Output { kNextToken, kLogprob, kKept, kCertified, kFirstOnRequest };
constexpr size_t kMostOutputs = kFirstOnRequest + 2;
constexpr int kNowhere = -1;

// Types and ranks of the required inputs.
constexpr int kInputTypes[] = {ort::kFloat, ort::kInt64, ort::kFloat, ort::kFloat, ort::kInt32, ort::kFloat,
                               ort::kFloat, ort::kFloat, ort::kFloat, ort::kFloat, ort::kFloat, ort::kFloat,
                               ort::kInt32, ort::kFloat};
static_assert(sizeof kInputTypes / sizeof kInputTypes[0] == kWithoutTable, "one for each input of every node");

inline size_t input_rank(size_t index) { return index <= kAllowed || index == kRuleValues ? 2 : 1; }

struct Node {
  topw_options options{};
  topw_table table{};  // sizes and type; each call adds the addresses
  int64_t vocab = -1;  // columns of the logits; -1 if unknown
  int64_t bounds = 0;  // number of neighbour bounds: one per token, or 0
  bool has_zero_points = false;
  int mass_at = kNowhere, keep_mask_at = kNowhere;

  bool has_table() const { return options.metric != TOPW_UNIFORM; }
  bool is_quantised() const { return table.blocks.bits != 0; }
};

// An error for a node that the operator does not support.
ort::Status *read_node(const ort::Api &api, const ort::KernelInfo *info, Node *node);

}  // namespace topw

#endif
