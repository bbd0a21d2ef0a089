// topw_cuda_launch over the emulated kernels; a captured graph replays it with the same addresses. Refuses control
// memory first used during a capture, since it was allocated then.

#include <dlfcn.h>

#include <algorithm>
#include <mutex>
#include <vector>

#define topw_cuda_launch topw_cuda_launch_now
#include "launch.cu"
#undef topw_cuda_launch

extern "C" {

constexpr int kCaptureUnsupported = 900;

static std::mutex emulator;  // runs one thread's kernels at a time

struct Step {
  topw_cuda_shape shape;
  topw_table table;
  bool has_table;
  topw_inputs inputs;
  topw_outputs outputs;
  void *control, *workspace;
};

static void run(void *data) {
  const std::lock_guard<std::mutex> alone(emulator);
  const Step &step = *static_cast<Step *>(data);
  topw_cuda_launch_now(&step.shape, step.has_table ? &step.table : nullptr, &step.inputs, &step.outputs,
                       step.control, step.workspace, nullptr);
}

TOPW_EXPORT int topw_cuda_launch(const topw_cuda_shape *shape, const topw_table *table, const topw_inputs *inputs,
                                 const topw_outputs *outputs, void *control, void *workspace, void *stream) {
  using Capture = int (*)(void (*)(void *), void *);
  static const Capture capture = reinterpret_cast<Capture>(
      dlsym(dlopen("libcudart.so.13", RTLD_NOW | RTLD_NOLOAD), "stand_in_capture"));
  static std::vector<void *> known;
  const std::lock_guard<std::mutex> alone(emulator);
  const bool is_known = std::find(known.begin(), known.end(), control) != known.end();
  Step *step = new Step{*shape, table ? *table : topw_table{}, table != nullptr, *inputs, *outputs, control, workspace};
  if (capture(run, step)) return is_known ? 0 : kCaptureUnsupported;
  delete step;
  if (!is_known) known.push_back(control);
  return topw_cuda_launch_now(shape, table, inputs, outputs, control, workspace, stream);
}
}
