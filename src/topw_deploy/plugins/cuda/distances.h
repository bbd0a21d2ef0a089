// Distances of pool tokens to a set of members, as items of jobs (docs/contract/graph.md, section 2).
//
// Squared differences are added in float32 in a fixed tree: 32 coordinates in order, four such sums by pairs (a slice),
// four slices in order (a section), all sections in order. Coordinates are rounded, so possible nearest pairs that are
// close relative to their lengths are measured again in double.
#ifndef TOPW_CUDA_DISTANCES_H
#define TOPW_CUDA_DISTANCES_H

#include "jobs.h"
#include "logits.h"
#include "points.h"

namespace topw::crop {

constexpr int kSlice = 128;             // coordinates in shared memory at a time
constexpr int kChunks = 4;              // of a slice, one per neighbouring lane
constexpr int kChunk = kSlice / kChunks;
constexpr int kSection = 4;             // slices
constexpr int kTileRows = 32;           // pool tokens per block and tile; each warp has two members
constexpr int kRowsOfThread = 4, kColsOfWarp = 2;
constexpr int kTileStride = kSlice + 4; // floats: neighbouring rows use different banks
constexpr int kBatch = 4;               // columns per lane and load

constexpr float kNear = 1.0f / 32;      // relative to the sum of squared lengths: measure closer pairs again
constexpr float kError = 1e-6f;         // rounding error bound of a distance, relative to that sum's root

struct Tile {
  int32_t tokens[kTileRows + kColsOfWarp * kMostWarps];
  float inverse_norms[kTileRows + kColsOfWarp * kMostWarps];
};

// Bytes of dynamic shared memory for a block of `threads`.
TOPW_SHARED_CODE inline int64_t tile_bytes(int64_t threads) {
  const int64_t rows = kTileRows + kColsOfWarp * (threads / kWarp);
  return rows * kTileStride * static_cast<int64_t>(sizeof(float)) + static_cast<int64_t>(sizeof(Tile));
}

class Distances {
 public:
  __device__ Distances(const Call &call, const Memory &memory)
      : points_(call.table, call.options.metric),
        metric_(call.options.metric),
        neighbours_(call.options.knn_k > 1 ? call.options.knn_k : 1),
        memory_(memory) {}

  // Number of items for blocks of this size.
  __device__ int32_t items(const Job &job) const {
    if (job.work == Work::measure_lengths) return (job.tokens + warps() - 1) / warps();
    if (job.work == Work::settle_rows) return (job.rows + warps() - 1) / warps();
    const int32_t length = slices_in(job.pieces);
    return tiles(job) * ((slices() + length - 1) / length);
  }

  // Computes one item, with all threads of a block.
  __device__ TOPW_OUT_OF_LINE void work(const Job &job, int32_t item) {
    if (job.work == Work::compare_pairs) {
      compare(job, item);
      return;
    }
    const int32_t n = item * warps() + warp_index();
    if (job.work == Work::measure_lengths) {
      if (n < job.tokens) measure_length(n);
    } else if (n < job.rows) {
      settle(job, n);
    }
  }

  // The smallest pieces that occupy all blocks and fit. Does not affect the order of additions.
  __device__ Pieces how_to_cut(const Job &job, int32_t blocks) const {
    const int64_t pairs = static_cast<int64_t>(job.rows) * job.cols;
    const int32_t found = tiles(job), enough = 4 * blocks;
    if (found * sections() < enough && pairs * slices() <= memory_.pairs_room) return Pieces::slices;
    if (found < enough && pairs * sections() <= memory_.pairs_room) return Pieces::sections;
    return Pieces::one;
  }

 private:
  __device__ int32_t slices() const { return (points_.hidden() + kSlice - 1) / kSlice; }
  __device__ int32_t sections() const { return (slices() + kSection - 1) / kSection; }
  __device__ int32_t token(int32_t position) const {
    return static_cast<int32_t>(__ldcg(memory_.tokens + position) & 0xffffffffu);
  }

  __device__ void measure_length(int32_t position) const {
    const Length length = points_.measure(token(position));
    if (lane_index() != 0) return;
    memory_.inverse_norm[position] = length.inverse_norm;
    memory_.squared_length[position] = length.squared;
  }

