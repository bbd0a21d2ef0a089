#include "ort_operator.h"

#include "ort_node.h"

namespace topw {
namespace {

thread_local bool hidden = false;
thread_local int64_t kernels_made = 0;

}  // namespace

void count_kernel() { ++kernels_made; }
int64_t kernels_of_this_thread() { return kernels_made; }
void show_operators(bool shown) { hidden = !shown; }
bool are_operators_hidden() { return hidden; }

ort::Operator shared_operator() {
  using ort::Operator;
  Operator op;
  op.name = [](const Operator *) { return hidden ? "TopWSampleHidden" : "TopWSample"; };
  op.input_count = [](const Operator *) { return kWithoutTable + 1; };
  op.input_type = [](const Operator *, size_t index) -> int {
    return index < kWithoutTable ? kInputTypes[index] : ort::kAny;
  };
  op.input_presence = [](const Operator *, size_t index) -> int {
    return index < kWithoutTable ? ort::kRequired : ort::kVariadic;
  };
  op.output_count = [](const Operator *) { return size_t{kFirstOnRequest + 1}; };
  op.output_type = [](const Operator *, size_t index) -> int {
    constexpr int types[] = {ort::kInt64, ort::kFloat, ort::kInt32, ort::kBool};
    return index < kFirstOnRequest ? types[index] : ort::kAny;
  };
  op.output_presence = [](const Operator *, size_t index) -> int {
    return index < kFirstOnRequest ? ort::kRequired : ort::kVariadic;
  };
  op.input_memory = [](const Operator *, size_t) { return 0; };
  op.least_variadic_inputs = [](const Operator *) { return 0; };
  op.variadic_inputs_alike = [](const Operator *) { return 0; };
  op.least_variadic_outputs = [](const Operator *) { return 0; };
  op.variadic_outputs_alike = [](const Operator *) { return 0; };
  op.first_version = [](const Operator *) { return 1; };
  op.last_version = [](const Operator *) { return 1; };
  return op;
}

}  // namespace topw
