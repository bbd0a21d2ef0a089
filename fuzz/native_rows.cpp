// Fuzzes the native sampler and products: bytes become options, parameters, rules, logits, edits and a table, or the
// factors of a product, and the answers must have the properties that docs/contract/graph.md and product.h promise.
//
// With libFuzzer (clang++ -fsanitize=fuzzer,address,undefined), compile this file and the library's files. With other
// compilers, add -DTOPW_FUZZ_MAIN for a driver of random bytes: `native_rows SECONDS [SEED]`, or `native_rows FILE` to
// repeat an input that libFuzzer found. Every buffer has exactly the size that the interface states, so that a read
// beyond it is detected.

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <memory>
#include <vector>

#include "product.h"
#include "topw.h"

namespace {

void require(bool holds, const char *what) {
  if (holds) return;
  fprintf(stderr, "does not hold: %s\n", what);
  abort();
}

// Numbers from the input's bytes; zeros once it is used up.
class Bytes {
 public:
  Bytes(const uint8_t *data, size_t size) : data_(data), size_(size) {}

  template <class T>
  T take() {
    T value{};
    const size_t count = sizeof value < size_ ? sizeof value : size_;
    if (count > 0) memcpy(&value, data_, count);
    data_ += count;
    size_ -= count;
    return value;
  }

  template <class T, size_t n>
  T one_of(const T (&choices)[n]) {
    return choices[take<uint8_t>() % n];
  }

 private:
  const uint8_t *data_;
  size_t size_;
};

// Mixes a position into a value, without a pattern that the sampler could exploit.
uint32_t mixed(uint64_t seed, uint64_t position) {
  uint64_t x = seed + position * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return static_cast<uint32_t>(x >> 32);
}

float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

constexpr int64_t kSmallEnough = 5000;  // tokens: rows up to here are sampled in every way
constexpr float kSpecial[] = {0.0f,  -0.0f,   1e-45f,  -1e-45f,   1e-38f,    3.4e38f, -3.4e38f,
                              88.0f, -1e30f, INFINITY, -INFINITY, NAN, 1.0f,    -1.0f};

// A number for a parameter: usually in its interval, sometimes anything.
float parameter(Bytes &in, float low, float high) {
  const uint8_t kind = in.take<uint8_t>();
  if (kind >= 250) return in.one_of(kSpecial);
  if (kind >= 248) return in.take<float>();
  return low + (high - low) * static_cast<float>(in.take<uint16_t>()) / 65535.0f;
}

// Values of one kind: flat, peaked, tied, equal, subnormal, half banned, or any bits at all.
std::vector<float> values(Bytes &in, int64_t count, bool tame) {
  const uint8_t kind = in.take<uint8_t>();
  const uint64_t seed = in.take<uint32_t>();
  const float spread = static_cast<float>(in.take<uint8_t>()) / 16.0f;
  std::vector<float> made(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = mixed(seed, static_cast<uint64_t>(i));
    const float plain = (static_cast<float>(bits >> 8) / 16777216.0f - 0.5f) * spread;
    float &value = made[static_cast<size_t>(i)];
    switch (kind % 8) {
      case 1: value = plain * plain * plain; break;
      case 2: value = roundf(plain * 2); break;
      case 3: value = spread; break;
      case 4: value = from_bits(bits & 0x807fffffu); break;
      case 5: value = !tame && bits % 2 ? -INFINITY : plain; break;
      case 6: value = tame ? plain : from_bits(bits & 0xbfffffffu); break;
      default: value = plain;
    }
  }
  for (int patches = in.take<uint8_t>() % 8; patches > 0; --patches) {
    const int64_t at = in.take<uint32_t>() % count;
    made[static_cast<size_t>(at)] = kind & 128 ? in.one_of(kSpecial) : in.take<int16_t>() / 1024.0f;
  }
  return made;
}

struct Row {
  topw_options options{};
  bool with_table = false;
  int64_t vocab = 1, hidden = 1, edits = 0;
  std::vector<float> table, mean, inverse_std, bound;
  std::vector<uint16_t> half, half_scales;
  std::vector<uint8_t> codes, zeros;
  std::vector<float> scales;
  topw_blocks blocks{};
  int32_t element = 0;  // of the codes
  std::vector<float> logits, penalty, bias;
  std::vector<int64_t> ids;
  std::vector<int32_t> allowed;  // empty: no mask
  float columns[7] = {};
  int32_t rule = TOPW_RULE_TOP_W;
  float rule_values[2] = {};

