// A softmax under way: what is known of some scores and the values that they weight, in a form that can be
// merged with that of other scores (as in FlashAttention and FlashInfer).
#pragma once

#include <cstdint>

#include "launch.hpp"

namespace streamllm::cuda {

// exp(score - maximum). Where nothing but scores of -inf was seen, the maximum is -inf too and they weigh 0,
// not NaN.
__device__ __forceinline__ float softmax_weight(float score, float maximum) {
  return expf(score - (maximum == -INFINITY ? 0.0f : maximum));
}

// What becomes of a score once it is scaled: cap * tanh(score / cap), or itself.
struct SoftCap {
  float cap, inverse;

  explicit __device__ __forceinline__ SoftCap(float cap)
      : cap(cap), inverse(cap == 0.0f ? 0.0f : 1.0f / cap) {}

  __device__ __forceinline__ bool is_on() const { return cap != 0.0f; }

  __device__ __forceinline__ float operator()(float score) const {
    return cap == 0.0f ? score : cap * tanhf(score * inverse);
  }
};

// Of N dimensions of the values.
template <int N>
struct SoftmaxState {
  float maximum;    // of the scores; -inf if there were none
  float sum;        // of the weights exp(score - maximum)
  float values[N];  // sums of weight * value

  static __device__ __forceinline__ SoftmaxState empty() { return {-INFINITY, 0.0f, {}}; }

  // `other`'s scores come after those seen so far.
  __device__ __forceinline__ void merge(const SoftmaxState& other) {
    const float larger = fmaxf(maximum, other.maximum);
    const float mine = softmax_weight(maximum, larger), others = softmax_weight(other.maximum, larger);
    maximum = larger;
    sum = fmaf(sum, mine, other.sum * others);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = fmaf(values[i], mine, other.values[i] * others);
  }

  // A score without a value (an attention sink) joins.
  __device__ __forceinline__ void add_sink(float score) {
    SoftmaxState sink = empty();
    sink.maximum = score;
    sink.sum = 1.0f;
    merge(sink);
  }

  // What the values are to be multiplied by to become the weighted mean: 0 where there was nothing to see.
  // NaN stays NaN.
  __device__ __forceinline__ float inverse_sum() const { return sum == 0.0f ? 0.0f : 1.0f / sum; }
};

// A state in memory: the values of `head_dim` dimensions, then maximum and sum. A thread holds the dimensions
// first, first + stride, first + 2 * stride ...: as many of N as there are.
template <int N>
__device__ __forceinline__ SoftmaxState<N> load_state(const float* stored, int head_dim, int first,
                                                      int stride) {
  SoftmaxState<N> state;
  state.maximum = stored[head_dim];
  state.sum = stored[head_dim + 1];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int dim = first + i * stride;
    state.values[i] = dim < head_dim ? stored[dim] : 0.0f;
  }
  return state;
}

template <int N>
__device__ __forceinline__ void store_state(float* stored, const SoftmaxState<N>& state, int head_dim,
                                            int first, int stride) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int dim = first + i * stride;
    if (dim < head_dim) stored[dim] = state.values[i];
  }
  if (first != 0) return;
  stored[head_dim] = state.maximum;
  stored[head_dim + 1] = state.sum;
}

}  // namespace streamllm::cuda
