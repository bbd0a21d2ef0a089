// The inputs and outputs of one call of the operator.
#ifndef TOPW_ORT_CALL_H
#define TOPW_ORT_CALL_H

#include "ort_abi.h"
#include "ort_node.h"
#include "topw.h"

namespace topw {

struct OrtCall {
  topw_inputs inputs;
  topw_table table;  // unset if the metric needs none
  topw_outputs outputs;
};

// Reads the call's inputs and allocates its outputs. An error if the shapes do not fit each other or the node.
ort::Status *bind(const ort::Api &api, ort::KernelContext *context, const Node &node, OrtCall *call);

}  // namespace topw

#endif
