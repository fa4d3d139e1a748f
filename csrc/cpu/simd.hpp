// Sixteen float lanes, whatever the instruction set: one zmm register, two ymm registers or four
// generic vectors of four. Kernels are written once against this and compiled once per instruction
// set, in a namespace of its own (STREAMLLM_SIMD_NAMESPACE), so that the linker never mixes them.
//
// Sums over lanes use one fixed tree (i + 8, i + 4, i + 2, i + 1) everywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "half.hpp"

namespace streamllm::cpu {

// Four lanes, as every compiler target has them.
using Float4 = float __attribute__((vector_size(16)));
using Int4 = int32_t __attribute__((vector_size(16)));

}  // namespace streamllm::cpu

#if defined(STREAMLLM_SIMD_AVX512)
#include "simd_avx512.hpp"
#elif defined(STREAMLLM_SIMD_AVX2)
#include "simd_avx2.hpp"
#else
#include "simd_portable.hpp"
#endif

namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE {

// Calls function(0), ..., function(COUNT - 1) without a loop: in a [[gnu::flatten]] function, arrays indexed
// by the argument then live in registers.
template <int COUNT, typename Function>
inline void unroll(Function function) {
  [&]<int... INDEX>(std::integer_sequence<int, INDEX...>) {
    (function(INDEX), ...);
  }(std::make_integer_sequence<int, COUNT>());
}

inline Vec16 load_partial(const Half* source, int count) {
  Half lanes[16] = {};
  std::memcpy(lanes, source, static_cast<size_t>(count) * sizeof(Half));
  return load(lanes);
}

// Magnitudes beyond float16's range saturate; NaN stays NaN.
inline Vec16 saturate(Vec16 a) { return max(splat(-kLargestHalf), min(splat(kLargestHalf), a)); }
inline void store_saturated(Half* target, Vec16 a) { store(target, saturate(a)); }

inline void store_saturated(float* target, Vec16 a) { store(target, a); }

inline void store_partial(Half* target, Vec16 a, int count) {
  Half lanes[16];
  store_saturated(lanes, a);
  std::memcpy(target, lanes, static_cast<size_t>(count) * sizeof(Half));
}

// e^x within about 1 ulp; 0 below -87.3 (where float32 leaves its normal range), finite above 88.3, NaN
// for NaN. The polynomial is that of Cephes' expf.
inline Vec16 exp(Vec16 x) {
  const Vec16 smallest = splat(-87.3365447504f);
  const Mask16 underflow = less(x, smallest);
  // The limits come first: of a NaN and a number, min and max return the second operand.
  x = max(smallest, min(splat(88.3762626647f), x));
  const Vec16 shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const Vec16 shifted = fma(x, splat(1.44269504088896341f), shift);
  const Vec16 exponent = shifted - shift;
  Vec16 r = fma(exponent, splat(-0.693359375f), x);
  r = fma(exponent, splat(2.12194440e-4f), r);
  Vec16 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + splat(1.0f);
  return select(underflow, splat(0.0f), scale_by_power_of_two(p, shifted));
}

inline Vec16 tanh(Vec16 x) { return splat(1.0f) - splat(2.0f) / (exp(x + x) + splat(1.0f)); }

// The same arithmetic as a lane of exp(Vec16).
inline float exp_scalar(float x) { return first_lane(exp(splat(x))); }

}  // namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE
