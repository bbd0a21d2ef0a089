// The library's entry points: register the operators with onnxruntime, and query them.
//
// The model also defines the node as a function of standard operators; the runtime prefers a registered operator. If
// the operator refuses a node, the session does not open, and its caller retries without the operator.

#include "ort_abi.h"
#include "ort_operator.h"
#include "ort_shape.h"
#include "quantised.h"
#include "topw.h"

namespace topw {
namespace {

using ort::Api;
using ort::Status;

constexpr const ort::Operator *kOperators[] = {
    &cpu_operator,
#if defined(TOPW_WITH_CUDA)
    &cuda_operator,
#else
    // Not beside CUDA: they would take nodes from the GPU, for which onnxruntime has kernels.
    &product_operator, &offsets_product_operator, &attention_operator, &read_only_attention_operator,
#endif
};
constexpr char kRegistered[] = "topw.registered";  // session option that marks registered operators
#if defined(TOPW_WITH_CUDA)
constexpr char kWhich[] = "cuda";
#else
constexpr char kWhich[] = "cpu";
#endif

}  // namespace

extern "C" {

// Called by onnxruntime. Does nothing for options that have the operators: onnxruntime refuses a session with a
// repeated domain.
TOPW_EXPORT Status *RegisterCustomOps(ort::SessionOptions *options, const ort::ApiBase *base) {
  const Api api(base->get_api(ort::kVersion));
  if (!api)  // every version can create a Status
    return refuse(Api(base->get_api(1)), ort::kFail, "needs onnxruntime 1.17 or newer, this is %s",
                  base->version_string());
  int registered = 0;
  TOPW_TRY(api[ort::has_config_entry](options, kRegistered, &registered));
  if (registered) return nullptr;
  ort::Domain *domain = nullptr;  // never freed: sessions with these options refer to it
  TOPW_TRY(api[ort::create_domain]("topw", &domain));
  for (const ort::Operator *op : kOperators) TOPW_TRY(api[ort::add_operator](domain, op));
  TOPW_TRY(api[ort::add_domain](options, domain));
  return api[ort::add_config_entry](options, kRegistered, kWhich);
}

// Whether later sessions of this thread use the operators (1, the default) or the model's function (0). Options can be
// neither copied nor cleared.
TOPW_EXPORT void topw_ort_show(int shown) { show_operators(shown != 0); }

// Nodes assigned to the operators by this thread's sessions.
TOPW_EXPORT int64_t topw_ort_kernels(void) { return kernels_of_this_thread(); }

// Whether the operators support this `table_form`.
TOPW_EXPORT int topw_ort_knows_table_form(const char *form) {
  topw_blocks blocks;
  return read_table_form(form, &blocks);
}
}

}  // namespace topw
