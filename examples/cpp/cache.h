// The key-value cache's two forms and their inputs (docs/contract/graph.md, section 8). B: rows of the batch. S: tokens
// of the longest prompt.
#ifndef TOPW_CACHE_H
#define TOPW_CACHE_H

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "common.h"
#include "folder.h"
#include "onnxruntime.h"

namespace topw {

class Cache {
 public:
  explicit Cache(std::size_t rows) : next_ids(rows, 0) {}
  virtual ~Cache() = default;
  virtual void feed_prompts() = 0;  // binds [B, S]: the prompts, for one run
  // Binds [B, 1]: `next_ids`, for a step. Inactive rows overwrite their last token.
  virtual void feed_tokens(const std::vector<bool> &active) = 0;

  Tokens next_ids;
};

struct Rows {
  std::vector<Tokens> prompts;
  Tokens budgets;  // new tokens per row, at most

  std::int64_t count() const { return std::int64_t(prompts.size()); }
  std::int64_t width() const {
    std::size_t most = 0;
    for (const Tokens &prompt : prompts) most = std::max(most, prompt.size());
    return std::int64_t(most);
  }
  std::int64_t tokens() const {  // of the longest row
    std::int64_t most = 0;
    for (std::size_t i = 0; i < prompts.size(); ++i)
      most = std::max(most, std::int64_t(prompts[i].size()) + budgets[i]);
    return most;
  }
};

inline std::size_t elements(const Shape &shape) {
  return std::accumulate(shape.begin(), shape.end(), std::size_t{1}, std::multiplies<>());
}

// Buffers must be finite: masked values may still be multiplied.
inline void clear(const Session &session, void *data, std::size_t bytes) {
  if (!session.on_device) {
    std::memset(data, 0, bytes);
    return;
  }
  using Set = int(unsigned long long address, unsigned char value, std::size_t count);
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  const auto set = driver ? reinterpret_cast<Set *>(dlsym(driver, "cuMemsetD8_v2")) : nullptr;
  if (!set || set(reinterpret_cast<std::uintptr_t>(data), 0, bytes) != 0)
    throw Failure("the cache cannot be cleared on the device; check NVIDIA's driver.");
}

// static: one buffer for each state, bound once as past and present. A step updates ids and indices in place.
class StaticCache : public Cache {
 public:
  StaticCache(const Session &session, const Folder &folder, Binding &binding, const Rows &rows)
      : Cache(rows.prompts.size()),
        session_(session),
        binding_(binding),
        has_total_(folder.inputs.count("total_sequence_length") > 0),
        count_(rows.count()),
        width_(rows.width()),
        ids_(count_ * width_, 0),
        written_(count_, 0) {
    for (std::int64_t row = 0; row < count_; ++row) {  // right padding
      const Tokens &prompt = rows.prompts[row];
      std::copy(prompt.begin(), prompt.end(), ids_.begin() + row * width_);
      lengths_.push_back(std::int64_t(prompt.size()));
    }
    const std::int64_t tokens = rows.tokens();
    const std::int64_t rounded = std::min((tokens + 63) / 64 * 64, std::max(folder.context, tokens));
    for (const State &state : folder.states) {
      const auto tokens_axis = std::find(state.shape.begin(), state.shape.end(), 0);
      const bool grows = tokens_axis != state.shape.end();
      const std::int64_t fixed = grows ? folder.fixed_size(state.past, 1 + (tokens_axis - state.shape.begin())) : -1;
      if (fixed >= 0 && fixed < tokens)
        throw Failure("prompt and answer may have " + std::to_string(tokens) + " tokens, but this export's cache " +
                      "holds " + std::to_string(fixed) + "; lower --max-new-tokens.");
      if (grows || room_ == 0) room_ = fixed >= 0 ? fixed : std::max(rounded, folder.buffer_least);
      bind(state);
    }
  }

  void feed_prompts() override {
    binding_.host_input("input_ids", ids_.data(), {count_, width_});
    binding_.changing_input("write_indices", written_.data(), {count_});
    binding_.host_input("row_lengths", lengths_.data(), {count_});
    bind_total(width_);
  }
  void feed_tokens(const std::vector<bool> &active) override {
    if (!decoding_) begin_decoding();
    for (std::size_t row = 0; row < active.size(); ++row) written_[row] += active[row];
  }

 private:
  void begin_decoding() {
    decoding_ = true;
    for (std::size_t row = 0; row < written_.size(); ++row) written_[row] = lengths_[row] - 1;  // last token
    std::fill(lengths_.begin(), lengths_.end(), 1);
    binding_.changing_input("input_ids", next_ids.data(), {count_, 1});
    binding_.host_input("row_lengths", lengths_.data(), {count_});
    bind_total(room_);
  }
  // Slots that a run may attend to. GroupQueryAttention always reads this number on the host.
  void bind_total(std::int64_t tokens) {
    total_ = std::int32_t(tokens);
    if (has_total_) binding_.host_input("total_sequence_length", &total_, {1});
  }
  void bind(const State &state) {
    const Shape shape = state.sized(count_, room_);
    const Value value = make<OrtValue>(ort->ReleaseValue, ort->CreateTensorAsOrtValue, session_.allocator.get(),
                                       shape.data(), shape.size(), state.type);
    void *data = nullptr;
    check(ort->GetTensorMutableData(value.get(), &data));
    clear(session_, data, elements(shape) * cache_element_bytes(state.type));
    binding_.input(state.past, value.get());  // keeps the tensor alive
    binding_.output(state.present, value.get());
  }

  const Session &session_;
  Binding &binding_;
  const bool has_total_;
  const std::int64_t count_, width_;  // B, S
  Tokens ids_;                        // of the prompts
  Tokens written_, lengths_;          // each row's length before a run; the tokens that the run appends
  std::int64_t room_ = 0;             // slots per row
  std::int32_t total_ = 0;
  bool decoding_ = false;
};

// concat: the present of a run is the past of the next, passed as onnxruntime values. Prompts are padded on the left,
// so that their last tokens share the last column.
class ConcatCache : public Cache {
 public:
  ConcatCache(const Session &session, const Folder &folder, Binding &binding, const Rows &rows)
      : Cache(rows.prompts.size()),
        folder_(folder),
        binding_(binding),
        count_(rows.count()),
        width_(rows.width()),
        room_(width_ + *std::max_element(rows.budgets.begin(), rows.budgets.end())),
        ids_(count_ * width_, 0),
        positions_(count_ * width_, 0),
        mask_(count_ * room_, 0) {
    for (std::int64_t row = 0; row < count_; ++row) {
      const Tokens &prompt = rows.prompts[row];
      const std::int64_t start = width_ - std::int64_t(prompt.size());
      std::copy(prompt.begin(), prompt.end(), ids_.begin() + row * width_ + start);
      std::iota(positions_.begin() + row * width_ + start, positions_.begin() + (row + 1) * width_, 0);
      std::fill_n(mask_.begin() + row * room_ + start, prompt.size(), 1);
      last_.push_back(std::int64_t(prompt.size()) - 1);
    }
    for (const State &state : folder.states) {
      const Shape shape = state.sized(count_, 0);
      const Value first = make<OrtValue>(ort->ReleaseValue, ort->CreateTensorAsOrtValue, session.allocator.get(),
                                         shape.data(), shape.size(), state.type);
      void *data = nullptr;
      check(ort->GetTensorMutableData(first.get(), &data));
      if (const std::size_t size = elements(shape)) clear(session, data, size * cache_element_bytes(state.type));
      binding.input(state.past, first.get());
      binding.fresh_output(state.present);
    }
  }

  void feed_prompts() override {
    binding_.host_input("input_ids", ids_.data(), {count_, width_});
    if (folder_.inputs.count("position_ids")) binding_.host_input("position_ids", positions_.data(), {count_, width_});
    bind_mask();
  }
  void feed_tokens(const std::vector<bool> &active) override {
    const std::vector<Value> presents = binding_.outputs();  // the presents come first: they were bound first
    for (std::size_t i = 0; i < folder_.states.size(); ++i) {
      binding_.input(folder_.states[i].past, presents[i].get());
      binding_.fresh_output(folder_.states[i].present);
    }
    for (std::int64_t row = 0; row < count_; ++row) {
      mask_[row * room_ + width_] = active[row];
      last_[row] += active[row];  // only active rows, because positions must stay inside the context
    }
    ++width_;
    if (!decoding_) {
      decoding_ = true;
      binding_.changing_input("input_ids", next_ids.data(), {count_, 1});
      if (folder_.inputs.count("position_ids")) binding_.changing_input("position_ids", last_.data(), {count_, 1});
    }
    bind_mask();
  }

 private:
  void bind_mask() {
    if (!folder_.inputs.count("attention_mask")) return;
    bound_mask_.resize(count_ * width_);
    for (std::int64_t row = 0; row < count_; ++row)
      std::copy_n(mask_.begin() + row * room_, width_, bound_mask_.begin() + row * width_);
    binding_.host_input("attention_mask", bound_mask_.data(), {count_, width_});
  }

  const Folder &folder_;
  Binding &binding_;
  const std::int64_t count_;  // B
  std::int64_t width_;        // columns of the past and of the next run
  const std::int64_t room_;   // columns of `mask_`
  Tokens ids_, positions_;    // of the prompts
  Tokens mask_, bound_mask_;
  Tokens last_;  // each row's last position
  bool decoding_ = false;
};

inline std::unique_ptr<Cache> open_cache(const Session &session, const Folder &folder, Binding &binding,
                                         const Rows &rows) {
  if (folder.in_place) return std::make_unique<StaticCache>(session, folder, binding, rows);
  return std::make_unique<ConcatCache>(session, folder, binding, rows);
}

}  // namespace topw

#endif
