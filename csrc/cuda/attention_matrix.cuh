// Attention of one warp to its positions of a split on the matrix units: for keys and values of 16 bits,
// where many query heads share them.
//
// The heads of a block are the rows of the products, 16 of them, be they there or not. Weights are each given
// by two numbers of 16 bits, their rounded value and what it lacks: one would cost the results more than the
// rounding to their own type does.
#pragma once

#include <cstdint>

#include "attention_decode.cuh"
#include "matrix_unit.hpp"
#include "softmax_state.hpp"

namespace streamllm::cuda {

inline constexpr int kMatrixHeads = 16;

// As LanesAttention, for heads of kMaxDim dimensions. Lanes h and h + 16 keep head h's maximum and sum; they
// work on every second position each.
template <typename Shape_>
class MatrixAttention {
 public:
  using Shape = Shape_;
  using Cache = typename Shape::Cache;
  using Query = Cache;
  static constexpr int kHeads = Shape::kHeads;
  static_assert(kHeads == kMatrixHeads && Shape::kPositions == kMatrixDepth && 2 * kHeads == kWarpSize);

  static __host__ __device__ constexpr int query_stride(int /*head_dim*/) { return kRowStride; }
  static constexpr int kScoreBytes = 2 * kHeads * (kWarpPositions + 8) * static_cast<int>(sizeof(Cache));

  __device__ __forceinline__ MatrixAttention(const Query* queries, void* scores, int /*head_dim*/,
                                             float scale, float soft_cap)
      : scores_(static_cast<float*>(scores)),
        weights_(static_cast<Cache*>(scores)),
        lane_(threadIdx.x % kWarpSize),
        scale_(scale),
        soft_cap_(soft_cap) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      query_[step].load(queries + step * kMatrixDepth, kRowStride);
      values_[step].fill(0.0f);
    }
  }

  __device__ __forceinline__ void score(int tile, const Cache* keys, Range /*seen*/) {
    Accumulator<kHeads, Shape::kPositions> scores;
    scores.fill(0.0f);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      RightMatrix<Cache, kHeads, Shape::kPositions, Layout::kColumns> key;
      key.load(keys + step * kMatrixDepth, kRowStride);
      scores.add_product(query_[step], key);
    }
    scores.store(scores_ + tile * Shape::kPositions, kScoreStride);
  }

  __device__ __forceinline__ void weigh(const TileStream<Shape>& tiles) {
    __syncwarp();
    const int head = lane_ % kHeads, odd = lane_ / kHeads;
    float scores[Shape::kTiles][kLanePositions];
#pragma unroll
    for (int tile = 0; tile < Shape::kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kLanePositions; ++i) {
        const int position = tile * Shape::kPositions + 2 * i + odd;
        scores[tile][i] = scores_[head * kScoreStride + position] * scale_;
      }
    }
    if (soft_cap_.is_on()) {  // asked once
#pragma unroll
      for (int tile = 0; tile < Shape::kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < kLanePositions; ++i) scores[tile][i] = soft_cap_(scores[tile][i]);
      }
    }
#pragma unroll
    for (int tile = 0; tile < Shape::kTiles; ++tile) {
      const Range seen = tiles.rows(tile);
#pragma unroll
      for (int i = 0; i < kLanePositions; ++i) {
        if (!seen.contains(2 * i + odd)) scores[tile][i] = -INFINITY;
        maximum_ = fmaxf(maximum_, scores[tile][i]);
      }
    }
    maximum_ = fmaxf(maximum_, __shfl_xor_sync(kAllLanes, maximum_, kHeads));
    __syncwarp();  // weights take the place of scores
#pragma unroll
    for (int tile = 0; tile < Shape::kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kLanePositions; ++i) {
        const float weight = softmax_weight(scores[tile][i], maximum_);
        sum_ += weight;
        Cache* to = weights_ + head * kWeightStride + tile * Shape::kPositions + 2 * i + odd;
        to[0] = from_float<Cache>(weight);
        to[kHeads * kWeightStride] = from_float<Cache>(weight - to_float(to[0]));
      }
    }
    sum_ += __shfl_xor_sync(kAllLanes, sum_, kHeads);
    __syncwarp();
  }

  __device__ __forceinline__ void add(int tile, const Cache* values) {
    LeftMatrix<Cache, kHeads, kColumns> weights, lacking;
    weights.load(weights_ + tile * Shape::kPositions, kWeightStride);
    lacking.load(weights_ + kHeads * kWeightStride + tile * Shape::kPositions, kWeightStride);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      RightMatrix<Cache, kHeads, kColumns> value;
      value.load(values + step * kColumns, kRowStride);
      values_[step].add_product(weights, value);
      values_[step].add_product(lacking, value);
    }
  }

  __device__ __forceinline__ void store(float* states, int stride) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) values_[step].store(states + step * kColumns, stride);
    if (lane_ < kHeads) {
      states[lane_ * stride + Shape::kMaxDim] = maximum_;
      states[lane_ * stride + Shape::kMaxDim + 1] = sum_;
    }
  }

 private:
  static constexpr int kColumns = 16;
  static constexpr int kRowStride = Shape::row_stride(Shape::kMaxDim);  // of queries too
  static constexpr int kSteps = Shape::kMaxDim / 16;
  static constexpr int kLanePositions = Shape::kPositions / 2;  // of a tile
  // Between heads: neighbouring ones begin in different banks.
  static constexpr int kScoreStride = kWarpPositions + 4;
  static constexpr int kWeightStride = kWarpPositions + 8;
  static_assert(kHeads * kScoreStride * static_cast<int>(sizeof(float)) <= kScoreBytes);

  float* const scores_;   // [kHeads][kScoreStride], then
  Cache* const weights_;  // [2][kHeads][kWeightStride]: weights and what their rounding took
  const int lane_;
  const float scale_;
  const SoftCap soft_cap_;
  LeftMatrix<Cache, kHeads, Shape::kPositions> query_[kSteps];
  Accumulator<kHeads, kColumns> values_[kSteps];
  float maximum_ = -INFINITY;
  float sum_ = 0.0f;
};

}  // namespace streamllm::cuda
