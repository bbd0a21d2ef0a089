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

}  // namespace topw

#endif
