// Implements topw_cuda.h: refusals, workspace sizes, launches.

#include <math.h>

#include "../native/quantised.h"
#include "certify.cuh"
#include "chunking.h"
#include "geometry.cuh"

namespace topw {
namespace {

constexpr double kBestTokens = 640;       // certify's look at the best tokens, if too many are within the gap
constexpr int64_t kFewestGroups = 64;     // for that look
constexpr double kCrowded = 3;            // tokens per group; beyond, maxima say little about their number

bool known_table(const topw_table &table) {
  if (table.blocks.bits == 0)
    return table.dtype == TOPW_FLOAT32 || table.dtype == TOPW_FLOAT16 || table.dtype == TOPW_BFLOAT16;
  topw_table described = table;
  if (!described.blocks.scales) described.blocks.scales = &described;  // shapes have no addresses
  return is_readable_quantised(described) && described.blocks.block_size % 8 == 0;  // codes are read eight at a time
}

const char *refusal_of_table(const topw_cuda_shape &shape) {
  if (shape.options.metric == TOPW_UNIFORM) return nullptr;
  if (shape.options.metric < 0 || shape.options.metric > TOPW_UNIFORM) return "the metric is not known";
  if (shape.table.hidden < 1 || shape.table.hidden > kMostHidden)
    return "the table has no coordinate, or more than 8192";
  if (shape.table.tokens < shape.vocab) return "the table has fewer rows than the vocabulary has tokens";
  return known_table(shape.table) ? nullptr : "the table is of a type that is not read on the device";
}

const char *refusal(const topw_cuda_shape &shape) {
  const topw_options &options = shape.options;
  if (shape.logits_type != TOPW_FLOAT32 && shape.logits_type != TOPW_FLOAT16 && shape.logits_type != TOPW_BFLOAT16)
    return "the logits are neither float32 nor float16 nor bfloat16";
  if (shape.vocab < 1 || shape.vocab > kMostVocab) return "the vocabulary has no token, or more than 524288";
  if (shape.batch < 0 || shape.batch > 65536) return "the batch has more than 65536 rows";
  if (shape.edits < 0 || shape.edits > kMostVocab) return "there are more than 524288 edits to a row";
  if (options.top_m < 1) return "top_m is less than 1";
  if ((options.top_m < shape.vocab ? options.top_m : shape.vocab) > kMostPool) return "top_m is larger than 4096";
  if (options.alt_iters < 1) return "alt_iters is less than 1";
  if (options.knn_k < 0 || options.knn_k > kMostNeighbours) return "knn_k is more than 16";
  return refusal_of_table(shape);
}

// Number of maxima for certify's look at the best tokens: kBestTokens randomly placed tokens reach them.
int32_t best_groups(int64_t groups) {
  const double to_each = kBestTokens / static_cast<double>(groups);
  if (groups < kFewestGroups) return 0;
  if (to_each > kCrowded) return static_cast<int32_t>(kFewestGroups);
  return static_cast<int32_t>(static_cast<double>(groups) * (1 - exp(-to_each)));
}

// A chunk consists of whole units and is at least one load per thread.
int64_t chunk_step(const topw_cuda_shape &shape, unsigned threads) {
  const int64_t of_load = static_cast<int64_t>(threads) * (shape.logits_type == TOPW_FLOAT32 ? 4 : 8) / kGroup;
  return crop::rounded_up(of_load > 0 ? of_load : 1, kUnitGroups);
}

Call call_of(const topw_cuda_shape &shape, const topw_table *table, const topw_inputs &inputs,
             const topw_outputs &outputs, void *control, void *workspace) {
  Call call = {};
  int64_t bytes = 0;
  call.options = shape.options;
  if (call.options.top_m > shape.vocab) call.options.top_m = shape.vocab;
  if (table) call.table = *table;
  call.inputs = inputs;
  call.outputs = outputs;
  call.workspace = lay_out(shape, control, workspace, &bytes);
  call.groups = groups_of(shape.vocab);
  call.padded_groups = padded_groups_of(shape.vocab);
  call.patch_slots = patch_slots_of(shape.vocab, inputs.edits);
  call.logits_type = shape.logits_type;
  call.units = static_cast<int32_t>(units_of(shape.vocab));
  call.best_groups = best_groups(call.groups);
  call.log_vocab = log(static_cast<double>(shape.vocab));
  return call;
}

// Cached: a loop's steps need the same cut, and finding it takes longer than a launch.
const Chunking &remembered_cut(const Rows &rows, const Device &device) {
  static thread_local Rows last_rows = {};
  static thread_local Device last_device = {};
  static thread_local Chunking last = {};
  if (rows == last_rows && device == last_device) return last;
  last = cut_into_chunks(rows, device);
  last_rows = rows;
  last_device = device;
  return last;
}

template <class Logit>
int launch_certify(const topw_cuda_shape &shape, Call &call, void *stream) {
  const unsigned threads = threads_of_block(kCertifyThreads);
  const size_t shared = candidate_shared_bytes(call.padded_groups);
  const int failed = allow_shared(certify<Logit>, shared);
  if (failed) return failed;
  const int resident = resident_blocks(certify<Logit>, threads, shared);
  if (resident < 1) return kUnlaunchable;
  const Rows rows = {call.groups, call.inputs.batch, chunk_step(shape, threads)};
  const Chunking cut = remembered_cut(rows, {multiprocessors(), resident});
  call.chunk_groups = static_cast<int32_t>(cut.groups);
  call.chunks = static_cast<int32_t>(cut.chunks);
  const unsigned blocks = static_cast<unsigned>(call.chunks * call.inputs.batch);
  return launch(Launch{blocks, threads, shared, false, stream}, certify<Logit>, call);
}

int launch_certify(const topw_cuda_shape &shape, Call &call, void *stream) {
  if (shape.logits_type == TOPW_FLOAT32) return launch_certify<float>(shape, call, stream);
  if (shape.logits_type == TOPW_FLOAT16) return launch_certify<Float16>(shape, call, stream);
  return launch_certify<Bfloat16>(shape, call, stream);
}

int launch_geometry(const topw_cuda_shape &shape, const Call &call, void *stream) {
  const unsigned threads = threads_of_block(kGeometryThreads);
  const size_t shared = geometry_shared_bytes(shape, threads);
  const int failed = allow_shared(geometry, shared);
  if (failed) return failed;
  const unsigned blocks = static_cast<unsigned>(multiprocessors());
  return launch(Launch{blocks, threads, shared, can_be_early(geometry), stream}, geometry, call);
}

bool fits(const topw_cuda_shape &shape, const topw_table *table, const topw_inputs &inputs) {
  return !refusal(shape) && inputs.batch >= 0 && inputs.batch <= shape.batch && inputs.vocab == shape.vocab &&
         inputs.edits >= 0 && inputs.edits <= shape.edits &&
         (inputs.words == 0 || inputs.words == words_of_mask(inputs.vocab)) && (table || shape.options.metric == TOPW_UNIFORM);
}

int launch_step(const topw_cuda_shape &shape, const topw_table *table, const topw_inputs &inputs,
                const topw_outputs &outputs, void *control, void *workspace, void *stream, int32_t parts) {
  if (!fits(shape, table, inputs)) return kUnlaunchable;
  if (inputs.batch == 0) return 0;
  Call call = call_of(shape, table, inputs, outputs, control, workspace);
  int failed = parts & TOPW_CUDA_CERTIFY ? launch_certify(shape, call, stream) : 0;
  if (!failed && parts & TOPW_CUDA_GEOMETRY) failed = launch_geometry(shape, call, stream);
  if (failed) {
    last_error();
    zero(control, static_cast<size_t>(control_bytes(shape)), stream);  // open rows that no geometry will answer
    last_error();
  }
  return failed;
}

}  // namespace
}  // namespace topw

