// Attention of one warp to its positions of a split, each product computed by a lane: for all types of keys
// and values, and best for few query heads.
//
// Neighbouring lanes share a position, 8 dimensions each; a warp works on several positions side by side.
#pragma once

#include <cstdint>

#include "attention_decode.cuh"
#include "softmax_state.hpp"

namespace streamllm::cuda {

inline constexpr int kLaneDims = 8;

// Eight neighbouring elements as they are stored, in words: elements of less than 32 bits would each be moved
// into a register of its own.
template <typename T>
struct alignas(8 * sizeof(T) < 16 ? 8 * sizeof(T) : 16) Eight {
  uint32_t words[kLaneDims * sizeof(T) / 4];
};

__device__ __forceinline__ void to_floats(float (&to)[kLaneDims], const Eight<float>& from) {
#pragma unroll
  for (int i = 0; i < kLaneDims; ++i) to[i] = __uint_as_float(from.words[i]);
}

__device__ __forceinline__ void to_floats(float (&to)[kLaneDims], const Eight<bfloat16>& from) {
#pragma unroll
  for (int i = 0; i < kLaneDims; i += 2) {
    to[i] = __uint_as_float(from.words[i / 2] << 16);
    to[i + 1] = __uint_as_float(from.words[i / 2] & 0xffff0000u);
  }
}

__device__ __forceinline__ void to_floats(float (&to)[kLaneDims], const Eight<half>& from) {
#pragma unroll
  for (int i = 0; i < kLaneDims; i += 2) {
    const uint32_t word = from.words[i / 2];
    to[i] = __half2float(__ushort_as_half(static_cast<unsigned short>(word)));
    to[i + 1] = __half2float(__ushort_as_half(static_cast<unsigned short>(word >> 16)));
  }
}

__device__ __forceinline__ void to_floats(float (&to)[kLaneDims], const Eight<float8_e4m3>& from) {
#pragma unroll
  for (int i = 0; i < kLaneDims; i += 2) {
    const auto pair = static_cast<__nv_fp8x2_storage_t>(from.words[i / 4] >> i % 4 * 8);
    const __half2 halves = __nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3);
    to[i] = __low2float(halves), to[i + 1] = __high2float(halves);
  }
}

// A byte becomes the lowest of 2^23's mantissa, 128 too large.
__device__ __forceinline__ void to_floats(float (&to)[kLaneDims], const Eight<int8_t>& from) {
#pragma unroll
  for (int i = 0; i < kLaneDims; ++i) {
    const uint32_t above_zero = from.words[i / 4] ^ 0x80808080u;
    to[i] = __uint_as_float(__byte_perm(above_zero, 0x4b000000u, 0x7440 | i % 4)) - (8388608.0f + 128.0f);
  }
}

// Adds up each of COUNT values over the lanes that differ in the bits DISTANCE, DISTANCE / 2 ... LAST of
// their number, passing on half of the values at each step. A lane is left with COUNT / (2 * DISTANCE / LAST)
// sums, at least one: neighbouring ones, those of a lane with a higher number further on. The order of a
// sum's terms is the same for all values.
template <int COUNT, int DISTANCE, int LAST>
__device__ __forceinline__ void sum_scattered(float* values, int lane) {
  if constexpr (DISTANCE >= LAST && COUNT > 1) {
    constexpr int kKept = COUNT / 2;
    const bool upper = (lane & DISTANCE) != 0;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const float passed = upper ? values[i] : values[kKept + i];
      const float kept = upper ? values[kKept + i] : values[i];
      values[i] = kept + __shfl_xor_sync(kAllLanes, passed, DISTANCE);
    }
    sum_scattered<kKept, DISTANCE / 2, LAST>(values, lane);
  } else if constexpr (DISTANCE >= LAST) {
    values[0] += __shfl_xor_sync(kAllLanes, values[0], DISTANCE);
    sum_scattered<1, DISTANCE / 2, LAST>(values, lane);
  }
}

