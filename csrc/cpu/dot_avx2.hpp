// Dot products in pairs of ymm registers. Included by dot.hpp.
#pragma once

#include <immintrin.h>

namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE {

// What a micro-kernel may keep in registers; its float sums are in memory.
inline constexpr int kDotAccumulators = 4;

struct Quads {
  __m256i lo, hi;
};

inline Quads load_quads(const uint8_t* p) {
  const auto* halves = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
inline __m256i nibbles(__m256i a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
inline Quads low_nibbles(Quads a) { return {nibbles(a.lo), nibbles(a.hi)}; }
inline Quads high_nibbles(Quads a) {
  return {nibbles(_mm256_srli_epi16(a.lo, 4)), nibbles(_mm256_srli_epi16(a.hi, 4))};
}
// The same four activations for every column.
inline Quads splat_quad(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, sizeof four);
  return {_mm256_set1_epi32(four), _mm256_set1_epi32(four)};
}

struct Int32x16 {
  __m256i lo, hi;
};
inline Int32x16 splat_int32(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Int32x16 operator+(Int32x16 a, Int32x16 b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
inline Vec16 to_float(Int32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }

#if defined(STREAMLLM_SIMD_VNNI)

inline Int32x16 add_products(Int32x16 sum, Quads u, Quads x) {
  return {_mm256_dpbusd_avx_epi32(sum.lo, u.lo, x.lo), _mm256_dpbusd_avx_epi32(sum.hi, u.hi, x.hi)};
}

template <int OFFSET>
struct NibbleDot {
  using Weight = Quads;
  static Weight weight(Quads a) { return a; }

  Int32x16 sum;
  static NibbleDot first(const QuantizedGroup& group, Weight u, Quads x) {
    return {add_products(splat_int32(OFFSET == 8 ? group.minus_8_sums : 0), u, x)};
  }
  void add(Weight u, Quads x) { sum = add_products(sum, u, x); }
  Vec16 total(const QuantizedGroup&) const { return to_float(sum); }
};

struct ByteDot {
  using Weight = Quads;
  // s + 128, unsigned
  static Weight weight(Quads a) {
    const __m256i offset = _mm256_set1_epi8(-128);
    return {_mm256_xor_si256(a.lo, offset), _mm256_xor_si256(a.hi, offset)};
  }

  Int32x16 sum;
  static ByteDot first(const QuantizedGroup& group, Weight u, Quads x) {
    return {add_products(splat_int32(group.minus_128_sums), u, x)};
  }
  void add(Weight u, Quads x) { sum = add_products(sum, u, x); }
  Vec16 total(const QuantizedGroup&) const { return to_float(sum); }
};

#else

// The sum so far, to be computed here: GCC else puts all additions of a group at its end, and the products
// that they wait for into memory.
inline __m256i kept(__m256i sum) {
  asm("" : "+x"(sum));
  return sum;
}

inline Int32x16 sum_pairs(__m256i lo, __m256i hi) {
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_madd_epi16(lo, ones), _mm256_madd_epi16(hi, ones)};
}

template <int OFFSET>
struct NibbleDot {
  using Weight = Quads;
  static Weight weight(Quads a) { return a; }

  // Two 16-bit lanes a column. A pair's sum is at most 2 * 15 * 127, and eight of them 30,480.
  __m256i lo, hi;
  static NibbleDot first(const QuantizedGroup&, Weight u, Quads x) {
    return {_mm256_maddubs_epi16(u.lo, x.lo), _mm256_maddubs_epi16(u.hi, x.hi)};
  }
  void add(Weight u, Quads x) {
    lo = kept(_mm256_add_epi16(lo, _mm256_maddubs_epi16(u.lo, x.lo)));
    hi = kept(_mm256_add_epi16(hi, _mm256_maddubs_epi16(u.hi, x.hi)));
  }
  Vec16 total(const QuantizedGroup& group) const {
    const Int32x16 wide = sum_pairs(lo, hi);
    return to_float(OFFSET == 8 ? wide + splat_int32(group.minus_8_sums) : wide);
  }
};

struct ByteDot {
  struct Weight {
    __m256i lo, hi;
    __m256i magnitude_lo, magnitude_hi;  // 128 for -128, as the product takes it unsigned
  };
  static Weight weight(Quads a) { return {a.lo, a.hi, _mm256_abs_epi8(a.lo), _mm256_abs_epi8(a.hi)}; }

  Int32x16 sum;
  // A pair's sum is at most 2 * 128 * 127 = 32,512.
  static Int32x16 products(Weight w, Quads x) {
    return sum_pairs(_mm256_maddubs_epi16(w.magnitude_lo, _mm256_sign_epi8(x.lo, w.lo)),
                     _mm256_maddubs_epi16(w.magnitude_hi, _mm256_sign_epi8(x.hi, w.hi)));
  }
  static ByteDot first(const QuantizedGroup&, Weight w, Quads x) { return {products(w, x)}; }
  void add(Weight w, Quads x) {
    sum = sum + products(w, x);
    sum = {kept(sum.lo), kept(sum.hi)};
  }
  Vec16 total(const QuantizedGroup&) const { return to_float(sum); }
};

#endif

}  // namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE
