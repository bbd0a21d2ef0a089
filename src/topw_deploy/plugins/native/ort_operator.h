// topw::TopWSample for onnxruntime: code shared by all providers, and the list of operators.
#ifndef TOPW_ORT_OPERATOR_H
#define TOPW_ORT_OPERATOR_H

#include "ort_abi.h"

namespace topw {

// The part of the operator that all providers share, without provider and kernel. Inputs and outputs are in the
// provider's memory.
ort::Operator shared_operator();

// Counts a node that a session of this thread assigned to an operator.
void count_kernel();
// See ort_register.cpp.
void show_operators(bool shown);
bool are_operators_hidden();  // from sessions of this thread
int64_t kernels_of_this_thread();

extern const ort::Operator cpu_operator;
extern const ort::Operator product_operator, offsets_product_operator;
extern const ort::Operator attention_operator, read_only_attention_operator;
#if defined(TOPW_WITH_CUDA)
extern const ort::Operator cuda_operator;
#endif

}  // namespace topw

#endif
