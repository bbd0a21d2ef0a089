// topw::TopWSample as onnxruntime sees it: what the operators of all providers have in common, and which there are.
#ifndef TOPW_ORT_OPERATOR_H
#define TOPW_ORT_OPERATOR_H

#include "ort_abi.h"

namespace topw {

// The operator without a provider and a kernel: name, inputs and outputs, all of them where the provider computes.
ort::Operator describe();

// A session of this thread has given a node to one of the operators.
void count_kernel();
// See topw_ort_show and topw_ort_kernels in ort_register.cpp.
void show_operators(bool shown);
int64_t kernels_of_this_thread();

extern const ort::Operator cpu_operator;
#if defined(TOPW_WITH_CUDA)
extern const ort::Operator cuda_operator;
#endif

}  // namespace topw

#endif
