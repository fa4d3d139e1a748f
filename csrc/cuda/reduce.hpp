// Reductions over the lanes of a warp and the threads of a block, in an order of their own: the same values
// give the same bits every time.
#pragma once

#include "launch.hpp"

namespace streamllm::cuda {

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

struct Sum {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};

// Of two numbers the larger; a NaN does not win over a number.
struct Maximum {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
  __device__ __forceinline__ int operator()(int a, int b) const { return a > b ? a : b; }
};

// Over each group of kWidth neighbouring lanes (a power of two); every lane gets its group's result. All 32
// lanes must come.
template <int kWidth = kWarpSize, typename T, typename Operation>
__device__ __forceinline__ T warp_reduce(T value, Operation operation) {
#pragma unroll
  for (int distance = kWidth / 2; distance > 0; distance /= 2) {
    value = operation(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
}

template <int kWidth = kWarpSize, typename T>
__device__ __forceinline__ T warp_sum(T value) {
  return warp_reduce<kWidth>(value, Sum{});
}

template <int kWidth = kWarpSize, typename T>
__device__ __forceinline__ T warp_max(T value) {
  return warp_reduce<kWidth>(value, Maximum{});
}

// Over a block of one dimension whose size is a multiple of 32; every thread gets the result. `scratch` is
// shared memory for 32 values, free to be used again once all threads have returned. `identity` must not
// change what it is combined with.
template <typename T, typename Operation>
__device__ __forceinline__ T block_reduce(T value, T identity, T* scratch, Operation operation) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int num_warps = blockDim.x / kWarpSize;
  value = warp_reduce(value, operation);
  __syncthreads();  // someone may still read the scratch's last content
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  return warp_reduce(lane < num_warps ? scratch[lane] : identity, operation);
}

template <typename T>
__device__ __forceinline__ T block_sum(T value, T* scratch) {
  return block_reduce(value, T(0), scratch, Sum{});
}

__device__ __forceinline__ float block_max(float value, float* scratch) {
  return block_reduce(value, -INFINITY, scratch, Maximum{});
}

}  // namespace streamllm::cuda