  explicit Row(Bytes &in) {
    constexpr int64_t kVocab[] = {1, 2, 15, 16, 17, 100, 127, 128, 129, 255, 1000, 2048, 5000};
    constexpr int64_t kLargestVocab = 300000;  // used rarely: it takes a hundred times as long
    constexpr int64_t kPool[] = {1, 2, 7, 63, 64, 65, 200, 1200, 5001, 1000000, INT64_MAX};
    constexpr int64_t kSteps[] = {1, 2, 3, 9, 100, INT64_MAX};
    constexpr int32_t kNeighbours[] = {0, 0, 0, 1, 2, 4, 17, INT32_MAX};
    constexpr int64_t kHidden[] = {1, 2, 3, 7, 8, 9, 31, 40, 260};
    options.top_m = in.one_of(kPool);
    options.alt_iters = in.one_of(kSteps);
    options.metric = in.take<uint8_t>() % 4;
    options.knn_k = in.one_of(kNeighbours);
    const uint8_t large = in.take<uint8_t>();
    vocab = large >= 253 ? kLargestVocab : in.one_of(kVocab);
    with_table = options.metric != TOPW_UNIFORM;
    if (with_table && vocab > 400) vocab = 400 - vocab % 7;  // the literal rule over more takes too long to fuzz
    hidden = in.one_of(kHidden);
    if (with_table) read_table(in);
    logits = values(in, vocab, false);
    read_edits(in);
    read_mask(in);
    const float all[7] = {parameter(in, 0, 3),     parameter(in, 0, 2), parameter(in, 0, 3), parameter(in, 0, 6),
                          parameter(in, 0.01f, 1), parameter(in, -1, 3), parameter(in, 0, 0.99999f)};
    memcpy(columns, all, sizeof all);
    read_rule(in);
  }

  // Half the rows use Top-W, some an unknown rule; values are mostly in their intervals.
  void read_rule(Bytes &in) {
    constexpr float kCounts[] = {1, 2, 50, 64, 65, 100, 1024, 1025, 4000, 16777216};
    const uint8_t kind = in.take<uint8_t>();
    if (kind < 128) return;
    rule = kind == 255 ? in.take<int32_t>() : kind % 12;
    rule_values[0] = rule == TOPW_RULE_TOP_K ? in.one_of(kCounts) : parameter(in, 0.0001f, rule == TOPW_RULE_TOP_N_SIGMA ? 4 : 0.9999f);
    rule_values[1] = in.take<uint8_t>() == 0 ? in.one_of(kSpecial) : in.one_of(kCounts);
  }

  void read_table(Bytes &in) {
    table = values(in, vocab * hidden, !(in.take<uint8_t>() & 1));
    mean = values(in, hidden, true);
    inverse_std = values(in, hidden, true);
    if (in.take<uint8_t>() % 4 == 0) bound = values(in, vocab, true);
    if (in.take<uint8_t>() % 3 == 0)
      for (size_t i = 0; i < table.size(); ++i) half.push_back(static_cast<uint16_t>(mixed(i, 7) >> 16));
    else if (in.take<uint8_t>() % 3 == 0)
      read_blocks(in);
  }

  // Codes in every form, each buffer exactly as large as necessary.
  void read_blocks(Bytes &in) {
    constexpr int32_t kElements[] = {TOPW_UINT8, TOPW_UINT8, TOPW_UINT4, TOPW_INT4}, kSizes[] = {16, 32, 64, 128, 65536};
    element = in.one_of(kElements);
    blocks.bits = element == TOPW_UINT8 && in.take<uint8_t>() % 2 ? 8 : 4;
    blocks.block_size = in.one_of(kSizes);
    if (element == TOPW_UINT8 && blocks.bits == 4 && hidden % 2) blocks.bits = 8;
    const int64_t in_row = (hidden + blocks.block_size - 1) / blocks.block_size;
    const bool joined = element != TOPW_UINT8;  // packed from the first to the last
    const auto bytes = [&](int64_t per_row) {
      if (joined) return (vocab * per_row + 1) / 2;
      return blocks.bits == 8 ? vocab * per_row : vocab * ((per_row + 1) / 2);
    };
    const uint64_t seed = in.take<uint32_t>();
    for (int64_t i = 0; i < bytes(hidden); ++i) codes.push_back(static_cast<uint8_t>(mixed(seed, i)));
    if (in.take<uint8_t>() % 2)
      for (int64_t i = 0; i < bytes(in_row); ++i) zeros.push_back(static_cast<uint8_t>(mixed(seed + 1, i)));
    scales = values(in, vocab * in_row, !(in.take<uint8_t>() & 1));
    blocks.scale_type = TOPW_FLOAT32;
    if (in.take<uint8_t>() % 3 == 0) {
      blocks.scale_type = TOPW_FLOAT16;
      for (size_t i = 0; i < scales.size(); ++i) half_scales.push_back(static_cast<uint16_t>(mixed(seed + 2, i)));
    }
  }

  // The table in the interface's form; it points into this row.
  topw_table described() const {
    topw_table made = {table.data(), vocab, hidden, TOPW_FLOAT32, 0, mean.data(), inverse_std.data(),
                       bound.empty() ? nullptr : bound.data(), {}};
    if (!half.empty()) {
      made.rows = half.data();
      made.dtype = hidden % 2 ? TOPW_FLOAT16 : TOPW_BFLOAT16;
    } else if (blocks.bits != 0) {
      made.rows = codes.data();
      made.dtype = element;
      made.blocks = blocks;
      made.blocks.scales = half_scales.empty() ? static_cast<const void *>(scales.data()) : half_scales.data();
      made.blocks.zero_points = zeros.empty() ? nullptr : zeros.data();
    }
    return made;
  }

  void read_edits(Bytes &in) {
    edits = in.take<uint8_t>() % 8 == 0 ? in.take<uint8_t>() : 0;
    for (int64_t e = 0; e < edits; ++e) {
      const uint8_t kind = in.take<uint8_t>();
      ids.push_back(kind < 16 ? -1 : kind < 20 ? in.take<int64_t>() : in.take<uint32_t>() % vocab);
      penalty.push_back(kind > 252 ? in.one_of(kSpecial) : 0.5f + static_cast<float>(kind) / 128.0f);
      bias.push_back(kind > 240 ? -INFINITY : kind == 30 ? in.one_of(kSpecial) : 0.25f);
    }
  }

  // Mostly no mask; else every token, none, few, half or most of them, or runs.
  void read_mask(Bytes &in) {
    if (in.take<uint8_t>() % 3 != 0) return;
    const uint8_t kind = in.take<uint8_t>();
    const uint64_t seed = in.take<uint32_t>();
    for (int64_t word = 0; word < (vocab + 31) / 32; ++word) {
      const uint32_t bits = mixed(seed, static_cast<uint64_t>(word)), more = mixed(seed + 1, static_cast<uint64_t>(word));
      const uint32_t chosen[] = {bits, bits & more, bits | more, bits % 8 ? 0 : more, bits % 8 ? ~0u : more,
                                 bits % 2 ? ~0u : 0, ~0u, 0};
      allowed.push_back(static_cast<int32_t>(chosen[kind % 8]));
    }
    for (int64_t some = kind / 32; some > 0; --some) {
      const int64_t id = in.take<uint32_t>() % vocab;
      allowed[id / 32] = static_cast<int32_t>(static_cast<uint32_t>(allowed[id / 32]) ^ 1u << (id % 32));
    }
  }
};

// The row with the mask applied to its logits. Of the edits, only those of allowed tokens remain.
Row without_mask(const Row &row) {
  Row plain = row;
  const auto allows = [&](int64_t id) { return row.allowed[id / 32] >> (id % 32) & 1; };
  for (int64_t id = 0; id < row.vocab; ++id)
    if (!allows(id)) plain.logits[id] = -INFINITY;
  for (int64_t e = 0; e < row.edits; ++e)
    if (row.ids[e] >= 0 && row.ids[e] < row.vocab && !allows(row.ids[e]) && row.penalty[e] > 0) plain.ids[e] = -1;
  plain.allowed.clear();
  return plain;
}

struct Answers {
  std::vector<int64_t> token;
  std::vector<float> logprob, mass;
  std::vector<int32_t> kept;
  std::vector<uint8_t> certified, mask;
  std::vector<topw_report> reports;

  Answers(size_t batch, size_t vocab)
      : token(batch, 77), logprob(batch, 77), mass(batch, 77), kept(batch, 77), certified(batch, 77),
        mask(batch * vocab, 77), reports(batch) {}
  topw_outputs outputs() {
    return {token.data(), logprob.data(), kept.data(), certified.data(), mass.data(), mask.data(), reports.data()};
  }
};

// Samples the row `copies` times, with spoiled rows between: one with NaN, one without a finite logit. With a
// workspace, rows run one by one from the last; without one, all in one call.
Answers sample(const Row &row, size_t copies, topw_workspace *workspace) {
  const size_t vocab = static_cast<size_t>(row.vocab), edits = static_cast<size_t>(row.edits);
  std::vector<float> logits, penalty, bias, columns[7], rule_values;
  std::vector<int64_t> ids;
  std::vector<int32_t> allowed, rules;
  for (size_t i = 0; i < copies; ++i) {
    logits.insert(logits.end(), row.logits.begin(), row.logits.end());
    ids.insert(ids.end(), row.ids.begin(), row.ids.end());
    penalty.insert(penalty.end(), row.penalty.begin(), row.penalty.end());
    bias.insert(bias.end(), row.bias.begin(), row.bias.end());
    allowed.insert(allowed.end(), row.allowed.begin(), row.allowed.end());
    for (size_t c = 0; c < 7; ++c) columns[c].push_back(row.columns[c]);
    rules.push_back(row.rule);
    rule_values.insert(rule_values.end(), row.rule_values, row.rule_values + 2);
  }
  for (size_t i = 1; i < copies; ++i)
    for (size_t k = 0; k < vocab; ++k) logits[i * vocab + k] = i % 2 ? NAN : -INFINITY;
  const topw_table table = row.described();
  const topw_inputs inputs = {static_cast<int64_t>(copies),
                              row.vocab,
                              static_cast<int64_t>(edits),
                              static_cast<int64_t>(row.allowed.size()),
                              logits.data(),
                              ids.data(),
                              penalty.data(),
                              bias.data(),
                              allowed.data(),
                              columns[0].data(),
                              columns[1].data(),
                              columns[2].data(),
                              columns[3].data(),
                              columns[4].data(),
                              columns[5].data(),
                              columns[6].data(),
                              rules.data(),
                              rule_values.data()};
  Answers answers(copies, vocab);
  const topw_outputs outputs = answers.outputs();
  const topw_table *given = row.with_table ? &table : nullptr;
  if (!workspace) require(topw_sample(&row.options, given, &inputs, &outputs) == 0, "memory suffices");
  for (size_t i = copies; workspace && i-- > 0;)
    require(topw_sample_row(&row.options, given, &inputs, static_cast<int64_t>(i), workspace, &outputs) == 0,
            "memory suffices");
  return answers;
}

void check(const Row &row, const Answers &got, size_t i) {
  const size_t vocab = static_cast<size_t>(row.vocab);
  const uint8_t *mask = got.mask.data() + i * vocab;
  int64_t members = 0;
  for (size_t k = 0; k < vocab; ++k) {
    require(mask[k] <= 1, "the mask is 0 or 1");
    members += mask[k];
  }
  require(members == got.kept[i], "kept counts the mask");
  require(got.certified[i] <= 1, "certified is 0 or 1");
  if (got.token[i] < 0) {
    require(got.token[i] == -1 && got.kept[i] == 0 && !got.certified[i], "an invalid row keeps nothing");
    require(got.logprob[i] == 0 && got.mass[i] == 0, "an invalid row has no numbers");
    return;
  }
  require(got.token[i] < row.vocab && mask[got.token[i]], "the token is kept");
  const bool by_rule = row.rule != TOPW_RULE_TOP_W && row.columns[0] >= 1e-5f;
  require(got.kept[i] >= 1 && (by_rule || got.kept[i] <= row.options.top_m), "the crop is in the pool");
  require(!by_rule || !got.certified[i] || got.kept[i] <= 64, "a certified crop is among the 64 best");
  require(got.mass[i] >= 0 && got.mass[i] <= 1.00001f, "mass is a probability");
  require(got.logprob[i] <= 1e-6f, "logprob is the log of a probability");
}

void check_same(const Row &row, const Answers &one, const Answers &other) {
  require(one.token[0] == other.token[0] && one.kept[0] == other.kept[0], "the same row, the same token and size");
  require(one.certified[0] == other.certified[0], "the same row, the same certificate");
  require(memcmp(&one.logprob[0], &other.logprob[0], sizeof(float)) == 0, "the same row, the same logprob");
  require(memcmp(one.mask.data(), other.mask.data(), static_cast<size_t>(row.vocab)) == 0, "the same row, the same crop");
}

// A product with 4- or 8-bit weights: buffers have the exact size, all from the input's bytes.
struct Factors {
  topw::Matrix matrix{};
  int64_t rows;
  std::vector<uint8_t> codes, zeros;
  std::vector<float> scales, offsets, bias, x;

  explicit Factors(Bytes &in) {
    matrix.outputs = 1 + in.take<uint8_t>() % 80;
    const uint8_t large = in.take<uint8_t>();
    matrix.inputs = 1 + in.take<uint16_t>() % (large < 16 ? 5000 : 600);
    matrix.block_size = int64_t{16} << in.take<uint8_t>() % 5;
    matrix.bits = in.take<uint8_t>() % 2 ? 4 : 8;
    rows = 1 + in.take<uint8_t>() % (large >= 250 ? 150 : 20);
    const uint8_t kind = in.take<uint8_t>();
    const int64_t blocks = matrix.outputs * matrix.blocks();
    fill(in, blocks * matrix.block_bytes(), kind & 8, codes);
    if (kind & 1) fill(in, matrix.outputs * matrix.zero_bytes(), kind & 8, zeros);
    scales = values(in, blocks, true);
    if (kind & 2) offsets = values(in, blocks, true);
    if (kind & 4) bias = values(in, matrix.outputs, true);
    x = values(in, rows * matrix.inputs, !(kind & 16));
    matrix.codes = codes.data(), matrix.scales = scales.data(), matrix.zero_points = kind & 1 ? zeros.data() : nullptr;
    matrix.offsets = kind & 2 ? offsets.data() : nullptr, matrix.bias = kind & 4 ? bias.data() : nullptr;
  }

  // Random bytes, or only the least and the largest.
  static void fill(Bytes &in, int64_t count, bool extreme, std::vector<uint8_t> &bytes) {
    const uint64_t seed = in.take<uint32_t>();
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = mixed(seed, static_cast<uint64_t>(i));
      bytes.push_back(static_cast<uint8_t>(extreme ? (bits % 8 ? 255 : 0) : bits));
    }
  }

  // Rows `first` to `last` - 1 of the product, with the tiles in two parts.
  std::vector<float> multiplied(int64_t first, int64_t last, int64_t split) const {
    const topw::Product &product = topw::product();
    void *memory = nullptr;
    require(posix_memalign(&memory, 64, topw::rounded_size(matrix, last - first)) == 0, "memory suffices");
    const std::unique_ptr<void, void (*)(void *)> owner(memory, free);
    const topw::Rounded rounded = topw::place_rounded(matrix, last - first, memory);
    for (int64_t row = first; row < last; ++row)
      product.round_row(matrix, x.data() + row * matrix.inputs, rounded, row - first);
    std::vector<float> y(static_cast<size_t>((last - first) * matrix.outputs));
    product.multiply(matrix, rounded, 0, split, y.data());
    product.multiply(matrix, rounded, split, matrix.tiles(), y.data());
    return y;
  }

  int code(const std::vector<uint8_t> &packed, int64_t first, int64_t i) const {
    return matrix.bits == 8 ? packed[first + i] : packed[first + i / 2] >> (i % 2 * 4) & 15;
  }

  // An output in double, and the sum of its terms' magnitudes; NaN if an activation is not finite.
  double output(int64_t row, int64_t n, double *magnitude) const {
    double sum = matrix.bias ? bias[n] : 0;
    *magnitude = fabs(sum);
    for (int64_t b = 0; b < matrix.blocks(); ++b) {
      const int64_t at = n * matrix.blocks() + b, first = b * matrix.block_size;
      const int64_t left = matrix.inputs - first, count = left < matrix.block_size ? left : matrix.block_size;
      const float *from = x.data() + row * matrix.inputs + first;
      float most = 0;
      for (int64_t i = 0; i < count; ++i) most = fabsf(from[i]) <= most ? most : isfinite(from[i]) ? fabsf(from[i]) : NAN;
      for (int64_t i = 0; i < count; ++i) most = isfinite(from[i]) ? most : NAN;
      if (most < 0x1p-121f) most = 0;  // 127 divided by less is infinite
      const int zero = matrix.zero_points ? code(zeros, n * matrix.zero_bytes(), b) : 1 << (matrix.bits - 1);
      double integers = 0, total = 0, size = 0;
      for (int64_t i = 0; i < count; ++i) {
        const float rounded = most == 0 ? 0 : nearbyintf(from[i] * (127 / most));
        integers += static_cast<double>(rounded) * (code(codes, at * matrix.block_bytes(), i) - zero);
        total += from[i], size += fabs(from[i]);
      }
      const double term = integers * most / 127 * scales[at], offset = matrix.offsets ? offsets[at] : 0;
      sum += term + (matrix.offsets ? offset * total : 0);
      const bool overflows = size > 1e37 || fabs(static_cast<double>(most) * scales[at]) > 1e37;  // maybe, in float
      *magnitude += overflows ? INFINITY : fabs(term) + fabs(offset) * size;
    }
    return sum;
  }
};

// Each product is the sum in double, with the same bits in any batch, part and instruction set.
int check_product(Bytes &in) {
  const Factors factors(in);
  const int64_t tiles = factors.matrix.tiles(), outputs = factors.matrix.outputs;
  const int64_t split = in.take<uint8_t>() % (tiles + 1), chosen = in.take<uint8_t>() % factors.rows;
  const auto same = [](float a, float b) { return memcmp(&a, &b, sizeof a) == 0 || (isnan(a) && isnan(b)); };
  const std::vector<float> best = factors.multiplied(0, factors.rows, split);
  for (const char *name : {"amx", "avx512_vnni", "avx_vnni", "avx2", "dotprod", "generic"}) {
    if (topw_use_product(name) != 0) continue;
    const std::vector<float> all = factors.multiplied(0, factors.rows, 0);
    const std::vector<float> one = factors.multiplied(chosen, chosen + 1, tiles - split);
    for (size_t i = 0; i < all.size(); ++i) require(same(all[i], best[i]), name);
    for (int64_t n = 0; n < outputs; ++n) require(same(one[n], best[chosen * outputs + n]), "a row has the same bits alone");
  }
  topw_use_product(nullptr);
  for (int64_t n = 0; n < outputs; ++n) {
    double magnitude = 0;
    const double exact = factors.output(chosen, n, &magnitude), found = best[chosen * outputs + n];
    const double steps = static_cast<double>(factors.matrix.blocks() + factors.matrix.block_size + 4);
    if (isnan(magnitude)) require(isnan(found), "a row that is not finite gives NaN");
    if (magnitude < 1e37) require(fabs(found - exact) <= steps * 0x1p-23 * magnitude + 1e-30, "the product is its sum");
  }
  return 0;
}

using Workspace = std::unique_ptr<topw_workspace, void (*)(topw_workspace *)>;

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const Workspace kept(topw_workspace_create(), topw_workspace_destroy);  // kept between inputs
  Bytes in(data, size);
  if (in.take<uint8_t>() % 4 == 0) return check_product(in);
  const Row row(in);
  const Workspace fresh(topw_workspace_create(), topw_workspace_destroy);
  const char *best = topw_instruction_set();
  const Answers alone = sample(row, 1, fresh.get());
  check(row, alone, 0);
  if (row.vocab > kSmallEnough) return 0;  // the checks below are covered by smaller rows
  for (topw_workspace *workspace : {kept.get(), static_cast<topw_workspace *>(nullptr)}) {
    const Answers among = sample(row, 3, workspace);
    for (size_t i = 0; i < 3; ++i) check(row, among, i);
    check_same(row, alone, among);
  }
  if (!row.allowed.empty()) check_same(row, alone, sample(without_mask(row), 1, kept.get()));
  for (const char *name : {"generic", "avx2"})
    if (topw_use_instruction_set(name) == 0) check_same(row, alone, sample(row, 1, kept.get()));
  require(topw_use_instruction_set(best) == 0, "the set in use is available");
  return 0;
}
#if defined(TOPW_FUZZ_MAIN)
#include <time.h>

namespace {

int repeat(FILE *file) {
  std::vector<uint8_t> bytes;
  for (int c; (c = fgetc(file)) != EOF;) bytes.push_back(static_cast<uint8_t>(c));
  fclose(file);
  return LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
}

}  // namespace

int main(int count, char **words) {
  if (count < 2) return fprintf(stderr, "usage: native_rows SECONDS [SEED] | native_rows FILE\n"), 2;
  if (FILE *file = fopen(words[1], "rb")) return repeat(file);
  const double seconds = atof(words[1]);
  uint64_t seed = count > 2 ? strtoull(words[2], nullptr, 10) : 0;
  const time_t end = time(nullptr) + static_cast<time_t>(seconds);
  uint64_t executions = 0;
  for (; time(nullptr) < end; ++executions, ++seed) {
    std::vector<uint8_t> bytes(32 + mixed(seed, 0) % 2000);
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(mixed(seed, i + 1));
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  printf("%llu executions\n", static_cast<unsigned long long>(executions));
  return 0;
}
#endif
