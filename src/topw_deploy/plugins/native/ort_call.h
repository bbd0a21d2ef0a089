// Inputs and outputs of one operator call.
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

// Reads the inputs and allocates the outputs. An error if shapes do not fit each other or the node.
ort::Status *bind_call(const ort::Api &api, ort::KernelContext *context, const Node &node, OrtCall *call);

}  // namespace topw

#endif
