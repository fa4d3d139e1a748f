// Vec16 as four generic vectors of four floats (SSE2, NEON, ...). Multiply-adds round twice: no fused
// instruction is assumed. Included by simd.hpp.
#pragma once

#define STREAMLLM_SIMD_NAMESPACE portable

namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE {

struct Vec16 {
  Float4 v[4];
};
struct Mask16 {
  Int4 v[4];
};
struct Double8 {
  double v[8];
};

inline constexpr int kAccumulators = 3;

template <typename Function>
inline Vec16 map(Function function) {
  return {{function(0), function(1), function(2), function(3)}};
}
template <typename Function>
inline Mask16 map_mask(Function function) {
  return {{function(0), function(1), function(2), function(3)}};
}

inline Vec16 splat(float x) {
  return map([=](int) { return Float4{x, x, x, x}; });
}
inline Vec16 load(const float* p) {
  Vec16 a;
  std::memcpy(&a, p, sizeof a);
  return a;
}
// The 16 bits of each lane, widened.
inline Int4 widen4(const uint16_t* p) {
  using Short4 = uint16_t __attribute__((vector_size(8)));
  Short4 bits;
  std::memcpy(&bits, p, sizeof bits);
  return __builtin_convertvector(bits, Int4);
}
// half_to_float on four lanes.
inline Float4 half4_to_float(Int4 bits) {
  const Int4 magnitude = (bits & 0x7fff) << 13;
  const Float4 finite = (Float4)magnitude * 0x1p112f;
  const Int4 value = magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : (Int4)finite;
  return (Float4)(value | ((bits & 0x8000) << 16));
}
inline Vec16 load(const Half* p) {
  return map([=](int i) { return half4_to_float(widen4(&p[4 * i].bits)); });
}
inline Vec16 load(const BFloat16* p) {
  return map([=](int i) { return (Float4)(widen4(&p[4 * i].bits) << 16); });
}
// 16 or 32 numbers, divided by kFloat8InHalf; not for NaN.
template <int COUNT>
inline void widen(const Float8E4M3* from, Half* to) {
  for (int i = 0; i < COUNT; ++i) to[i] = float8_in_half(from[i]);
}
// Lanes from `count` on are 0.
inline Vec16 load_partial(const float* p, int count) {
  float lanes[16] = {};
  std::memcpy(lanes, p, static_cast<size_t>(count) * sizeof(float));
  return load(lanes);
}
inline Vec16 load_low8(const float* p) { return load_partial(p, 8); }
inline Vec16 load_low8(const Half* p) {
  float lanes[16] = {};
  for (int i = 0; i < 8; ++i) lanes[i] = half_to_float(p[i]);
  return load(lanes);
}
inline Vec16 load(const int8_t* p) {
  return map([=](int i) {
    using Byte4 = int8_t __attribute__((vector_size(4)));
    Byte4 bytes;
    std::memcpy(&bytes, p + 4 * i, sizeof bytes);
    return __builtin_convertvector(bytes, Float4);
  });
}
inline Vec16 load_low8(const int8_t* p) {
  int8_t lanes[16] = {};
  std::memcpy(lanes, p, 8);
  return load(lanes);
}
inline void store(float* p, Vec16 a) { std::memcpy(p, &a, sizeof a); }
inline void store(Half* p, Vec16 a) {
  float lanes[16];
  store(lanes, a);
  for (int i = 0; i < 16; ++i) p[i] = float_to_half(lanes[i]);
}
inline void store_partial(float* p, Vec16 a, int count) {
  std::memcpy(p, &a, static_cast<size_t>(count) * sizeof(float));
}

// max|a|, max|b| over all lanes: infinity or NaN if there is any.
inline float largest_magnitude(Vec16 a, Vec16 b) {
  // As integers, magnitudes are in order, and NaNs are above infinity.
  Int4 largest{};
  for (int i = 0; i < 4; ++i) {
    const Int4 x = (Int4)a.v[i] & 0x7fffffff, y = (Int4)b.v[i] & 0x7fffffff;
    largest = x > largest ? x : largest;
    largest = y > largest ? y : largest;
  }
  int32_t bits = 0;
  for (int i = 0; i < 4; ++i) bits = largest[i] > bits ? largest[i] : bits;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// Stores a and b, whose lanes lie between -127 and 127, rounded to integers; returns their sum,
// the sum again, and the sums of each.
inline Int4 store_rounded(int8_t* p, Vec16 a, Vec16 b) {
  const Float4 shift = Float4{} + 12582912.0f;  // 1.5 * 2^23: adding it leaves the integer in the low bits
  Int4 sums[2] = {};
  for (int i = 0; i < 8; ++i) {
    const Int4 integers = (Int4)((i < 4 ? a.v[i] : b.v[i - 4]) + shift) - (Int4)shift;
    sums[i / 4] += integers;
    for (int lane = 0; lane < 4; ++lane) p[4 * i + lane] = static_cast<int8_t>(integers[lane]);
  }
  const auto total = [](Int4 four) { return (four[0] + four[1]) + (four[2] + four[3]); };
  const int32_t low = total(sums[0]), high = total(sums[1]);
  return Int4{low + high, low + high, low, high};
}

inline Vec16 operator+(Vec16 a, Vec16 b) {
  return map([&](int i) { return a.v[i] + b.v[i]; });
}
inline Vec16 operator-(Vec16 a, Vec16 b) {
  return map([&](int i) { return a.v[i] - b.v[i]; });
}
inline Vec16 operator*(Vec16 a, Vec16 b) {
  return map([&](int i) { return a.v[i] * b.v[i]; });
}
inline Vec16 operator/(Vec16 a, Vec16 b) {
  return map([&](int i) { return a.v[i] / b.v[i]; });
}
inline Vec16 fma(Vec16 a, Vec16 b, Vec16 c) {
  return map([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
// Of a NaN and a number, the second operand, as on x86.
inline Vec16 max(Vec16 a, Vec16 b) {
  return map([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec16 min(Vec16 a, Vec16 b) {
  return map([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}

inline Mask16 less(Vec16 a, Vec16 b) {
  return map_mask([&](int i) { return a.v[i] < b.v[i]; });
}
inline Mask16 greater_equal(Vec16 a, Vec16 b) {
  return map_mask([&](int i) { return a.v[i] >= b.v[i]; });
}
inline Mask16 unordered(Vec16 a, Vec16 b) {
  return map_mask([&](int i) { return (a.v[i] != a.v[i]) | (b.v[i] != b.v[i]); });
}
inline Mask16 operator|(Mask16 a, Mask16 b) {
  return map_mask([&](int i) { return a.v[i] | b.v[i]; });
}
inline Mask16 no_lanes() { return {}; }
inline uint32_t bits(Mask16 a) {
  uint32_t result = 0;
  for (int i = 0; i < 16; ++i) result |= a.v[i / 4][i % 4] != 0 ? 1u << i : 0u;
  return result;
}
// Lane i is bit i.
inline Mask16 lanes_of(uint32_t bits) {
  return map_mask([&](int i) {
    const Int4 lane = Int4{1, 2, 4, 8} << (4 * i);
    return (static_cast<int32_t>(bits) & lane) != 0;
  });
}
// Lanes first <= i < last.
inline Mask16 lanes_between(int first, int last) {
  return map_mask([&](int i) {
    const Int4 index = Int4{0, 1, 2, 3} + 4 * i;
    return (index >= first) & (index < last);
  });
}
inline Vec16 select(Mask16 mask, Vec16 a, Vec16 b) {
  return map([&](int i) { return mask.v[i] ? a.v[i] : b.v[i]; });
}

inline float first_lane(Vec16 a) { return a.v[0][0]; }
inline float sum_lanes(Vec16 a) {
  const Float4 four = (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]);
  return (four[0] + four[2]) + (four[1] + four[3]);
}
inline float max_lanes(Vec16 a) {
  float result = a.v[0][0];
  for (int i = 1; i < 16; ++i) result = a.v[i / 4][i % 4] > result ? a.v[i / 4][i % 4] : result;
  return result;
}

// p * 2^n, where n stands in the low bits of `shifted`.
inline Vec16 scale_by_power_of_two(Vec16 p, Vec16 shifted) {
  return map([&](int i) {
    using Unsigned4 = uint32_t __attribute__((vector_size(16)));
    const Unsigned4 exponent = (Unsigned4)shifted.v[i] << 23;
    return (Float4)((Unsigned4)p.v[i] + exponent);
  });
}

inline Double8 double_zero() { return {}; }
// Lane i of 8 takes lanes i and i + 8 of `a`, in this order.
inline Double8 add_lanes(Double8 sum, Vec16 a) {
  for (int i = 0; i < 16; ++i) sum.v[i % 8] += static_cast<double>(a.v[i / 4][i % 4]);
  return sum;
}
inline double sum_lanes(Double8 a) {
  const double four[4] = {a.v[0] + a.v[4], a.v[1] + a.v[5], a.v[2] + a.v[6], a.v[3] + a.v[7]};
  return (four[0] + four[2]) + (four[1] + four[3]);
}

inline void prefetch(const void* p) { __builtin_prefetch(p); }

}  // namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE
