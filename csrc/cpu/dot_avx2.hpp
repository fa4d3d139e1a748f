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
// Bits move by `count` places to the right (negative: left), those of `mask` stay of each byte.
inline __m256i shift_and_mask(__m256i a, int count, int mask) {
  if (count > 0) a = _mm256_srli_epi16(a, count);
  if (count < 0) a = _mm256_slli_epi16(a, -count);
  return _mm256_and_si256(a, _mm256_set1_epi8(static_cast<char>(mask)));
}
inline Quads shift_and_mask(Quads a, int count, int mask) {
  return {shift_and_mask(a.lo, count, mask), shift_and_mask(a.hi, count, mask)};
}
inline Quads operator|(Quads a, Quads b) {
  return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}
// table[a], a below 16.
inline Quads look_up(const int8_t* table, Quads a) {
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  const __m256i twice = _mm256_broadcastsi128_si256(entries);
  return {_mm256_shuffle_epi8(twice, a.lo), _mm256_shuffle_epi8(twice, a.hi)};
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
inline Int32x16 widen(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
inline Int32x16 widen(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
}
inline Int32x16 low_nibbles(Int32x16 a) {
  const __m256i mask = _mm256_set1_epi32(15);
  return {_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask)};
}
inline Int32x16 high_nibbles(Int32x16 bytes) {
  return {_mm256_srli_epi32(bytes.lo, 4), _mm256_srli_epi32(bytes.hi, 4)};
}
inline Vec16 to_float(Int32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
// 2^(e - 127) of exponents e below 255; of 255 infinity.
inline Vec16 powers_of_two(Int32x16 e) {
  const __m256i smallest = _mm256_set1_epi32(1 << 22);  // 2^-127 has no exponent of its own
  return {_mm256_castsi256_ps(_mm256_max_epi32(_mm256_slli_epi32(e.lo, 23), smallest)),
          _mm256_castsi256_ps(_mm256_max_epi32(_mm256_slli_epi32(e.hi, 23), smallest))};
}

#if defined(STREAMLLM_SIMD_VNNI)

inline Int32x16 add_products(Int32x16 sum, Quads u, Quads x) {
  return {_mm256_dpbusd_avx_epi32(sum.lo, u.lo, x.lo), _mm256_dpbusd_avx_epi32(sum.hi, u.hi, x.hi)};
}

template <int BITS, int OFFSET>
struct UnsignedDot {
  static constexpr int kOffset = OFFSET;
  using Weight = Quads;
  static Weight weight(Quads a) { return a; }

  Int32x16 sum;
  static UnsignedDot first(int32_t correction, Weight u, Quads x) {
    return {add_products(splat_int32(OFFSET != 0 ? correction : 0), u, x)};
  }
  void add(Weight u, Quads x, int) { sum = add_products(sum, u, x); }
  Vec16 total(int32_t) const { return to_float(sum); }
};

struct ByteDot {
  static constexpr int kOffset = 128;
  using Weight = Quads;
  // s + 128, unsigned
  static Weight weight(Quads a) {
    const __m256i offset = _mm256_set1_epi8(-128);
    return {_mm256_xor_si256(a.lo, offset), _mm256_xor_si256(a.hi, offset)};
  }

  Int32x16 sum;
  static ByteDot first(int32_t correction, Weight u, Quads x) {
    return {add_products(splat_int32(correction), u, x)};
  }
  void add(Weight u, Quads x, int) { sum = add_products(sum, u, x); }
  Vec16 total(int32_t) const { return to_float(sum); }
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

template <int BITS, int OFFSET>
struct UnsignedDot {
  static constexpr int kOffset = OFFSET;
  // A pair's product is at most 2 * (2^BITS - 1) * 127: so many quads fit into 16 bits.
  static constexpr int kFold = BITS <= 4 ? 8 : BITS == 5 ? 4 : 2;
  using Weight = Quads;
  static Weight weight(Quads a) { return a; }

  __m256i lo, hi;  // two 16-bit lanes a column
  Int32x16 sum;    // of the first kFold quads
  static UnsignedDot first(int32_t, Weight u, Quads x) {
    return {_mm256_maddubs_epi16(u.lo, x.lo), _mm256_maddubs_epi16(u.hi, x.hi), splat_int32(0)};
  }
  void add(Weight u, Quads x, int index) {
    const __m256i product_lo = _mm256_maddubs_epi16(u.lo, x.lo);
    const __m256i product_hi = _mm256_maddubs_epi16(u.hi, x.hi);
    if (index == kFold) {
      sum = sum_pairs(lo, hi);
      sum = {kept(sum.lo), kept(sum.hi)};
      lo = product_lo, hi = product_hi;
    } else {
      lo = kept(_mm256_add_epi16(lo, product_lo));
      hi = kept(_mm256_add_epi16(hi, product_hi));
    }
  }
  Vec16 total(int32_t correction) const {
    Int32x16 wide = sum_pairs(lo, hi);
    if (kFold < 8) wide = wide + sum;
    return to_float(OFFSET != 0 ? wide + splat_int32(correction) : wide);
  }
};

struct ByteDot {
  static constexpr int kOffset = 0;
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
  static ByteDot first(int32_t, Weight w, Quads x) { return {products(w, x)}; }
  void add(Weight w, Quads x, int) {
    sum = sum + products(w, x);
    sum = {kept(sum.lo), kept(sum.hi)};
  }
  Vec16 total(int32_t) const { return to_float(sum); }
};

#endif

}  // namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE
