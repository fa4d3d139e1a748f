// Vec16 as one zmm register. Included by simd.hpp.
#pragma once

#include <immintrin.h>

#if defined(STREAMLLM_SIMD_VNNI)
#define STREAMLLM_SIMD_NAMESPACE avx512_vnni
#else
#define STREAMLLM_SIMD_NAMESPACE avx512
#endif

namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE {

struct Vec16 {
  __m512 v;
};
struct Mask16 {
  __mmask16 v;
};
struct Double8 {
  __m512d v;
};

// What a micro-kernel may keep in registers, in Vec16.
inline constexpr int kAccumulators = 24;

inline Vec16 splat(float x) { return {_mm512_set1_ps(x)}; }
inline Vec16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec16 load(const Half* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Vec16 load(const BFloat16* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
// 16 or 32 numbers, divided by kFloat8InHalf; not for NaN.
template <int COUNT>
inline void widen(const Float8E4M3* from, Half* to) {
  static_assert(COUNT == 16 || COUNT == 32);
  // The sign is copied to the left: in the exponent's highest bit it must not be.
  if constexpr (COUNT == 32) {
    const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    _mm512_storeu_si512(to, _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16(~0x4000)));
  } else {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(~0x4000));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), half);
  }
}
// Lanes from `count` on are 0.
inline Vec16 load_partial(const float* p, int count) {
  return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1u), p)};
}
inline Vec16 load_low8(const float* p) { return {_mm512_zextps256_ps512(_mm256_loadu_ps(p))}; }
inline Vec16 load_low8(const Half* p) {
  return {_mm512_zextps256_ps512(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline Vec16 load(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
}
inline Vec16 load_low8(const int8_t* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
}
inline void store(float* p, Vec16 a) { _mm512_storeu_ps(p, a.v); }
inline void store(Half* p, Vec16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline void store_partial(float* p, Vec16 a, int count) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1u), a.v);
}

// max|a|, max|b| over all lanes: infinity or NaN if there is any.
inline float largest_magnitude(Vec16 a, Vec16 b) {
  // As integers, magnitudes are in order, and NaNs are above infinity.
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  const __m512i larger = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(a.v), magnitude),
                                          _mm512_and_si512(_mm512_castps_si512(b.v), magnitude));
  const uint32_t largest = _mm512_reduce_max_epu32(larger);
  float result;
  std::memcpy(&result, &largest, sizeof result);
  return result;
}

// Stores a and b, whose lanes lie between -127 and 127, rounded to integers; returns their sum,
// the sum again, and the sums of each.
inline Int4 store_rounded(int8_t* p, Vec16 a, Vec16 b) {
  const __m512i low = _mm512_cvtps_epi32(a.v), high = _mm512_cvtps_epi32(b.v);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(low));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16), _mm512_cvtepi32_epi8(high));
  // Pairs, [low, low, high, high] in each 128 bits, then in the first.
  const __m512i pairs = _mm512_madd_epi16(_mm512_packs_epi32(low, high), _mm512_set1_epi16(1));
  const __m256i eight = _mm256_add_epi32(_mm512_castsi512_si256(pairs), _mm512_extracti64x4_epi64(pairs, 1));
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_hadd_epi32(four, four);
  return (Int4)_mm_blend_epi32(_mm_hadd_epi32(two, two), two, 0b1100);
}

inline Vec16 operator+(Vec16 a, Vec16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec16 operator-(Vec16 a, Vec16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec16 operator*(Vec16 a, Vec16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec16 operator/(Vec16 a, Vec16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec16 fma(Vec16 a, Vec16 b, Vec16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec16 max(Vec16 a, Vec16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec16 min(Vec16 a, Vec16 b) { return {_mm512_min_ps(a.v, b.v)}; }

inline Mask16 less(Vec16 a, Vec16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
inline Mask16 greater_equal(Vec16 a, Vec16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ)}; }
inline Mask16 unordered(Vec16 a, Vec16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_UNORD_Q)}; }
inline Mask16 operator|(Mask16 a, Mask16 b) { return {static_cast<__mmask16>(a.v | b.v)}; }
inline Mask16 no_lanes() { return {0}; }
inline uint32_t bits(Mask16 a) { return a.v; }
// Lane i is bit i.
inline Mask16 lanes_of(uint32_t bits) { return {static_cast<__mmask16>(bits)}; }
// Lanes first <= i < last.
inline Mask16 lanes_between(int first, int last) {
  return {static_cast<__mmask16>(((1u << last) - 1u) & ~((1u << first) - 1u))};
}
inline Vec16 select(Mask16 mask, Vec16 a, Vec16 b) { return {_mm512_mask_blend_ps(mask.v, b.v, a.v)}; }

inline float first_lane(Vec16 a) { return _mm512_cvtss_f32(a.v); }
inline float sum_lanes(Vec16 a) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline float max_lanes(Vec16 a) { return _mm512_reduce_max_ps(a.v); }

// p * 2^n, where n stands in the low bits of `shifted`.
inline Vec16 scale_by_power_of_two(Vec16 p, Vec16 shifted) {
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p.v), exponent))};
}

inline Double8 double_zero() { return {_mm512_setzero_pd()}; }
// Lane i of 8 takes lanes i and i + 8 of `a`, in this order.
inline Double8 add_lanes(Double8 sum, Vec16 a) {
  const __m512d low = _mm512_add_pd(sum.v, _mm512_cvtps_pd(_mm512_castps512_ps256(a.v)));
  return {_mm512_add_pd(low, _mm512_cvtps_pd(_mm512_extractf32x8_ps(a.v, 1)))};
}
inline double sum_lanes(Double8 a) {
  const __m256d four = _mm256_add_pd(_mm512_castpd512_pd256(a.v), _mm512_extractf64x4_pd(a.v, 1));
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
  return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

}  // namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE
