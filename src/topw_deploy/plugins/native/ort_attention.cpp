// topw::GroupQueryAttention for onnxruntime's CPU provider (docs/contract/graph.md, section 8).

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <new>

#include "hot.h"
#include "ort_operator.h"
#include "ort_shape.h"

namespace topw {
namespace {

using ort::Api;
using ort::Status;

enum Input {
  kQuery, kKey, kValue, kPastKey, kPastValue, kLast, kTotal, kCos, kSin, kPositions, kBias, kSink, kLengths, kInputs
};  // fmt: skip
constexpr size_t kOutputs = 3;
constexpr int64_t kSmallCall = 1 << 16;  // products of a query's element: fewer take less time than waking a thread
constexpr int64_t kFewParts = 8;         // fewer parts share their segments

struct Kernel {
  Api api;
  Attention shape;  // without what the call decides
  bool has[kInputs], rotates, interleaved, keeps_window, has_states;
};

// A call, its parts of queries, and the new keys and values where they lie in the inputs.
struct Call {
  const Kernel &kernel;
  Attention attention;
  const float *query, *key, *value;  // [batch, columns, ..], a column `query_stride` and `new_stride` floats wide
  int64_t query_stride, new_stride;
  const float *cos, *sin;  // [.., half]
  int64_t half;
  float *present_keys, *present_values;
  const float *past_keys, *past_values;
  float *staged_keys, *staged_values;  // for new tokens that would replace some that queries see; or null
  AttentionPart *parts;
  AttentionSums *sums;  // of each segment of each part, if parts share them
  int64_t *first_sums;  // [parts + 1]
  int64_t count;
};

// x [size] rotated by a position's angles: pairs are neighbours, or `half` apart; the rest is copied.
void rotate(const Call &call, const float *x, int64_t position, float *y) {
  const int64_t size = call.attention.size, half = call.kernel.rotates ? call.half : 0;
  const float *cos = call.cos + position * half, *sin = call.sin + position * half;
  const int64_t step = call.kernel.interleaved ? 2 : 1, apart = call.kernel.interleaved ? 1 : half;
  for (int64_t i = 0; i < half; ++i) {
    const float first = x[i * step], second = x[i * step + apart];
    y[i * step] = first * cos[i] - second * sin[i];
    y[i * step + apart] = second * cos[i] + first * sin[i];
  }
  for (int64_t i = 2 * half; i < size; ++i) y[i] = x[i];
}

// Rotates the queries and keys of a row and a key head, and stores its keys and values.
void place(void *data, size_t task) {
  Call &call = *static_cast<Call *>(data);
  const Attention &a = call.attention;
  const int64_t row = static_cast<int64_t>(task) / a.kv_heads, head = static_cast<int64_t>(task) % a.kv_heads;
  const size_t bytes = static_cast<size_t>(a.size) * sizeof(float);
  const int64_t past = a.past[row], state = (row * a.kv_heads + head) * a.capacity * a.size;
  if (call.present_keys && call.present_keys != call.past_keys) {
    const int64_t kept = past < a.capacity ? past : a.capacity;
    memcpy(call.present_keys + state, call.past_keys + state, static_cast<size_t>(kept) * bytes);
    memcpy(call.present_values + state, call.past_values + state, static_cast<size_t>(kept) * bytes);
  }
  float *keys = call.staged_keys ? call.staged_keys + (row * a.kv_heads + head) * a.columns * a.size
                                 : call.present_keys + state + past * a.size;
  float *values = call.staged_keys ? call.staged_values + (row * a.kv_heads + head) * a.columns * a.size
                                   : call.present_values + state + past * a.size;
  for (int64_t column = 0; column < a.columns; ++column) {
    const bool is_token = column < a.lengths[row];
    for (int64_t i = 0; i < a.group(); ++i) {
      float *query = a.output_of(row, head, column * a.group() + i);
      const float *from = call.query + (row * a.columns + column) * call.query_stride + (head * a.group() + i) * a.size;
      if (is_token)
        rotate(call, from, past + column, query);
      else
        memset(query, 0, bytes);
    }
    if (!is_token || !call.key) continue;
    const int64_t from = (row * a.columns + column) * call.new_stride + head * a.size;
    rotate(call, call.key + from, past + column, keys + column * a.size);
    memcpy(values + column * a.size, call.value + from, bytes);
  }
}

int64_t first_segment(const Attention &a, const AttentionPart &part) {
  return a.first_seen(a.position(part.row, part.first)) / kSegment;
}
int64_t last_segment(const Attention &a, const AttentionPart &part) {
  return a.position(part.row, part.first + part.count - 1) / kSegment;
}

void attend_part(void *data, size_t task) {
  const Call &call = *static_cast<Call *>(data);
  const Attention &a = call.attention;
  const AttentionPart &part = call.parts[task];
  const int64_t first = first_segment(a, part), last = last_segment(a, part);
  AttentionSums sums, later;
  hot().attend(a, part, first, sums);
  for (int64_t segment = first + 1; segment <= last; ++segment) {
    hot().attend(a, part, segment, later);
    hot().add_segment(a, part.count, later, sums);
  }
  hot().finish(a, part, sums);
}

void attend_segment(void *data, size_t task) {
  const Call &call = *static_cast<Call *>(data);
  int64_t part = 0;
  while (call.first_sums[part + 1] <= static_cast<int64_t>(task)) ++part;
  const int64_t segment = static_cast<int64_t>(task) - call.first_sums[part];
  hot().attend(call.attention, call.parts[part], first_segment(call.attention, call.parts[part]) + segment,
               call.sums[task]);
}

void join_segments(const Call &call) {
  for (int64_t part = 0; part < call.count; ++part) {
    AttentionSums &sums = call.sums[call.first_sums[part]];
    for (int64_t i = call.first_sums[part] + 1; i < call.first_sums[part + 1]; ++i)
      hot().add_segment(call.attention, call.parts[part].count, call.sums[i], sums);
    hot().finish(call.attention, call.parts[part], sums);
  }
}

// Moves staged keys or values into a state that keeps the last `capacity` tokens.
void keep_last(const Attention &a, int64_t row, int64_t head, const float *staged, float *state) {
  const int64_t past = a.past[row], total = past + a.lengths[row], first = total > a.capacity ? total - a.capacity : 0;
  const int64_t base = past > a.capacity ? past - a.capacity : 0;
  const size_t bytes = static_cast<size_t>(a.size) * sizeof(float);
  state += (row * a.kv_heads + head) * a.capacity * a.size;
  staged += (row * a.kv_heads + head) * a.columns * a.size;
  if (first < past) memmove(state, state + (first - base) * a.size, static_cast<size_t>(past - first) * bytes);
  const int64_t from = first > past ? first : past;
  memcpy(state + (from - first) * a.size, staged + (from - past) * a.size, static_cast<size_t>(total - from) * bytes);
}

Status *run(const Api &api, ort::KernelContext *context, Call &call) {
  const Attention &a = call.attention;
  int64_t work = 0;
  for (int64_t row = 0; row < a.batch; ++row)
    work += (a.past[row] + a.lengths[row]) * a.lengths[row] * a.heads * a.size;
  const bool is_small = work < kSmallCall;
  const auto each = [&](void (*function)(void *, size_t), int64_t count) -> Status * {
    if (!is_small && count > 1) return api[ort::parallel_for](context, function, static_cast<size_t>(count), 0, &call);
    for (int64_t i = 0; i < count; ++i) function(&call, static_cast<size_t>(i));
    return nullptr;
  };
  TOPW_TRY(each(place, a.batch * a.kv_heads));
  if (call.sums) {
    TOPW_TRY(each(attend_segment, call.first_sums[call.count]));
    join_segments(call);
  } else {
    TOPW_TRY(each(attend_part, call.count));
  }
  for (int64_t i = 0; call.staged_keys && i < a.batch * a.kv_heads; ++i) {
    keep_last(a, i / a.kv_heads, i % a.kv_heads, call.staged_keys, call.present_keys);
    keep_last(a, i / a.kv_heads, i % a.kv_heads, call.staged_values, call.present_values);
  }
  return nullptr;
}

// Memory of a call, cut into arrays.
class Arena {
 public:
  ~Arena() { free(memory_); }
  template <typename Element>
  size_t add(int64_t count) {
    const size_t offset = size_;
    size_ += (static_cast<size_t>(count) * sizeof(Element) + 63) / 64 * 64;
    return offset;
  }
  bool allocate() { return (memory_ = static_cast<char *>(aligned_alloc(64, size_ ? size_ : 64))) != nullptr; }
  template <typename Element>
  Element *at(size_t offset) const {
    return reinterpret_cast<Element *>(memory_ + offset);
  }

