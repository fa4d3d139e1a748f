// Dot products in zmm registers. Included by dot.hpp.
#pragma once

#include <immintrin.h>

namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE {

// What a micro-kernel may keep in registers: as many dot products, and as many float sums.
inline constexpr int kDotAccumulators = 12;

struct Quads {
  __m512i v;
};

inline Quads load_quads(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline Quads low_nibbles(Quads a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline Quads high_nibbles(Quads a) {
  return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))};
}
// The same four activations for every column.
inline Quads splat_quad(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, sizeof four);
  return {_mm512_set1_epi32(four)};
}

#if defined(STREAMLLM_SIMD_VNNI)

template <int OFFSET>
struct NibbleDot {
  using Weight = Quads;
  static Weight weight(Quads a) { return a; }

  __m512i sum;
  static NibbleDot first(const QuantizedGroup& group, Weight u, Quads x) {
    const __m512i start = OFFSET == 8 ? _mm512_set1_epi32(group.minus_8_sums) : _mm512_setzero_si512();
    return {_mm512_dpbusd_epi32(start, u.v, x.v)};
  }
  void add(Weight u, Quads x) { sum = _mm512_dpbusd_epi32(sum, u.v, x.v); }
  Vec16 total(const QuantizedGroup&) const { return {_mm512_cvtepi32_ps(sum)}; }
};

struct ByteDot {
  using Weight = Quads;
  // s + 128, unsigned
  static Weight weight(Quads a) { return {_mm512_xor_si512(a.v, _mm512_set1_epi8(-128))}; }

  __m512i sum;
  static ByteDot first(const QuantizedGroup& group, Weight u, Quads x) {
    return {_mm512_dpbusd_epi32(_mm512_set1_epi32(group.minus_128_sums), u.v, x.v)};
  }
  void add(Weight u, Quads x) { sum = _mm512_dpbusd_epi32(sum, u.v, x.v); }
  Vec16 total(const QuantizedGroup&) const { return {_mm512_cvtepi32_ps(sum)}; }
};

#else

// The sum so far, to be computed here: GCC else puts all additions of a group at its end, and the products
// that they wait for into memory.
inline __m512i kept(__m512i sum) {
  asm("" : "+v"(sum));
  return sum;
}

template <int OFFSET>
struct NibbleDot {
  using Weight = Quads;
  static Weight weight(Quads a) { return a; }

  // Two 16-bit lanes a column. A pair's sum is at most 2 * 15 * 127, and eight of them 30,480.
  __m512i sum;
  static NibbleDot first(const QuantizedGroup&, Weight u, Quads x) {
    return {_mm512_maddubs_epi16(u.v, x.v)};
  }
  void add(Weight u, Quads x) { sum = kept(_mm512_add_epi16(sum, _mm512_maddubs_epi16(u.v, x.v))); }
  Vec16 total(const QuantizedGroup& group) const {
    __m512i wide = _mm512_madd_epi16(sum, _mm512_set1_epi16(1));
    if (OFFSET == 8) wide = _mm512_add_epi32(wide, _mm512_set1_epi32(group.minus_8_sums));
    return {_mm512_cvtepi32_ps(wide)};
  }
};

struct ByteDot {
  struct Weight {
    __m512i magnitude;  // 128 for -128, as the product takes it unsigned
    __mmask64 negative;
  };
  static Weight weight(Quads a) { return {_mm512_abs_epi8(a.v), _mm512_movepi8_mask(a.v)}; }

  __m512i sum;
  static __m512i products(Weight w, Quads x) {
    const __m512i signed_x = _mm512_mask_sub_epi8(x.v, w.negative, _mm512_setzero_si512(), x.v);
    // A pair's sum is at most 2 * 128 * 127 = 32,512.
    const __m512i pairs = _mm512_maddubs_epi16(w.magnitude, signed_x);
    return _mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
  }
  static ByteDot first(const QuantizedGroup&, Weight w, Quads x) { return {products(w, x)}; }
  void add(Weight w, Quads x) { sum = kept(_mm512_add_epi32(sum, products(w, x))); }
  Vec16 total(const QuantizedGroup&) const { return {_mm512_cvtepi32_ps(sum)}; }
};

#endif

}  // namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE
