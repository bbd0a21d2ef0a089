// Tensor types and sizes in onnxruntime, and the operator's errors.
#ifndef TOPW_ORT_SHAPE_H
#define TOPW_ORT_SHAPE_H

#include <stdio.h>
#include <string.h>

#include "ort_abi.h"

#define TOPW_TRY(call)                                         \
  do {                                                         \
    if (ort::Status *topw_failed = (call)) return topw_failed; \
  } while (0)

namespace topw {

template <typename... Values>
ort::Status *refuse(const ort::Api &api, int code, const char *format, Values... values) {
  char message[256] = "TopWSample: ";
  const size_t start = strlen(message);
  snprintf(message + start, sizeof message - start, format, values...);
  return api[ort::create_status](code, message);
}

struct Shape {
  int type = ort::kAny;
  size_t rank = 0;
  int64_t size[2] = {-1, -1};  // first two dimensions
};

inline ort::Status *read_shape(const ort::Api &api, const ort::TensorInfo *info, Shape *shape) {
  TOPW_TRY(api[ort::element_type](info, &shape->type));
  TOPW_TRY(api[ort::dimension_count](info, &shape->rank));
  if (shape->rank == 1 || shape->rank == 2) TOPW_TRY(api[ort::dimensions](info, shape->size, shape->rank));
  return nullptr;
}

// The data of an input; null if the node has no such input.
template <typename Element>
ort::Status *address(const ort::Api &api, const ort::KernelContext *context, bool exists, size_t index,
                     const Element **found) {
  *found = nullptr;
  if (!exists) return nullptr;
  const ort::Value *value = nullptr;
  void *data = nullptr;
  TOPW_TRY(api[ort::get_input](context, index, &value));
  TOPW_TRY(api[ort::tensor_data](const_cast<ort::Value *>(value), &data));
  *found = static_cast<const Element *>(data);
  return nullptr;
}

constexpr size_t kMostDimensions = 8;

// An input's dimensions; only their number if there are more than kMostDimensions.
inline ort::Status *read_sizes(const ort::Api &api, const ort::KernelContext *context, size_t index, int64_t *sizes,
                               size_t *rank) {
  const ort::Value *value = nullptr;
  ort::TensorInfo *info = nullptr;
  TOPW_TRY(api[ort::get_input](context, index, &value));
  TOPW_TRY(api[ort::tensor_info](value, &info));
  ort::Status *failed = api[ort::dimension_count](info, rank);
  if (!failed && *rank <= kMostDimensions) failed = api[ort::dimensions](info, sizes, *rank);
  api[ort::release_tensor_info](info);
  return failed;
}

}  // namespace topw

#endif
