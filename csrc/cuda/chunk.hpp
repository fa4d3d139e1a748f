// Runs of a row's elements that one thread holds as floats; loaded and stored in the widest pieces where
// addresses are aligned for them, one by one elsewhere.
#pragma once

#include <cstdint>

#include "api.hpp"
#include "launch.hpp"
#include "types.hpp"

namespace streamllm::cuda {

// Elements in 16 bytes of an activation.
template <typename T>
constexpr int kChunkSize = Vector16<T>::kSize;

// Whether rows that begin `stride` elements of `element_bytes` apart all begin at multiples of 16 bytes.
inline bool rows_are_aligned(const void* first, int64_t stride, size_t element_bytes) {
  return is_aligned16(first) && stride * static_cast<int64_t>(element_bytes) % 16 == 0;
}

// The leading `count` elements, zeros after them.
template <typename T, int N>
__device__ __forceinline__ void load_chunk(float (&to)[N], const T* from, int count, bool aligned) {
  constexpr int kSize = Vector16<T>::kSize;
  static_assert(N % kSize == 0);
  if (aligned && count >= N) {
#pragma unroll
    for (int start = 0; start < N; start += kSize) {
      const Vector16<T> vector = load16(from + start);
#pragma unroll
      for (int i = 0; i < kSize; ++i) to[start + i] = to_float(vector[i]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = i < count ? to_float(from[i]) : 0.0f;
}

// A chunk of 16 bytes as it is stored, which may still be on its way: nothing waits for it before its
// elements are asked for, so that loads which come after it overlap with it.
template <typename T>
class StoredChunk {
 public:
  // The leading `count` elements, zeros after them.
  __device__ __forceinline__ void load(const T* from, int count, bool aligned) {
    if (aligned && count >= kChunkSize<T>) {
      words_ = load16(reinterpret_cast<const uint32_t*>(from));
      return;
    }
    float elements[kChunkSize<T>];
    load_chunk(elements, from, count, false);
    set(elements);
  }

  // Rounded.
  __device__ __forceinline__ void set(const float (&elements)[kChunkSize<T>]) {
    Vector16<T> vector;
#pragma unroll
    for (int i = 0; i < kChunkSize<T>; ++i) vector[i] = from_float<T>(elements[i]);
    memcpy(&words_, &vector, sizeof words_);
  }

  __device__ __forceinline__ void get(float (&elements)[kChunkSize<T>]) const {
    Vector16<T> vector;
    memcpy(&vector, &words_, sizeof vector);
#pragma unroll
    for (int i = 0; i < kChunkSize<T>; ++i) elements[i] = to_float(vector[i]);
  }

 private:
  Vector16<uint32_t> words_;  // narrower elements would each be moved into a register, which waits for them
};

template <bool kSaturate, typename T>
__device__ __forceinline__ T rounded(float value) {
  if constexpr (kSaturate) return from_float_saturated<T>(value);
  return from_float<T>(value);
}

// The leading `count` elements; nothing after them is written. Of a type narrower than the activations' `to`
// need only be a multiple of the whole chunk's bytes.
template <bool kSaturate = false, typename T, int N>
__device__ __forceinline__ void store_chunk(T* to, const float (&from)[N], int count, bool aligned) {
  if (aligned && count >= N) {
    constexpr int kSize = Vector16<T>::kSize;
    if constexpr (N < kSize) {
      struct alignas(N * sizeof(T)) Narrow {
        T values[N];
      } narrow;
#pragma unroll
      for (int i = 0; i < N; ++i) narrow.values[i] = rounded<kSaturate, T>(from[i]);
      *reinterpret_cast<Narrow*>(to) = narrow;
    } else {
#pragma unroll
      for (int start = 0; start < N; start += kSize) {
        Vector16<T> vector;
#pragma unroll
        for (int i = 0; i < kSize; ++i) vector[i] = rounded<kSaturate, T>(from[start + i]);
        store16(to + start, vector);
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i < count) to[i] = rounded<kSaturate, T>(from[i]);
  }
}

}  // namespace streamllm::cuda
