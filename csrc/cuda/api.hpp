// The library's C interface, which Python calls through ctypes.
//
// An operation is `int streamllm_<operation>(const <Operation>Args* arguments, void* stream)`: it puts the
// operation's kernels on the stream and returns 0, CUDA's error code (positive), or one of the codes below
// for arguments that it does not support, in which case it has done nothing. Argument structs are plain:
// pointers, int32_t, int64_t, float.
#pragma once

#include <cstdint>

#include "types.hpp"

#define STREAMLLM_API extern "C" __attribute__((visibility("default")))

namespace streamllm::cuda {

inline constexpr int kSuccess = 0;
inline constexpr int kUnsupportedDtype = -1;
inline constexpr int kUnsupportedHeadSize = -2;
inline constexpr int kUnsupportedSize = -3;  // a count, stride or block size
inline constexpr int kMisaligned = -4;       // an address or stride is not a multiple of 16 bytes
inline constexpr int kNullPointer = -5;
inline constexpr int kTooMuchSharedMemory = -6;
inline constexpr int kUnsupportedOption = -7;

enum Dtype : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kFloat8E4M3 = 3, kInt8 = 4 };

template <typename T>
struct Type {
  using type = T;
};

// Calls `function(Type<T>{})` with the type of activations that `dtype` names, and returns what it returns.
template <typename Function>
int with_activation_type(int32_t dtype, Function&& function) {
  switch (dtype) {
    case kFloat32:
      return function(Type<float>{});
    case kFloat16:
      return function(Type<half>{});
    case kBFloat16:
      return function(Type<bfloat16>{});
    default:
      return kUnsupportedDtype;
  }
}

inline bool is_aligned16(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

}  // namespace streamllm::cuda