// The query heads' softmax over a warp's positions. Maximum and sum of head h are kept by the lanes whose
// number is h modulo kHeads; the sums of values by all lanes, each its dimensions of its positions.
template <typename Shape_>
class LanesAttention {
 public:
  using Shape = Shape_;
  using Cache = typename Shape::Cache;
  using Query = float;
  static constexpr int kHeads = Shape::kHeads;

  // Of shared memory: of the block's queries, [kHeads][query_stride], and of each warp's scores.
  static __host__ __device__ constexpr int query_stride(int /*head_dim*/) { return Shape::kMaxDim; }
  static constexpr int kScoreBytes =
      kWarpPositions * (kHeads + (kScaled<Cache> ? 2 : 0)) * static_cast<int>(sizeof(float));

  __device__ __forceinline__ LanesAttention(const Query* queries, void* scores, int head_dim, float scale,
                                            float soft_cap)
      : scores_(static_cast<float*>(scores)),
        key_scales_(scores_ + kWarpPositions * kHeads),
        value_scales_(key_scales_ + kWarpPositions),
        lane_(threadIdx.x % kWarpSize),
        row_(lane_ / kRowLanes),
        dim_(lane_ % kRowLanes * kLaneDims),
        head_dim_(head_dim),
        scale_(scale),
        soft_cap_(soft_cap) {
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
#pragma unroll
      for (int i = 0; i < kLaneDims; ++i) {
        query_[head][i] = queries[head * Shape::kMaxDim + dim_ + i];
        values_[head][i] = 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < kLaneScores; ++i) scores_[i * kWarpSize + lane_] = -INFINITY;
  }

  // Of a cache with scales, before the first score.
  __device__ __forceinline__ void load_scales(const TileStream<Shape>& tiles) {
#pragma unroll
    for (int i = 0; i < kWarpPositions; i += kWarpSize) {
      const float2 scales = tiles.scales(i + lane_);
      key_scales_[i + lane_] = scales.x;
      value_scales_[i + lane_] = scales.y;
    }
    __syncwarp();
  }

  // Scores the positions `seen` of a tile.
  __device__ __forceinline__ void score(int tile, const Cache* keys, Range seen) {
#pragma unroll
    for (int first = 0; first < kLanePositions; first += kStep) score_step(tile, keys, seen, first);
  }

  // Turns the scores of all tiles into weights.
  __device__ __forceinline__ void weigh(const TileStream<Shape>& /*tiles*/) {
    __syncwarp();
    float scores[kLaneScores];
#pragma unroll
    for (int i = 0; i < kLaneScores; ++i) {
      scores[i] = scores_[i * kWarpSize + lane_];
      maximum_ = fmaxf(maximum_, scores[i]);
    }
#pragma unroll
    for (int distance = kWarpSize / 2; distance >= kHeads; distance /= 2) {
      maximum_ = fmaxf(maximum_, __shfl_xor_sync(kAllLanes, maximum_, distance));
    }
#pragma unroll
    for (int i = 0; i < kLaneScores; ++i) {
      const float weight = softmax_weight(scores[i], maximum_);
      sum_ += weight;
      scores_[i * kWarpSize + lane_] = weight;
      if constexpr (kScaled<Cache>) {
        scores_[i * kWarpSize + lane_] = weight * value_scales_[(i * kWarpSize + lane_) / kHeads];
      }
    }
#pragma unroll
    for (int distance = kWarpSize / 2; distance >= kHeads; distance /= 2) {
      sum_ += __shfl_xor_sync(kAllLanes, sum_, distance);
    }
    __syncwarp();
  }