extern "C" {

const char *topw_cuda_refusal(const topw_cuda_shape *shape) { return topw::refusal(*shape); }

int64_t topw_cuda_workspace_bytes(const topw_cuda_shape *shape) {
  int64_t bytes = 0;
  if (!topw::refusal(*shape)) topw::lay_out(*shape, nullptr, nullptr, &bytes);
  return bytes;
}

int64_t topw_cuda_control_bytes(const topw_cuda_shape *shape) {
  return topw::refusal(*shape) ? 0 : topw::control_bytes(*shape);
}

int topw_cuda_launch(const topw_cuda_shape *shape, const topw_table *table, const topw_inputs *inputs,
                     const topw_outputs *outputs, void *control, void *workspace, void *stream) {
  return topw_cuda_launch_parts(shape, table, inputs, outputs, control, workspace, stream,
                                TOPW_CUDA_CERTIFY | TOPW_CUDA_GEOMETRY);
}

int topw_cuda_launch_parts(const topw_cuda_shape *shape, const topw_table *table, const topw_inputs *inputs,
                           const topw_outputs *outputs, void *control, void *workspace, void *stream, int32_t parts) {
  return topw::launch_step(*shape, table, *inputs, *outputs, control, workspace, stream, parts);
}

int topw_cuda_allocate(int64_t bytes, void **memory) { return topw::allocate(static_cast<size_t>(bytes), memory); }
int topw_cuda_release(void *memory) { return topw::release(memory); }

const char *topw_cuda_error(int code) { return topw::error_text(code); }
int topw_cuda_device_count(void) { return topw::device_count(); }
int topw_cuda_abi_version(void) { return TOPW_CUDA_ABI_VERSION; }

#if defined(TOPW_EMULATE)
/* seed: of the order of threads; threads per block, 0 for the device's; multiprocessors. */
TOPW_EXPORT void topw_emulate(uint64_t seed, uint32_t threads, uint32_t blocks) {
  topw::emulator::settings = {seed, threads, blocks ? blocks : 1};
}
/* Concurrent blocks, 0 for one per multiprocessor; nanoseconds per unsuccessful wait. */
TOPW_EXPORT void topw_emulate_waiting(uint32_t resident, uint64_t tick) {
  topw::emulator::settings.resident = resident;
  topw::emulator::settings.tick = tick;
}
#endif

}  // extern "C"
