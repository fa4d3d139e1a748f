// What the kernels of decode attention have in common: how a thread block cuts a split, and how keys and
// values come into shared memory.
//
// Each warp of a block has its own positions of the split, in tiles, which are copied asynchronously into its
// own part of shared memory, some tiles ahead: what is under way takes no registers. First come the keys of
// all its positions, then their values.
#pragma once

#include <cstdint>

#include "async_copy.hpp"
#include "cache_layout.hpp"
#include "launch.hpp"
#include "reduce.hpp"
#include "types.hpp"

namespace streamllm::cuda {

inline constexpr int kSplitSize = 256;  // positions; SPLIT_SIZE of streamllm/ops/gpu/kernels.py
inline constexpr int kDecodeWarps = 4;
inline constexpr int kWarpPositions = kSplitSize / kDecodeWarps;

constexpr int clamp(int value, int low, int high) { return value < low ? low : value > high ? high : value; }

// How the kernel for some layers cuts its work. Cache: the type of stored keys and values. MAX_DIM: 64, 128
// or 256, the head size or more. HEADS: the query heads of a block or more. MATRIX: whether products are the
// matrix units' (attention_matrix.cuh) or each lane's own (attention_lanes.cuh).
template <typename Cache_, int MAX_DIM, int HEADS, bool MATRIX>
struct DecodeShape {
  using Cache = Cache_;
  static constexpr int kMaxDim = MAX_DIM;
  static constexpr int kHeads = HEADS;
  static constexpr int kMaxRowBytes = MAX_DIM * static_cast<int>(sizeof(Cache));
  // A tile has 4 KB where that is possible; it lies within one block of the cache.
  static constexpr int kPositions = MATRIX ? 16 : clamp(4096 / kMaxRowBytes, 4, 16);
  static constexpr int kTiles = kWarpPositions / kPositions;
  static constexpr int kStages = MATRIX ? 3 : clamp(16384 / (kMaxRowBytes * kPositions), 4, 8);
  // Elements between rows in shared memory: matrix units read a column of rows at once, in different banks.
  static constexpr int kPadding = MATRIX ? 8 : 0;

  static __host__ __device__ constexpr int row_stride(int head_dim) { return head_dim + kPadding; }
  static __host__ __device__ constexpr int stage_bytes(int head_dim) {
    return kPositions * row_stride(head_dim) * static_cast<int>(sizeof(Cache));
  }
};

struct Range {
  int begin, end;

  __device__ __forceinline__ bool contains(int i) const { return i >= begin && i < end; }
};

// The keys and values of a KV head in the paged cache, and which positions of a split are seen.
struct SplitContext {
  const int32_t* block_table;
  const char* keys;  // of the KV head in block 0
  const char* values;
  int64_t block_bytes;  // from a block to the next one
  int block_size;
  int head_dim;
  int first;    // position of the split
  Range range;  // positions that are seen
};

// The keys, then the values of a warp's tiles of a split, one tile after the other. Every kDecodeWarps-th
// tile of the split is the warp's; a tile's number counts these.
template <typename Shape>
class TileStream {
 public:
  using Cache = typename Shape::Cache;

  // Begins to copy; `stages` is the warp's shared memory.
  __device__ __forceinline__ TileStream(const SplitContext& context, char* stages)
      : context_(context), stages_(stages), warp_(threadIdx.x / kWarpSize), lane_(threadIdx.x % kWarpSize) {
    const int position = first_position(lane_);
    const bool needed = lane_ < Shape::kTiles && position < context.range.end &&
                        position + Shape::kPositions > context.range.begin;
    const int block = needed ? context.block_table[position / context.block_size] : -1;
    offset_ = block * context.block_bytes + position % context.block_size * row_bytes();
    present_ = __ballot_sync(kAllLanes, block >= 0);
    const unsigned tiles = __ballot_sync(kAllLanes, needed);
    first_tile_ = tiles == 0 ? 0 : __ffs(tiles) - 1;
    end_tile_ = first_tile_ + __popc(tiles);
#pragma unroll 1
    for (int i = 0; i < Shape::kStages; ++i) copy_next();
  }

  // Those that have positions that are seen.
  __device__ __forceinline__ int first_tile() const { return first_tile_; }
  __device__ __forceinline__ int end_tile() const { return end_tile_; }

  // The positions of a tile that are seen: none of a block that is no longer there, or of another tile.
  __device__ __forceinline__ Range rows(int tile) const {
    const int first = first_position(tile);
    if (!(present_ >> tile & 1u)) return {0, 0};
    return {max(context_.range.begin - first, 0), min(context_.range.end - first, Shape::kPositions)};
  }

  // In a cache with scales, those of the key and the value of the warp's i-th position; zeros where it is not
  // seen, and what lies there may be NaN. All lanes call it.
  __device__ __forceinline__ float2 scales(int i) const {
    const int tile = i / Shape::kPositions, row = i % Shape::kPositions;
    const int first = first_position(tile) % context_.block_size;
    const int64_t elements = __shfl_sync(kAllLanes, offset_, tile) - first * row_bytes();
    const int64_t at = elements + context_.block_size * row_bytes() +
                       (first + row) * static_cast<int>(sizeof(float));
    if (!rows(tile).contains(row)) return {0.0f, 0.0f};
    return {*reinterpret_cast<const float*>(context_.keys + at),
            *reinterpret_cast<const float*>(context_.values + at)};
  }

  // Waits for the oldest tile, [kPositions][row_stride] of keys or values. The keys of positions that are not
  // seen may be anything, their values are zeros.
  __device__ __forceinline__ const Cache* front() {
    async_wait<Shape::kStages - 1>();
    __syncwarp();
    return stage(num_popped_);
  }

  // The warp is done with the oldest tile: another one takes its place.
  __device__ __forceinline__ void pop() {
    __syncwarp();
    ++num_popped_;
    copy_next();
  }

 private:
  static constexpr int kRowChunks = Shape::kMaxRowBytes / 16;  // of 16 bytes
  static constexpr int kCopies = Shape::kPositions * kRowChunks / kWarpSize;

  __device__ __forceinline__ int first_position(int tile) const {
    return context_.first + (tile * kDecodeWarps + warp_) * Shape::kPositions;
  }

  __device__ __forceinline__ Cache* stage(int number) const {
    return reinterpret_cast<Cache*>(stages_ +
                                    number % Shape::kStages * Shape::stage_bytes(context_.head_dim));
  }

  // Each call is a group of copies, also where there is no tile left.
  __device__ __forceinline__ void copy_next() {
    const int tiles = end_tile_ - first_tile_;
    if (num_begun_ < 2 * tiles) {
      const bool is_values = num_begun_ >= tiles;
      const int tile = first_tile_ + num_begun_ - (is_values ? tiles : 0);
      const Range seen = rows(tile);
      const char* from =
          (is_values ? context_.values : context_.keys) + __shfl_sync(kAllLanes, offset_, tile);
      if (seen.end - seen.begin == Shape::kPositions && context_.head_dim == Shape::kMaxDim) {
        copy_tile(from);
      } else {
        copy_rows(from, seen);
        if (is_values) clear_others(seen);
      }
    }
    async_commit();
    ++num_begun_;
  }

  __device__ __forceinline__ int row_bytes() const {
    return context_.head_dim * static_cast<int>(sizeof(Cache));
  }

  // What the i-th copy of a warp takes: from this row on, and this piece of it where that is more than a warp
  // copies at once.
  static __host__ __device__ constexpr int copy_row(int i) {
    return kRowChunks > kWarpSize ? i / (kRowChunks / kWarpSize) : i * (kWarpSize / kRowChunks);
  }
  static __host__ __device__ constexpr int copy_piece(int i) {
    return kRowChunks > kWarpSize ? i % (kRowChunks / kWarpSize) * kWarpSize * 16 : 0;
  }

  // All positions, of heads of the largest size: most tiles, so nothing is decided or multiplied here.
  __device__ __forceinline__ void copy_tile(const char* tile) {
    constexpr int kStride = Shape::row_stride(Shape::kMaxDim) * static_cast<int>(sizeof(Cache));
    const int first = lane_ / kRowChunks, at = lane_ % kRowChunks * 16;
    const char* from = tile + first * Shape::kMaxRowBytes + at;
    char* to = reinterpret_cast<char*>(stage(num_begun_)) + first * kStride + at;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      async_copy16(to + copy_row(i) * kStride + copy_piece(i),
                   from + copy_row(i) * Shape::kMaxRowBytes + copy_piece(i));
    }
  }

  __device__ __forceinline__ void copy_rows(const char* tile, Range seen) {
    const int stride = Shape::row_stride(context_.head_dim) * static_cast<int>(sizeof(Cache));
    const int first = lane_ / kRowChunks, at = lane_ % kRowChunks * 16;
#pragma unroll 1
    for (int i = 0; i < kCopies; ++i) {
      const int row = first + copy_row(i), byte = copy_piece(i) + at;
      if (!seen.contains(row) || byte >= row_bytes()) continue;
      async_copy16(reinterpret_cast<char*>(stage(num_begun_)) + row * stride + byte,
                   tile + row * row_bytes() + byte);
    }
  }

  // Values of the other positions have no weight, but what was here before may be NaN.
  __device__ __forceinline__ void clear_others(Range seen) {
    const int stride = Shape::row_stride(context_.head_dim);
    Cache* to = stage(num_begun_);
    Cache zero;
    memset(&zero, 0, sizeof zero);
#pragma unroll 1
    for (int i = lane_; i < seen.begin * stride; i += kWarpSize) to[i] = zero;
#pragma unroll 1
    for (int i = seen.end * stride + lane_; i < Shape::kPositions * stride; i += kWarpSize) to[i] = zero;
  }

  const SplitContext context_;
  char* const stages_;
  const int warp_, lane_;
  int64_t offset_;    // lane t: from block 0 to the first position of tile t, if it is there
  unsigned present_;  // bit t: whether it is
  int first_tile_, end_tile_;
  int num_begun_ = 0, num_popped_ = 0;
};

}  // namespace streamllm::cuda