  // Adds a tile's values by their weights.
  __device__ __forceinline__ void add(int tile, const Cache* values) {
    // Lanes beyond the head's dimensions work on its first ones, in vain.
    const Cache* mine = values + (dim_ < head_dim_ ? dim_ : 0);
#pragma unroll
    for (int i = 0; i < kLanePositions; ++i) {
      const int row = i * kRows + row_;
      const float* weights = scores_ + (tile * Shape::kPositions + row) * kHeads;
      float value[kLaneDims];
      to_floats(value, *reinterpret_cast<const Eight<Cache>*>(mine + row * head_dim_));
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
#pragma unroll
        for (int j = 0; j < kLaneDims; ++j)
          values_[head][j] = fmaf(weights[head], value[j], values_[head][j]);
      }
    }
  }

  // Writes each head's state (softmax_state.hpp), `stride` floats apart.
  __device__ __forceinline__ void store(float* states, int stride) {
    constexpr int kKept = kHeads * kLaneDims / kRows;
    constexpr int kVector = kKept < 4 ? kKept : 4;
    struct alignas(kVector * sizeof(float)) Vector {
      float values[kVector];
    };
    float* kept = &values_[0][0];
    sum_scattered<kHeads * kLaneDims, kWarpSize / 2, kRowLanes>(kept, lane_);
    if (dim_ < head_dim_) {
#pragma unroll
      for (int i = 0; i < kKept; i += kVector) {
        const int place = row_ * kKept + i;
        Vector vector;
#pragma unroll
        for (int j = 0; j < kVector; ++j) vector.values[j] = kept[i + j];
        *reinterpret_cast<Vector*>(states + place / kLaneDims * stride + dim_ + place % kLaneDims) = vector;
      }
    }
    if (lane_ < kHeads) {
      states[lane_ * stride + head_dim_] = maximum_;
      states[lane_ * stride + head_dim_ + 1] = sum_;
    }
  }

 private:
  static constexpr int kRowLanes = Shape::kMaxDim / kLaneDims;         // lanes that share a position
  static constexpr int kRows = kWarpSize / kRowLanes;                  // positions side by side
  static constexpr int kLanePositions = Shape::kPositions / kRows;     // of a tile, a lane
  static constexpr int kStep = clamp(32 / kHeads, 1, kLanePositions);  // of these, scored together
  static constexpr int kLaneScores = kWarpPositions * kHeads / kWarpSize;
  static_assert(kLanePositions % kStep == 0);

  // scores[position][head], for kStep of this lane's positions from the `first` one on.
  __device__ __forceinline__ void score_step(int tile, const Cache* keys, Range seen, int first) {
    constexpr int kCount = kStep * kHeads;
    constexpr int kKept = kCount > kRowLanes ? kCount / kRowLanes : 1;
    float sums[kCount];
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      Eight<Cache> eight;
      memset(&eight, 0, sizeof eight);
      if (dim_ < head_dim_) {
        const int row = (first + i) * kRows + row_;
        eight = *reinterpret_cast<const Eight<Cache>*>(keys + row * head_dim_ + dim_);
      }
      float key[kLaneDims];
      to_floats(key, eight);
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
        float sum = query_[head][0] * key[0];
#pragma unroll
        for (int j = 1; j < kLaneDims; ++j) sum = fmaf(query_[head][j], key[j], sum);
        sums[i * kHeads + head] = sum;
      }
    }
    sum_scattered<kCount, kRowLanes / 2, 1>(sums, lane_);
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const int place = lane_ % kRowLanes * kCount / kRowLanes + i;
      const int row = (first + place / kHeads) * kRows + row_;
      float score = sums[i] * scale_;
      if constexpr (kScaled<Cache>) score *= key_scales_[tile * Shape::kPositions + row];
      score = soft_cap_(score);
      scores_[(tile * Shape::kPositions + row) * kHeads + place % kHeads] =
          seen.contains(row) ? score : -INFINITY;
    }
  }

  float* const scores_;  // of the warp's positions: [kWarpPositions][kHeads]
  float* const key_scales_;  // [kWarpPositions], if the cache has scales
  float* const value_scales_;
  const int lane_, row_, dim_, head_dim_;
  const float scale_;
  const SoftCap soft_cap_;
  float query_[kHeads][kLaneDims];
  float values_[kHeads][kLaneDims];
  float maximum_ = -INFINITY;
  float sum_ = 0.0f;
};

}  // namespace streamllm::cuda
