// What a kernel's source needs of CUDA, as C++ for a CPU: the same names with the same meaning, over fibers.
#pragma once

#include <cuda_runtime_api.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "fibers.hpp"

#undef __launch_bounds__
#define __launch_bounds__(...)
#ifndef __noinline__
#define __noinline__ __attribute__((noinline))
#endif

// Of the running fiber.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
inline constexpr int warpSize = streamllm::emulation::kWarpSize;

namespace streamllm::cuda {

template <typename T>
T* shared_memory() {
  return reinterpret_cast<T*>(emulation::shared_memory());
}

template <typename... Parameters, typename... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, void* /*stream*/,
           const Arguments&... arguments) {
  const auto call = [kernel, values = std::tuple<Parameters...>(static_cast<Parameters>(arguments)...)] {
    std::apply(kernel, values);
  };
  const auto run = [](const void* bound) { (*static_cast<const decltype(call)*>(bound))(); };
  return emulation::run({reinterpret_cast<const void*>(kernel), grid, block, shared_bytes, run, &call});
}

}  // namespace streamllm::cuda

namespace streamllm::emulation {

template <typename T>
uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t) && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}

template <typename T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <typename To, typename From>
To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From));
  return from_bits<To>(to_bits(value));
}

template <typename Function>
void for_each_lane(unsigned mask, Function&& function) {
  for (; mask != 0; mask &= mask - 1) function(__builtin_ctz(mask));
}

inline int lane_of_thread() {
  return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % kWarpSize;
}

// A lane that is not in the mask has no value that may be relied on: NaN, or a number out of any range.
inline void shuffle(Lane* lanes, unsigned mask) {
  constexpr uint64_t kNoValue = 0xffff7fff7fffffffu;
  for_each_lane(mask, [&](int lane) {
    const int source = lanes[lane].source;
    lanes[lane].result = (mask >> source & 1u) ? lanes[source].value : kNoValue;
  });
}

inline void ballot(Lane* lanes, unsigned mask) {
  uint64_t votes = 0;
  for_each_lane(mask, [&](int lane) { votes |= (lanes[lane].value != 0 ? uint64_t{1} : 0) << lane; });
  for_each_lane(mask, [&](int lane) { lanes[lane].result = votes; });
}

inline void match_any(Lane* lanes, unsigned mask) {
  for_each_lane(mask, [&](int lane) {
    uint64_t same = 0;
    for_each_lane(mask, [&](int other) {
      same |= (lanes[lane].value == lanes[other].value ? uint64_t{1} : 0) << other;
    });
    lanes[lane].result = same;
  });
}

template <typename T, typename Operation>
void reduce(Lane* lanes, unsigned mask) {
  T result = from_bits<T>(lanes[__builtin_ctz(mask)].value);
  for_each_lane(mask & (mask - 1),
                [&](int lane) { result = Operation{}(result, from_bits<T>(lanes[lane].value)); });
  for_each_lane(mask, [&](int lane) { lanes[lane].result = to_bits(result); });
}

struct Add {
  template <typename T>
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<std::make_unsigned_t<T>>(a) + static_cast<std::make_unsigned_t<T>>(b));
  }
};
struct Minimum {
  template <typename T>
  T operator()(T a, T b) const {
    return std::min(a, b);
  }
};
struct Maximum {
  template <typename T>
  T operator()(T a, T b) const {
    return std::max(a, b);
  }
};

template <typename T, typename Function>
T atomically(T* address, Function&& function) {
  static_assert(std::is_integral_v<T>, "sums of floats depend on the order: no atomics on them");
  maybe_switch();
  const T old = *address;
  *address = function(old);
  return old;
}

}  // namespace streamllm::emulation

// ---- barriers

inline void __syncthreads(streamllm::emulation::Site site = streamllm::emulation::Site::here()) {
  streamllm::emulation::synchronize_block("__syncthreads", false, site);
}

inline int __syncthreads_count(int predicate,
                               streamllm::emulation::Site site = streamllm::emulation::Site::here()) {
  return streamllm::emulation::synchronize_block("__syncthreads_count", predicate != 0, site);
}

inline int __syncthreads_or(int predicate,
                            streamllm::emulation::Site site = streamllm::emulation::Site::here()) {
  return streamllm::emulation::synchronize_block("__syncthreads_or", predicate != 0, site) != 0;
}

inline int __syncthreads_and(int predicate,
                             streamllm::emulation::Site site = streamllm::emulation::Site::here()) {
  return streamllm::emulation::synchronize_block("__syncthreads_and", predicate == 0, site) == 0;
}

inline void __syncwarp(unsigned mask = 0xffffffffu,
                       streamllm::emulation::Site site = streamllm::emulation::Site::here()) {
  streamllm::emulation::synchronize_warp({"__syncwarp", nullptr}, mask, 0, 0, site);
}

inline void __threadfence() { streamllm::emulation::maybe_switch(); }
inline void __threadfence_block() { streamllm::emulation::maybe_switch(); }

// ---- warp collectives

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32,
              streamllm::emulation::Site site = streamllm::emulation::Site::here()) {
  using namespace streamllm::emulation;
  const int lane = lane_of_thread();
  const int from = lane / width * width + (source & (width - 1));
  return from_bits<T>(synchronize_warp({"__shfl_sync", shuffle}, mask, to_bits(value), from, site));
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 streamllm::emulation::Site site = streamllm::emulation::Site::here()) {
  using namespace streamllm::emulation;
  const int lane = lane_of_thread();
  const int from = lane % width < static_cast<int>(delta) ? lane : lane - static_cast<int>(delta);
  return from_bits<T>(synchronize_warp({"__shfl_up_sync", shuffle}, mask, to_bits(value), from, site));
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   streamllm::emulation::Site site = streamllm::emulation::Site::here()) {
  using namespace streamllm::emulation;
  const int lane = lane_of_thread();
  const int from = lane % width + static_cast<int>(delta) >= width ? lane : lane + static_cast<int>(delta);
  return from_bits<T>(synchronize_warp({"__shfl_down_sync", shuffle}, mask, to_bits(value), from, site));
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                  streamllm::emulation::Site site = streamllm::emulation::Site::here()) {
  using namespace streamllm::emulation;
  const int lane = lane_of_thread();
  const int other = lane ^ lane_mask;
  const int from = other / width > lane / width ? lane : other;
  return from_bits<T>(synchronize_warp({"__shfl_xor_sync", shuffle}, mask, to_bits(value), from, site));
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              streamllm::emulation::Site site = streamllm::emulation::Site::here()) {
  using namespace streamllm::emulation;
  return static_cast<unsigned>(synchronize_warp({"__ballot_sync", ballot}, mask, predicate != 0, 0, site));
}

inline int __any_sync(unsigned mask, int predicate,
                      streamllm::emulation::Site site = streamllm::emulation::Site::here()) {
  using namespace streamllm::emulation;
  return synchronize_warp({"__any_sync", ballot}, mask, predicate != 0, 0, site) != 0;
}

inline int __all_sync(unsigned mask, int predicate,
                      streamllm::emulation::Site site = streamllm::emulation::Site::here()) {
  using namespace streamllm::emulation;
  return synchronize_warp({"__all_sync", ballot}, mask, predicate == 0, 0, site) == 0;
}

template <typename T>
unsigned __match_any_sync(unsigned mask, T value,
                          streamllm::emulation::Site site = streamllm::emulation::Site::here()) {
  using namespace streamllm::emulation;
  return static_cast<unsigned>(
      synchronize_warp({"__match_any_sync", match_any}, mask, to_bits(value), 0, site));
}

template <typename T>
T __reduce_add_sync(unsigned mask, T value,
                    streamllm::emulation::Site site = streamllm::emulation::Site::here()) {
  using namespace streamllm::emulation;
  static_assert(std::is_same_v<T, int> || std::is_same_v<T, unsigned>);
  return from_bits<T>(synchronize_warp({"__reduce_add_sync", reduce<T, Add>}, mask, to_bits(value), 0, site));
}

template <typename T>
T __reduce_min_sync(unsigned mask, T value,
                    streamllm::emulation::Site site = streamllm::emulation::Site::here()) {
  using namespace streamllm::emulation;
  static_assert(std::is_same_v<T, int> || std::is_same_v<T, unsigned>);
  return from_bits<T>(
      synchronize_warp({"__reduce_min_sync", reduce<T, Minimum>}, mask, to_bits(value), 0, site));
}

template <typename T>
T __reduce_max_sync(unsigned mask, T value,
                    streamllm::emulation::Site site = streamllm::emulation::Site::here()) {
  using namespace streamllm::emulation;
  static_assert(std::is_same_v<T, int> || std::is_same_v<T, unsigned>);
  return from_bits<T>(
      synchronize_warp({"__reduce_max_sync", reduce<T, Maximum>}, mask, to_bits(value), 0, site));
}

// ---- atomics, on integers

template <typename T>
T atomicAdd(T* address, std::common_type_t<T> value) {
  return streamllm::emulation::atomically(address,
                                          [&](T old) { return streamllm::emulation::Add{}(old, value); });
}

template <typename T>
T atomicMax(T* address, std::common_type_t<T> value) {
  return streamllm::emulation::atomically(address, [&](T old) { return std::max(old, value); });
}

template <typename T>
T atomicMin(T* address, std::common_type_t<T> value) {
  return streamllm::emulation::atomically(address, [&](T old) { return std::min(old, value); });
}

template <typename T>
T atomicOr(T* address, std::common_type_t<T> value) {
  return streamllm::emulation::atomically(address, [&](T old) { return old | value; });
}

template <typename T>
T atomicAnd(T* address, std::common_type_t<T> value) {
  return streamllm::emulation::atomically(address, [&](T old) { return old & value; });
}

template <typename T>
T atomicExch(T* address, std::common_type_t<T> value) {
  return streamllm::emulation::atomically(address, [&](T) { return value; });
}

template <typename T>
T atomicCAS(T* address, std::common_type_t<T> expected, std::common_type_t<T> value) {
  return streamllm::emulation::atomically(address, [&](T old) { return old == expected ? value : old; });
}

// ---- loads, bits, arithmetic

template <typename T>
T __ldg(const T* address) {
  return *address;
}
template <typename T>
T __ldcs(const T* address) {
  return *address;
}
template <typename T>
void __stcs(T* address, T value) {
  *address = value;
}

inline unsigned __float_as_uint(float value) { return streamllm::emulation::bit_cast<unsigned>(value); }
inline int __float_as_int(float value) { return streamllm::emulation::bit_cast<int>(value); }
inline float __uint_as_float(unsigned value) { return streamllm::emulation::bit_cast<float>(value); }
inline float __int_as_float(int value) { return streamllm::emulation::bit_cast<float>(value); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= (bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value)); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}

inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float value) { return 1.0f / value; }
inline float __fsqrt_rn(float value) { return sqrtf(value); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float value) { return expf(value); }
inline float __exp2f(float value) { return exp2f(value); }
inline float __logf(float value) { return logf(value); }
inline float rsqrtf(float value) { return 1.0f / sqrtf(value); }
inline float __saturatef(float value) { return fminf(fmaxf(value, 0.0f), 1.0f); }
inline int __float2int_rn(float value) { return static_cast<int>(nearbyintf(value)); }

// CUDA's min and max of the same integer types.
template <typename T, typename = std::enable_if_t<std::is_integral_v<T>>>
T min(T a, T b) {
  return std::min(a, b);
}
template <typename T, typename = std::enable_if_t<std::is_integral_v<T>>>
T max(T a, T b) {
  return std::max(a, b);
}
