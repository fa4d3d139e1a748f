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
// Bits move by `count` places to the right (negative: left), those of `mask` stay of each byte.
inline Quads shift_and_mask(Quads a, int count, int mask) {
  if (count > 0) a.v = _mm512_srli_epi16(a.v, static_cast<unsigned>(count));
  if (count < 0) a.v = _mm512_slli_epi16(a.v, static_cast<unsigned>(-count));
  return {_mm512_and_si512(a.v, _mm512_set1_epi8(static_cast<char>(mask)))};
}
inline Quads operator|(Quads a, Quads b) { return {_mm512_or_si512(a.v, b.v)}; }
// table[a], a below 16.
inline Quads look_up(const int8_t* table, Quads a) {
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), a.v)};
}
// The same four activations for every column.
inline Quads splat_quad(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, sizeof four);
  return {_mm512_set1_epi32(four)};
}

struct Int32x16 {
  __m512i v;
};
inline Int32x16 widen(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline Int32x16 widen(const int8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline Int32x16 low_nibbles(Int32x16 a) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(15))}; }
inline Int32x16 high_nibbles(Int32x16 bytes) { return {_mm512_srli_epi32(bytes.v, 4)}; }
inline Vec16 to_float(Int32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
// 2^(e - 127) of exponents e below 255; of 255 infinity.
inline Vec16 powers_of_two(Int32x16 e) {
  // 2^-127 has no exponent of its own.
  return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_slli_epi32(e.v, 23), _mm512_set1_epi32(1 << 22)))};
}

#if defined(STREAMLLM_SIMD_VNNI)

template <int BITS, int OFFSET>
struct UnsignedDot {
  static constexpr int kOffset = OFFSET;
  using Weight = Quads;
  static Weight weight(Quads a) { return a; }

  __m512i sum;
  static UnsignedDot first(int32_t correction, Weight u, Quads x) {
    const __m512i start = OFFSET != 0 ? _mm512_set1_epi32(correction) : _mm512_setzero_si512();
    return {_mm512_dpbusd_epi32(start, u.v, x.v)};
  }
  void add(Weight u, Quads x, int) { sum = _mm512_dpbusd_epi32(sum, u.v, x.v); }
  Vec16 total(int32_t) const { return {_mm512_cvtepi32_ps(sum)}; }
};

struct ByteDot {
  static constexpr int kOffset = 128;
  using Weight = Quads;
  // s + 128, unsigned
  static Weight weight(Quads a) { return {_mm512_xor_si512(a.v, _mm512_set1_epi8(-128))}; }

  __m512i sum;
  static ByteDot first(int32_t correction, Weight u, Quads x) {
    return {_mm512_dpbusd_epi32(_mm512_set1_epi32(correction), u.v, x.v)};
  }
  void add(Weight u, Quads x, int) { sum = _mm512_dpbusd_epi32(sum, u.v, x.v); }
  Vec16 total(int32_t) const { return {_mm512_cvtepi32_ps(sum)}; }
};

#else

// The sum so far, to be computed here: GCC else puts all additions of a group at its end, and the products
// that they wait for into memory.
inline __m512i kept(__m512i sum) {
  asm("" : "+v"(sum));
  return sum;
}
inline __m512i sum_pairs(__m512i a) { return _mm512_madd_epi16(a, _mm512_set1_epi16(1)); }

template <int BITS, int OFFSET>
struct UnsignedDot {
  static constexpr int kOffset = OFFSET;
  // A pair's product is at most 2 * (2^BITS - 1) * 127: so many quads fit into 16 bits.
  static constexpr int kFold = BITS <= 4 ? 8 : BITS == 5 ? 4 : 2;
  using Weight = Quads;
  static Weight weight(Quads a) { return a; }

  __m512i pairs;  // two 16-bit lanes a column
  __m512i sum;    // of the first kFold quads
  static UnsignedDot first(int32_t, Weight u, Quads x) {
    return {_mm512_maddubs_epi16(u.v, x.v), _mm512_setzero_si512()};
  }
  void add(Weight u, Quads x, int index) {
    const __m512i product = _mm512_maddubs_epi16(u.v, x.v);
    if (index == kFold) {
      sum = kept(sum_pairs(pairs));
      pairs = product;
    } else {
      pairs = kept(_mm512_add_epi16(pairs, product));
    }
  }
  Vec16 total(int32_t correction) const {
    __m512i wide = sum_pairs(pairs);
    if (kFold < 8) wide = _mm512_add_epi32(wide, sum);
    if (OFFSET != 0) wide = _mm512_add_epi32(wide, _mm512_set1_epi32(correction));
    return {_mm512_cvtepi32_ps(wide)};
  }
};

struct ByteDot {
  static constexpr int kOffset = 0;
  struct Weight {
    __m512i magnitude;  // 128 for -128, as the product takes it unsigned
    __mmask64 negative;
  };
  static Weight weight(Quads a) { return {_mm512_abs_epi8(a.v), _mm512_movepi8_mask(a.v)}; }

  __m512i sum;
  static __m512i products(Weight w, Quads x) {
    const __m512i signed_x = _mm512_mask_sub_epi8(x.v, w.negative, _mm512_setzero_si512(), x.v);
    // A pair's sum is at most 2 * 128 * 127 = 32,512.
    return sum_pairs(_mm512_maddubs_epi16(w.magnitude, signed_x));
  }
  static ByteDot first(int32_t, Weight w, Quads x) { return {products(w, x)}; }
  void add(Weight w, Quads x, int) { sum = kept(_mm512_add_epi32(sum, products(w, x))); }
  Vec16 total(int32_t) const { return {_mm512_cvtepi32_ps(sum)}; }
};

#endif

}  // namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE
