// Attention of new tokens to a cache, as in onnxruntime's GroupQueryAttention.
//
// A query's result depends neither on other queries, nor on how many are computed together, nor on threads, nor, with
// fused multiply-adds, on the instruction set: scores are summed in the order of dimensions, values in that of slots.
// Segments of kSegment slots have sums of their own, relative to their highest score, and are added in their order
// (online softmax, Milakov and Gimelshein, arXiv 1805.02867).
#ifndef TOPW_ATTENTION_H
#define TOPW_ATTENTION_H

#include <stdint.h>

namespace topw {

constexpr int64_t kSegment = 256;  // slots, from a multiple of it on
constexpr int64_t kMostQueries = 48, kMostElements = 6144, kLargestHead = 512;  // of a part

// All arrays are borrowed. A row's tokens have positions; its state begins with the token at `base`.
struct Attention {
  int64_t batch, columns, heads, kv_heads, size;  // size of a head
  int64_t window;                                 // tokens that a query sees, its own included; 0: all
  float scale, softcap;                           // softcap 0: none
  int64_t capacity;                               // slots of a state
  const float *keys, *values;                     // states [batch, kv_heads, capacity, size]
  const float *new_keys, *new_values;  // [batch, kv_heads, columns, size] that the states lack; null: they have all
  const int64_t *past, *lengths;       // [batch]: tokens before the call; columns that hold tokens
  const float *bias;                   // of scores; null: none
  int64_t bias_row, bias_head, bias_column;  // its strides
  const float *sink;                         // [heads], scores without values; null: none
  float *output;  // [batch, columns, heads, size]; before, the rotated queries

  int64_t group() const { return heads / kv_heads; }
  int64_t base(int64_t row) const { return new_keys && past[row] > capacity ? past[row] - capacity : 0; }
  float *output_of(int64_t row, int64_t kv_head, int64_t query) const {
    return output + ((row * columns + query / group()) * heads + kv_head * group() + query % group()) * size;
  }
  int64_t position(int64_t row, int64_t query) const { return past[row] + query / group(); }
  int64_t first_seen(int64_t position) const { return window && position >= window ? position - window + 1 : 0; }
};

// Queries `first` to `first + count - 1` of a row and a key head; query i is that of column i / group, head i % group.
struct AttentionPart {
  int64_t row, kv_head, first, count;
};

// Per query: the highest score, the sum of weights relative to it, and that of the weighted values.
struct AttentionSums {
  alignas(64) float values[kMostElements];
  float highest[kMostQueries], total[kMostQueries];
};

// Heads are padded to vectors of at most 16 floats.
constexpr int64_t padded_head(int64_t size) { return (size + 15) / 16 * 16; }
inline int64_t queries_per_part(int64_t size) {
  const int64_t most = kMostElements / padded_head(size) / 12 * 12;  // twelve are multiplied together
  return most < kMostQueries ? most : kMostQueries;
}

}  // namespace topw
#endif