  __device__ static int32_t cols_of_tile() { return kColsOfWarp * warps(); }
  __device__ static int32_t tiles_across(const Job &job) { return (job.cols + cols_of_tile() - 1) / cols_of_tile(); }
  __device__ static int32_t tiles(const Job &job) {
    return ((job.rows + kTileRows - 1) / kTileRows) * tiles_across(job);
  }
  __device__ int32_t slices_in(Pieces pieces) const {
    return pieces == Pieces::slices ? 1 : pieces == Pieces::sections ? kSection : slices();
  }

  __device__ void compare(const Job &job, int32_t item) {
    const int32_t length = slices_in(job.pieces), parts = (slices() + length - 1) / length;
    const int32_t part = item % parts, tile = item / parts, end = (part + 1) * length;
    add_up(job, job.pieces, tile / tiles_across(job) * kTileRows, tile % tiles_across(job) * cols_of_tile(),
           part * length, end < slices() ? end : slices());
  }

  // Adds slices `from` to `to` of the tile's pairs.
  __device__ void add_up(const Job &job, Pieces pieces, int32_t first_row, int32_t first_col, int32_t from,
                         int32_t to) {
    Tile &tile = *reinterpret_cast<Tile *>(dynamic_shared());
    float *const points = reinterpret_cast<float *>(dynamic_shared() + sizeof(Tile));
    const int32_t both = kTileRows + cols_of_tile();
    for (int32_t r = own_index(); r < both; r += block_size()) {
      const bool is_row = r < kTileRows;
      const int32_t n = is_row ? first_row + r : first_col + r - kTileRows;
      const bool there = n < (is_row ? job.rows : job.cols);
      const int32_t position = there ? __ldcg((is_row ? memory_.rows : memory_.cols) + n) : 0;
      tile.tokens[r] = there ? token(position) : -1;
      tile.inverse_norms[r] = there ? __ldcg(memory_.inverse_norm + position) : 0.0f;
    }
    __syncthreads();

    // Each lane keeps one of its four rows, for its warp's two columns.
    const int32_t row = first_row + lane_index() / kChunks + kTileRows / kRowsOfThread * (lane_index() % kChunks);
    float total[kColsOfWarp] = {}, section[kColsOfWarp] = {};
    for (int32_t slice = from; slice < to; ++slice) {
      load(tile, points, both, slice);
      __syncthreads();
      float sums[kColsOfWarp];
      add_up_slice(points, sums);
      __syncthreads();
      const bool section_ends = slice % kSection == kSection - 1 || slice == slices() - 1;
#pragma unroll
      for (int q = 0; q < kColsOfWarp; ++q) {
        section[q] += sums[q];
        if (!section_ends) continue;
        total[q] += section[q];
        if (pieces != Pieces::slices) section[q] = 0;
      }
    }
    const int32_t part = pieces == Pieces::one ? 0 : pieces == Pieces::sections ? from / kSection : from;
#pragma unroll
    for (int q = 0; q < kColsOfWarp; ++q) {
      const int32_t col = first_col + kColsOfWarp * warp_index() + q;
      if (row < job.rows && col < job.cols)
        memory_.pairs[(static_cast<int64_t>(part) * job.rows + row) * job.cols + col] =
            pieces == Pieces::slices ? section[q] : total[q];
    }
  }

