// The CUDA operator over the emulated kernels, registered for onnxruntime's CPU provider and using its memory.

#include "../../../src/topw_deploy/plugins/native/ort_operator.h"
#include "../../../src/topw_deploy/plugins/native/ort_shape.h"
#include "topw_cuda.h"

namespace topw {
namespace {

ort::Operator on_the_cpu() {
  ort::Operator op = cuda_operator;
  op.provider = [](const ort::Operator *) { return "CPUExecutionProvider"; };
  return op;
}

}  // namespace

extern "C" TOPW_EXPORT ort::Status *RegisterCustomOps(ort::SessionOptions *options, const ort::ApiBase *base) {
  static const ort::Operator emulated = on_the_cpu();
  const ort::Api api(base->get_api(ort::kVersion));
  ort::Domain *domain = nullptr;
  TOPW_TRY(api[ort::create_domain]("topw", &domain));
  TOPW_TRY(api[ort::add_operator](domain, &emulated));
  return api[ort::add_domain](options, domain);
}

}  // namespace topw
