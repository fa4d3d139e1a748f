// Vec16 as two ymm registers. Included by simd.hpp.
#pragma once

#include <immintrin.h>

#if defined(STREAMLLM_SIMD_VNNI)
#define STREAMLLM_SIMD_NAMESPACE avx_vnni
#else
#define STREAMLLM_SIMD_NAMESPACE avx2
#endif

namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE {

struct Vec16 {
  __m256 lo, hi;
};
struct Mask16 {
  __m256 lo, hi;
};
struct Double8 {
  __m256d lo, hi;
};

inline constexpr int kAccumulators = 6;

inline Vec16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Vec16 load(const Half* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline __m256 widen_bfloat16(const BFloat16* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline Vec16 load(const BFloat16* p) { return {widen_bfloat16(p), widen_bfloat16(p + 8)}; }
// 16 or 32 numbers, divided by kFloat8InHalf; not for NaN.
template <int COUNT>
inline void widen(const Float8E4M3* from, Half* to) {
  for (int i = 0; i < COUNT; i += 16) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    // The sign is copied to the left: in the exponent's highest bit it must not be.
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(~0x4000));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), half);
  }
}

// Lanes first <= i < last.
inline Mask16 lanes_between(int first, int last) {
  const __m256i low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i high = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
  const __m256i before = _mm256_set1_epi32(first - 1), end = _mm256_set1_epi32(last);
  return {
      _mm256_castsi256_ps(_mm256_and_si256(_mm256_cmpgt_epi32(low, before), _mm256_cmpgt_epi32(end, low))),
      _mm256_castsi256_ps(_mm256_and_si256(_mm256_cmpgt_epi32(high, before), _mm256_cmpgt_epi32(end, high)))};
}
// Lanes from `count` on are 0.
inline Vec16 load_partial(const float* p, int count) {
  const Mask16 mask = lanes_between(0, count);
  return {_mm256_maskload_ps(p, _mm256_castps_si256(mask.lo)),
          _mm256_maskload_ps(p + 8, _mm256_castps_si256(mask.hi))};
}
inline Vec16 load_low8(const float* p) { return {_mm256_loadu_ps(p), _mm256_setzero_ps()}; }
inline Vec16 load_low8(const Half* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), _mm256_setzero_ps()};
}
inline __m256 widen_int8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline Vec16 load(const int8_t* p) { return {widen_int8(p), widen_int8(p + 8)}; }
inline Vec16 load_low8(const int8_t* p) { return {widen_int8(p), _mm256_setzero_ps()}; }
inline void store(float* p, Vec16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline void store(Half* p, Vec16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
inline void store_partial(float* p, Vec16 a, int count) {
  const Mask16 mask = lanes_between(0, count);
  _mm256_maskstore_ps(p, _mm256_castps_si256(mask.lo), a.lo);
  _mm256_maskstore_ps(p + 8, _mm256_castps_si256(mask.hi), a.hi);
}

// max|a|, max|b| over all lanes: infinity or NaN if there is any.
inline float largest_magnitude(Vec16 a, Vec16 b) {
  // As integers, magnitudes are in order, and NaNs are above infinity.
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  const auto without_sign = [&](__m256 x) { return _mm256_and_si256(_mm256_castps_si256(x), magnitude); };
  const __m256i eight = _mm256_max_epu32(_mm256_max_epu32(without_sign(a.lo), without_sign(a.hi)),
                                         _mm256_max_epu32(without_sign(b.lo), without_sign(b.hi)));
  __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
  four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1));
  return _mm_cvtss_f32(_mm_castsi128_ps(four));
}

// Stores a and b, whose lanes lie between -127 and 127, rounded to integers; returns their sum,
// the sum again, and the sums of each.
inline Int4 store_rounded(int8_t* p, Vec16 a, Vec16 b) {
  const __m256i words_a = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));
  const __m256i words_b = _mm256_packs_epi32(_mm256_cvtps_epi32(b.lo), _mm256_cvtps_epi32(b.hi));
  const __m256i bytes = _mm256_packs_epi16(words_a, words_b);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permutevar8x32_epi32(bytes, order));
  const __m256i ones = _mm256_set1_epi16(1);
  // [a, a, b, b] in each 128 bits, then in the first.
  const __m256i eight = _mm256_hadd_epi32(_mm256_madd_epi16(words_a, ones), _mm256_madd_epi16(words_b, ones));
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_hadd_epi32(four, four);
  return (Int4)_mm_blend_epi32(_mm_hadd_epi32(two, two), two, 0b1100);
}

inline Vec16 operator+(Vec16 a, Vec16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vec16 operator-(Vec16 a, Vec16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vec16 operator*(Vec16 a, Vec16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vec16 operator/(Vec16 a, Vec16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Vec16 fma(Vec16 a, Vec16 b, Vec16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Vec16 max(Vec16 a, Vec16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Vec16 min(Vec16 a, Vec16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }

inline Mask16 less(Vec16 a, Vec16 b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
inline Mask16 greater_equal(Vec16 a, Vec16 b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ)};
}
inline Mask16 unordered(Vec16 a, Vec16 b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, b.hi, _CMP_UNORD_Q)};
}
inline Mask16 operator|(Mask16 a, Mask16 b) { return {_mm256_or_ps(a.lo, b.lo), _mm256_or_ps(a.hi, b.hi)}; }
inline Mask16 no_lanes() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline uint32_t bits(Mask16 a) {
  return static_cast<uint32_t>(_mm256_movemask_ps(a.lo)) |
         (static_cast<uint32_t>(_mm256_movemask_ps(a.hi)) << 8);
}
// Lane i is bit i.
inline Mask16 lanes_of(uint32_t bits) {
  const __m256i all = _mm256_set1_epi32(static_cast<int>(bits));
  const __m256i low = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i high = _mm256_slli_epi32(low, 8);
  return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, low), low)),
          _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, high), high))};
}
inline Vec16 select(Mask16 mask, Vec16 a, Vec16 b) {
  return {_mm256_blendv_ps(b.lo, a.lo, mask.lo), _mm256_blendv_ps(b.hi, a.hi, mask.hi)};
}

inline float first_lane(Vec16 a) { return _mm256_cvtss_f32(a.lo); }
inline float sum_lanes(Vec16 a) {
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline float max_lanes(Vec16 a) {
  const __m256 eight = _mm256_max_ps(a.lo, a.hi);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

// p * 2^n, where n stands in the low bits of `shifted`.
inline __m256 scale_half(__m256 p, __m256 shifted) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
}
inline Vec16 scale_by_power_of_two(Vec16 p, Vec16 shifted) {
  return {scale_half(p.lo, shifted.lo), scale_half(p.hi, shifted.hi)};
}

inline Double8 double_zero() { return {_mm256_setzero_pd(), _mm256_setzero_pd()}; }
// Lane i of 8 takes lanes i and i + 8 of `a`, in this order.
inline Double8 add_lanes(Double8 sum, Vec16 a) {
  __m256d lo = _mm256_add_pd(sum.lo, _mm256_cvtps_pd(_mm256_castps256_ps128(a.lo)));
  __m256d hi = _mm256_add_pd(sum.hi, _mm256_cvtps_pd(_mm256_extractf128_ps(a.lo, 1)));
  lo = _mm256_add_pd(lo, _mm256_cvtps_pd(_mm256_castps256_ps128(a.hi)));
  hi = _mm256_add_pd(hi, _mm256_cvtps_pd(_mm256_extractf128_ps(a.hi, 1)));
  return {lo, hi};
}
inline double sum_lanes(Double8 a) {
  const __m256d four = _mm256_add_pd(a.lo, a.hi);
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
  return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

}  // namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE
