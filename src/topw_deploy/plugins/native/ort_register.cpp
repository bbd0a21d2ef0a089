// The library as onnxruntime and its users see it: registering the operators, and asking about them.
//
// A model that carries the node also carries a function of standard operators for it. Where an operator is registered
// the runtime prefers it; where it refuses a node, the session does not open, and its caller opens it without.

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
#endif
};
constexpr char kRegistered[] = "topw.registered";  // an entry of the options that have the operators already
#if defined(TOPW_WITH_CUDA)
constexpr char kWhich[] = "cuda";
#else
constexpr char kWhich[] = "cpu";
#endif

}  // namespace

extern "C" {

// What onnxruntime calls in a library of operators. It refuses a session whose options have one domain twice; so for
// options that were here before, this does nothing.
TOPW_EXPORT Status *RegisterCustomOps(ort::SessionOptions *options, const ort::ApiBase *base) {
  const Api api(base->get_api(ort::kVersion));
  if (!api)  // making a Status is in every version
    return refuse(Api(base->get_api(1)), ort::kFail, "needs onnxruntime 1.17 or newer, this is %s",
                  base->version_string());
  int registered = 0;
  TOPW_TRY(api[ort::has_config_entry](options, kRegistered, &registered));
  if (registered) return nullptr;
  ort::Domain *domain = nullptr;  // stays: sessions made from these options refer to it for as long as they live
  TOPW_TRY(api[ort::create_domain]("topw", &domain));
  for (const ort::Operator *op : kOperators) TOPW_TRY(api[ort::add_operator](domain, op));
  TOPW_TRY(api[ort::add_domain](options, domain));
  return api[ort::add_config_entry](options, kRegistered, kWhich);
}

// Whether sessions that this thread opens from now on see the operators (1, as at first) or run the model's own function
// (0), though their options have it: options cannot be copied or cleared.
TOPW_EXPORT void topw_ort_show(int shown) { show_operators(shown != 0); }

// How many nodes this thread's sessions have given to the operators so far.
TOPW_EXPORT int64_t topw_ort_kernels(void) { return kernels_of_this_thread(); }

// Whether the operators read tables of this form, the node's attribute `table_form`.
TOPW_EXPORT int topw_ort_knows_table_form(const char *form) {
  topw_blocks blocks;
  return read_table_form(form, &blocks);
}
}

}  // namespace topw
