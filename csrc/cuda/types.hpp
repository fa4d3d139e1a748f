// The types that tensors are stored in, their conversions to and from float32, and 16-byte vectors of them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <cstring>

#include "launch.hpp"

namespace streamllm::cuda {

using half = __half;
using bfloat16 = __nv_bfloat16;
using float8_e4m3 = __nv_fp8_e4m3;

__host__ __device__ __forceinline__ float to_float(float value) { return value; }
__host__ __device__ __forceinline__ float to_float(half value) { return __half2float(value); }
__host__ __device__ __forceinline__ float to_float(bfloat16 value) { return __bfloat162float(value); }
__host__ __device__ __forceinline__ float to_float(float8_e4m3 value) { return static_cast<float>(value); }

// Rounded to nearest, ties to even. Too large for float16: infinity; for float8: its largest, 448; for int8
// nothing may be.
template <typename T>
__host__ __device__ __forceinline__ T from_float(float value);
template <>
__host__ __device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__host__ __device__ __forceinline__ half from_float<half>(float value) {
  return __float2half_rn(value);
}
template <>
__host__ __device__ __forceinline__ bfloat16 from_float<bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__host__ __device__ __forceinline__ float8_e4m3 from_float<float8_e4m3>(float value) {
  float8_e4m3 result;
  result.__x = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
  return result;
}
template <>
__host__ __device__ __forceinline__ int8_t from_float<int8_t>(float value) {
  return static_cast<int8_t>(rintf(value));
}

inline constexpr float kLargestHalf = 65504.0f;

// NaN stays NaN.
__host__ __device__ __forceinline__ float saturate_half(float value) {
  return value > kLargestHalf ? kLargestHalf : value < -kLargestHalf ? -kLargestHalf : value;
}

// As from_float, but float16 too becomes its largest where `value` exceeds it; NaN stays NaN.
template <typename T>
__host__ __device__ __forceinline__ T from_float_saturated(float value) {
  return from_float<T>(value);
}
template <>
__host__ __device__ __forceinline__ half from_float_saturated<half>(float value) {
  return from_float<half>(saturate_half(value));
}

// What one load or store instruction moves at most.
template <typename T>
struct alignas(16) Vector16 {
  static constexpr int kSize = 16 / sizeof(T);
  T values[kSize];

  __host__ __device__ __forceinline__ T& operator[](int i) { return values[i]; }
  __host__ __device__ __forceinline__ const T& operator[](int i) const { return values[i]; }
};

// `address` must be a multiple of 16.
template <typename T>
__device__ __forceinline__ Vector16<T> load16(const T* address) {
#ifdef STREAMLLM_EMULATION
  emulation::check_load(address, 16);
#endif
  const uint4 bits = *reinterpret_cast<const uint4*>(address);
  Vector16<T> vector;
  memcpy(&vector, &bits, sizeof vector);
  return vector;
}

template <typename T>
__device__ __forceinline__ void store16(T* address, const Vector16<T>& vector) {
#ifdef STREAMLLM_EMULATION
  emulation::check_store(address, 16);
#endif
  uint4 bits;
  memcpy(&bits, &vector, sizeof bits);
  *reinterpret_cast<uint4*>(address) = bits;
}

}  // namespace streamllm::cuda