  // Loads the tile's coordinates into shared memory, zero-padded.
  __device__ void load(const Tile &tile, float *points, int32_t both, int32_t slice) const {
    constexpr int kPieces = kSlice / kPiece, kTogether = 2;
#pragma unroll 1
    for (int32_t first = own_index(); first < both * kPieces; first += kTogether * block_size()) {
      Raw raw[kTogether];
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        const int32_t unit = first + n * block_size(), r = unit / kPieces, k = slice * kSlice + unit % kPieces * kPiece;
        raw[n] = {};
        if (unit < both * kPieces && tile.tokens[r] >= 0 && k < points_.hidden())
          raw[n] = points_.fetch(tile.tokens[r], k);
      }
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        const int32_t unit = first + n * block_size(), r = unit / kPieces, k = slice * kSlice + unit % kPieces * kPiece;
        if (unit >= both * kPieces) break;
        Piece piece = {};
        if (tile.tokens[r] >= 0 && k < points_.hidden())
          piece = points_.point(points_.decode(raw[n]), k, tile.inverse_norms[r]);
        float4 *const to = reinterpret_cast<float4 *>(points + r * kTileStride + unit % kPieces * kPiece);
        to[0] = {piece.at[0], piece.at[1], piece.at[2], piece.at[3]};
        to[1] = {piece.at[4], piece.at[5], piece.at[6], piece.at[7]};
      }
    }
  }

  __device__ static float square_added(float x, float y, float sum) {
    const float difference = x - y;
    return fmaf(difference, difference, sum);
  }

  // Sums for a lane's row (see add_up) and its warp's two columns. Each lane adds one chunk for four rows; neighbours
  // start at different places to avoid bank conflicts.
  __device__ static void add_up_slice(const float *points, float *sums) {
    const int32_t chunk = lane_index() % kChunks, row = lane_index() / kChunks;
    const float *const cols = points + (kTileRows + kColsOfWarp * warp_index()) * kTileStride;
    float own[kRowsOfThread][kColsOfWarp] = {};
#pragma unroll
    for (int step = 0; step < kChunk / 4; ++step) {
      const int32_t k = chunk * kChunk + (step + 2 * chunk) % (kChunk / 4) * 4;
      float4 y[kColsOfWarp];
#pragma unroll
      for (int q = 0; q < kColsOfWarp; ++q) y[q] = *reinterpret_cast<const float4 *>(cols + q * kTileStride + k);
#pragma unroll
      for (int r = 0; r < kRowsOfThread; ++r) {
        const float4 x = *reinterpret_cast<const float4 *>(
            points + (row + r * (kTileRows / kRowsOfThread)) * kTileStride + k);
#pragma unroll
        for (int q = 0; q < kColsOfWarp; ++q) {
          float sum = own[r][q];
          sum = square_added(x.x, y[q].x, sum);
          sum = square_added(x.y, y[q].y, sum);
          sum = square_added(x.z, y[q].z, sum);
          own[r][q] = square_added(x.w, y[q].w, sum);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRowsOfThread; ++r)
#pragma unroll
      for (int q = 0; q < kColsOfWarp; ++q) {
        const float sum = warp_reduce_pairs(own[r][q]);
        if (r == chunk) sums[q] = sum;
      }
  }

  // (0 + 1) + (2 + 3) over four neighbouring lanes, in each.
  __device__ static float warp_reduce_pairs(float value) {
    value += __shfl_xor_sync(kEveryLane, value, 1);
    return value + __shfl_xor_sync(kEveryLane, value, 2);
  }

  // ---- a row's distance to the set; by one warp ----

  // Squared or cosine distance. NaN for a table with NaN.
  __device__ float measure_of(float squares, float one, float other) const {
    if (metric_ != TOPW_COSINE) return squares;
    const float value = 0.5f * (squares + (1 - one) + (1 - other));  // 1 - x.y; lengths are 1 except for zero rows
    return value < 0 ? 0.0f : value > 2 ? 2.0f : value;
  }

  __device__ float summed(const Job &job, Pieces pieces, int64_t at) const {
    const int64_t stride = static_cast<int64_t>(job.rows) * job.cols;
    if (pieces == Pieces::one) return __ldcg(memory_.pairs + at);
    float total = 0;
    const int32_t parts = pieces == Pieces::sections ? sections() : slices();
    for (int32_t part = 0; part < parts;) {
      float section = 0;
      const int32_t end = pieces == Pieces::sections ? part + 1 : part + kSection;
      for (; part < end && part < parts; ++part) section += __ldcg(memory_.pairs + part * stride + at);
      total += section;
    }
    return total;
  }

  __device__ void settle(const Job &job, int32_t row) {
    const Pieces pieces = job.pieces;
    const int32_t position = __ldcg(memory_.rows + row);
    const float length = __ldcg(memory_.squared_length + position);
    float *const own = memory_.pairs + static_cast<int64_t>(row) * job.cols;
    bool near = false;
    for (int32_t first = lane_index(); first < job.cols; first += kBatch * kWarp) {
      float squares[kBatch], other[kBatch];  // issue all loads before using any
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int32_t c = first + b * kWarp < job.cols ? first + b * kWarp : first;
        squares[b] = summed(job, pieces, own + c - memory_.pairs);
        other[b] = __ldcg(memory_.squared_length + __ldcg(memory_.cols + c));
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int32_t c = first + b * kWarp;
        if (c >= job.cols) break;
        const float both = length + other[b];
        const bool same = squares[b] == 0 && both < static_cast<float>(INFINITY);
        const bool again = !same && !(squares[b] >= kNear * both);
        float value = measure_of(squares[b], length, other[b]);
        if (!(value >= 0)) value = static_cast<float>(INFINITY);
        own[c] = again ? -value : value;  // negative: to be measured again
        near = near || again;
      }
    }
    const int32_t k = neighbours_ < job.cols ? neighbours_ : job.cols;
    if (__any_sync(kEveryLane, near)) measure_near_ones(job, position, length, own, kth_smallest(own, job.cols, k));
    const float distance = mean_of_smallest(own, job.cols, k);
    if (lane_index() == 0) memory_.distance[position] = distance;
  }

  // Bits of non-negative floats sort as their values; the column makes them distinct.
  __device__ static uint64_t next_smallest(const float *values, int32_t count, uint64_t after, bool any) {
    uint64_t best = ~uint64_t{0};
    for (int32_t c = lane_index(); c < count; c += kWarp) {
      const uint64_t key =
          static_cast<uint64_t>(bits_of(__ldcg(values + c)) & 0x7fffffffu) << 32 | static_cast<uint32_t>(c);
      if ((any || key > after) && key < best) best = key;
    }
    return warp_reduce(best, Smaller());
  }

  __device__ static float kth_smallest(const float *values, int32_t count, int32_t k) {
    uint64_t key = 0;
    for (int32_t n = 0; n < k; ++n) key = next_smallest(values, count, key, n == 0);
    return float_of_bits(static_cast<uint32_t>(key >> 32));
  }

  __device__ float mean_of_smallest(const float *values, int32_t count, int32_t k) const {
    uint64_t key = 0;
    double sum = 0;
    for (int32_t n = 0; n < k; ++n) {
      key = next_smallest(values, count, key, n == 0);
      const float value = float_of_bits(static_cast<uint32_t>(key >> 32));
      sum += static_cast<double>(metric_ == TOPW_COSINE ? value : sqrtf(value));
    }
    return static_cast<float>(sum / k);
  }

  // Measures marked pairs again that may be among the nearest. kth: the k-th smallest float32 value.
  __device__ TOPW_OUT_OF_LINE void measure_near_ones(const Job &job, int32_t position, float length, float *own,
                                                      float kth) {
    for (int32_t first = 0; first < job.cols; first += kWarp) {
      const int32_t c = first + lane_index();
      bool again = false;
      int32_t other = 0;
      if (c < job.cols && bits_of(own[c]) >> 31) {
        other = __ldcg(memory_.cols + c);
        const float error = kError * sqrtf(length + __ldcg(memory_.squared_length + other));
        const float value = -own[c];
        // Infinity: float32 overflowed.
        again = !(value < static_cast<float>(INFINITY) && value > kth + error * (4 * sqrtf(kth) + 4 * error));
        own[c] = value;
      }
      for (unsigned left = __ballot_sync(kEveryLane, again); left; left &= left - 1) {
        const int lane = __ffs(static_cast<int>(left)) - 1;
        const double value = measure_in_double(token(position), token(__shfl_sync(kEveryLane, other, lane)));
        if (lane_index() == lane)
          own[c] = value >= 0 ? static_cast<float>(value) : static_cast<float>(INFINITY);  // NaN: infinitely far
      }
    }
    __syncwarp();
  }

  // The squared distance, or the cosine distance.
  __device__ double measure_in_double(int32_t one, int32_t other) const {
    double squares, product;
    points_.compare_in_double(one, other, squares, product);
    if (metric_ != TOPW_COSINE) return squares;
    return product > 1 ? 0.0 : product < -1 ? 2.0 : 1 - product;
  }

  const Points points_;
  const int32_t metric_, neighbours_;
  const Memory &memory_;
};

}  // namespace topw::crop
#endif