 private:
  char *memory_ = nullptr;
  size_t size_ = 0;
};

Status *read_call(const Api &api, const ort::KernelContext *context, Call &call, const int32_t **last,
                  const int64_t **lengths) {
  const Kernel &kernel = call.kernel;
  Attention &a = call.attention;
  int64_t query[kMostDimensions], state[kMostDimensions], sizes[kMostDimensions];
  size_t query_rank = 0, state_rank = 0, rank = 0;
  TOPW_TRY(read_sizes(api, context, kQuery, query, &query_rank));
  TOPW_TRY(read_sizes(api, context, kPastKey, state, &state_rank));
  const int64_t all_heads = a.heads + (kernel.has[kKey] ? 0 : 2 * a.kv_heads);
  if (query_rank != 3 || state_rank != 4 || state[0] != query[0] || state[1] != a.kv_heads || state[3] < 1 ||
      state[3] > kLargestHead || query[2] != all_heads * state[3])
    return refuse(api, ort::kInvalidArgument, "GroupQueryAttention has queries of %lld elements, states of %lld heads",
                  static_cast<long long>(query[2]), static_cast<long long>(state[1]));
  a.batch = query[0], a.columns = query[1], a.capacity = state[2], a.size = state[3];
  call.query_stride = query[2], call.new_stride = kernel.has[kKey] ? a.kv_heads * a.size : query[2];
  TOPW_TRY(address(api, context, true, kQuery, &call.query));
  TOPW_TRY(address(api, context, kernel.has[kKey], kKey, &call.key));
  TOPW_TRY(address(api, context, kernel.has[kKey], kValue, &call.value));
  if (!kernel.has_states) {
    call.key = nullptr;  // other nodes' keys, which the states have
  } else if (!kernel.has[kKey]) {
    call.key = call.query + a.heads * a.size;
    call.value = call.key + a.kv_heads * a.size;
  }
  TOPW_TRY(address(api, context, true, kPastKey, &call.past_keys));
  TOPW_TRY(address(api, context, true, kPastValue, &call.past_values));
  TOPW_TRY(address(api, context, true, kLast, last));
  TOPW_TRY(address(api, context, true, kLengths, lengths));
  TOPW_TRY(address(api, context, kernel.rotates, kCos, &call.cos));
  TOPW_TRY(address(api, context, kernel.rotates, kSin, &call.sin));
  TOPW_TRY(address(api, context, kernel.has[kBias], kBias, &a.bias));
  TOPW_TRY(address(api, context, kernel.has[kSink], kSink, &a.sink));
  int64_t angles = INT64_MAX;
  if (kernel.rotates) {
    TOPW_TRY(read_sizes(api, context, kCos, sizes, &rank));
    angles = sizes[0], call.half = sizes[1];
  }
  for (int64_t row = 0; row < a.batch; ++row) {
    const int64_t past = (*last)[row] + 1 - a.columns, total = past + (*lengths)[row];
    if (past < 0 || (*lengths)[row] < 0 || (*lengths)[row] > a.columns || total > angles ||
        (!kernel.keeps_window && total > a.capacity))
      return refuse(api, ort::kInvalidArgument, "GroupQueryAttention has %lld tokens for %lld slots",
                    static_cast<long long>(total), static_cast<long long>(a.capacity));
  }
  if (kernel.has[kBias]) {
    TOPW_TRY(read_sizes(api, context, kBias, sizes, &rank));
    a.bias_column = sizes[3];
    a.bias_head = sizes[1] == 1 ? 0 : sizes[2] * sizes[3];
    a.bias_row = sizes[0] == 1 ? 0 : sizes[1] * sizes[2] * sizes[3];
  }
  return nullptr;
}

Status *output_data(const Api &api, ort::KernelContext *context, size_t index, const int64_t *sizes, size_t rank,
                    float **found) {
  ort::Value *output = nullptr;
  void *data = nullptr;
  TOPW_TRY(api[ort::get_output](context, index, sizes, rank, &output));
  TOPW_TRY(api[ort::tensor_data](output, &data));
  *found = static_cast<float *>(data);
  return nullptr;
}

Status *compute(void *kernel_data, ort::KernelContext *context) {
  const Kernel &kernel = *static_cast<const Kernel *>(kernel_data);
  const Api &api = kernel.api;
  Call call{kernel,  kernel.shape, nullptr, nullptr, nullptr, 0,       0,       nullptr, nullptr, 0,
            nullptr, nullptr,      nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, 0};
  Attention &a = call.attention;
  const int32_t *last = nullptr;
  const int64_t *lengths = nullptr;
  TOPW_TRY(read_call(api, context, call, &last, &lengths));
  const int64_t output[] = {a.batch, a.columns, a.heads * a.size};
  const int64_t state[] = {a.batch, a.kv_heads, a.capacity, a.size};
  TOPW_TRY(output_data(api, context, 0, output, 3, &a.output));
  if (kernel.has_states) {
    TOPW_TRY(output_data(api, context, 1, state, 4, &call.present_keys));
    TOPW_TRY(output_data(api, context, 2, state, 4, &call.present_values));
  }
  Arena arena;
  const int64_t most = queries_per_part(a.size), queries = a.columns * a.group();
  const int64_t parts_of_head = (queries + most - 1) / most, most_parts = a.batch * a.kv_heads * parts_of_head;
  int64_t longest = 0;
  bool stages = false;
  const size_t past = arena.add<int64_t>(a.batch), parts = arena.add<AttentionPart>(most_parts);
  for (int64_t row = 0; row < a.batch; ++row) {
    const int64_t total = last[row] + 1 - a.columns + lengths[row];
    stages = stages || total > a.capacity;
    longest = longest > total ? longest : total;
  }
  const int64_t staged = stages ? a.batch * a.kv_heads * a.columns * a.size : 0;
  const bool shares = most_parts < kFewParts && longest > kSegment;
  const size_t staged_keys = arena.add<float>(staged), staged_values = arena.add<float>(staged);
  const size_t first_sums = arena.add<int64_t>(most_parts + 1);
  const size_t sums = arena.add<AttentionSums>(shares ? most_parts * (longest / kSegment + 1) : 0);
  if (!arena.allocate()) return refuse(api, ort::kFail, "out of memory");
  int64_t *pasts = arena.at<int64_t>(past);
  for (int64_t row = 0; row < a.batch; ++row) pasts[row] = last[row] + 1 - a.columns;
  a.past = pasts;
  a.lengths = lengths;
  call.parts = arena.at<AttentionPart>(parts);
  call.first_sums = arena.at<int64_t>(first_sums);
  call.sums = shares ? arena.at<AttentionSums>(sums) : nullptr;
  if (stages) {
    call.staged_keys = arena.at<float>(staged_keys), call.staged_values = arena.at<float>(staged_values);
    a.new_keys = call.staged_keys, a.new_values = call.staged_values;
  }
  a.keys = call.present_keys ? call.present_keys : call.past_keys;
  a.values = call.present_keys ? call.present_values : call.past_values;
  call.first_sums[0] = 0;
  for (int64_t row = 0; row < a.batch; ++row)
    for (int64_t head = 0; head < a.kv_heads; ++head)
      for (int64_t first = 0; first < lengths[row] * a.group(); first += most) {
        const int64_t rest = lengths[row] * a.group() - first;
        AttentionPart &part = call.parts[call.count] = {row, head, first, rest < most ? rest : most};
        const int64_t segments = last_segment(a, part) - first_segment(a, part) + 1;
        call.first_sums[call.count + 1] = call.first_sums[call.count] + segments;
        ++call.count;
      }
  return run(api, context, call);
}

// The value of an attribute; as it was if the node lacks it.
template <typename Value>
void read_optional(const Api &api, const ort::KernelInfo *info,
                   ort::Slot<Status *(const ort::KernelInfo *, const char *, Value *)> kind, const char *name,
                   Value *value) {
  Value found;
  if (Status *absent = api[kind](info, name, &found))
    api[ort::release_status](absent);
  else
    *value = found;
}

Status *read_kernel(const Api &api, const ort::KernelInfo *info, Kernel *kernel) {
  Attention &a = kernel->shape;
  int64_t rotates = 0, interleaved = 0, window = -1, keeps_window = 0;
  TOPW_TRY(api[ort::int_attribute](info, "num_heads", &a.heads));
  TOPW_TRY(api[ort::int_attribute](info, "kv_num_heads", &a.kv_heads));
  TOPW_TRY(api[ort::float_attribute](info, "scale", &a.scale));
  read_optional(api, info, ort::float_attribute, "softcap", &a.softcap);
  read_optional(api, info, ort::int_attribute, "do_rotary", &rotates);
  read_optional(api, info, ort::int_attribute, "rotary_interleaved", &interleaved);
  read_optional(api, info, ort::int_attribute, "local_window_size", &window);
  read_optional(api, info, ort::int_attribute, "sliding_window_cache", &keeps_window);
  if (a.kv_heads < 1 || a.heads < 1 || a.heads % a.kv_heads)
    return refuse(api, ort::kInvalidArgument, "GroupQueryAttention has %lld heads and %lld key heads",
                  static_cast<long long>(a.heads), static_cast<long long>(a.kv_heads));
  a.window = window > 0 ? window : 0;
  kernel->rotates = rotates, kernel->interleaved = interleaved, kernel->keeps_window = keeps_window;
  size_t outputs = 0;
  TOPW_TRY(api[ort::output_count](info, &outputs));
  kernel->has_states = outputs == kOutputs;
  for (size_t index = 0; index < kInputs; ++index) {
    ort::TypeInfo *type = nullptr;
    Status *absent = api[ort::input_type](info, index, &type);  // an input with an empty name has no type
    kernel->has[index] = !absent;
    absent ? api[ort::release_status](absent) : api[ort::release_type_info](type);
  }
  return nullptr;
}

void destroy(void *data) { free(data); }

Status *make(const ort::Operator *, const ort::Function *table, const ort::KernelInfo *info, void **made) {
  const Api api(table);
  void *memory = malloc(sizeof(Kernel));
  if (!memory) return refuse(api, ort::kFail, "out of memory");
  Kernel *kernel = new (memory) Kernel{api, {}, {}, false, false, false, false};
  if (Status *failed = read_kernel(api, info, kernel)) {
    destroy(kernel);
    return failed;
  }
  *made = kernel;
  return nullptr;
}

ort::Operator make_attention_operator(size_t outputs) {
  ort::Operator op = shared_operator();
  op.name = [](const ort::Operator *) {
    return are_operators_hidden() ? "GroupQueryAttentionHidden" : "GroupQueryAttention";
  };
  if (outputs == 1)
    op.name = [](const ort::Operator *) {
      return are_operators_hidden() ? "GroupQueryAttentionReadOnlyHidden" : "GroupQueryAttentionReadOnly";
    };
  op.provider = [](const ort::Operator *) { return "CPUExecutionProvider"; };
  op.input_count = [](const ort::Operator *) { return size_t{kInputs}; };
  op.input_type = [](const ort::Operator *, size_t index) -> int {
    return index == kLast || index == kTotal      ? ort::kInt32
           : index == kPositions || index == kLengths ? ort::kInt64
                                                      : ort::kFloat;
  };
  op.input_presence = [](const ort::Operator *, size_t index) -> int {
    return index == kQuery || index == kLengths || (index >= kPastKey && index <= kTotal) ? ort::kRequired
                                                                                          : ort::kOptional;
  };
  op.output_count = [](const ort::Operator *) { return kOutputs; };
  if (outputs == 1) op.output_count = [](const ort::Operator *) { return size_t{1}; };
  op.output_type = [](const ort::Operator *, size_t) -> int { return ort::kFloat; };
  op.output_presence = [](const ort::Operator *, size_t) -> int { return ort::kRequired; };
  op.make = make;
  op.compute = compute;
  op.destroy = destroy;
  return op;
}

}  // namespace

const ort::Operator attention_operator = make_attention_operator(kOutputs);
const ort::Operator read_only_attention_operator = make_attention_operator(1);

}  // namespace topw
