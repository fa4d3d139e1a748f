// Dot products in generic vectors of 16-bit lanes, little-endian (SSE2, NEON, ...). Included by dot.hpp.
#pragma once

namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE {

using Short8 = int16_t __attribute__((vector_size(16)));
using UnsignedShort8 = uint16_t __attribute__((vector_size(16)));

inline constexpr int kDotAccumulators = 2;

// A 16-bit lane holds an even element (low byte) and the odd one after it.
struct Quads {
  UnsignedShort8 v[4];
};

inline Quads load_quads(const uint8_t* p) {
  Quads a;
  std::memcpy(&a, p, sizeof a);
  return a;
}
// Bits move by `count` places to the right (negative: left), those of `mask` stay of each byte.
inline Quads shift_and_mask(Quads a, int count, int mask) {
  for (UnsignedShort8& part : a.v) {
    part = (count >= 0 ? part >> count : part << -count) & static_cast<uint16_t>(mask * 0x0101);
  }
  return a;
}
inline Quads operator|(Quads a, const Quads& b) {
  for (int i = 0; i < 4; ++i) a.v[i] |= b.v[i];
  return a;
}
// table[a], a below 16.
inline Quads look_up(const int8_t* table, const Quads& a) {
  uint8_t bytes[64];
  std::memcpy(bytes, &a, sizeof bytes);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(table[byte]);
  return load_quads(bytes);
}
// The same four activations for every column.
inline Quads splat_quad(const int8_t* p) {
  uint16_t pairs[2];
  std::memcpy(pairs, p, sizeof pairs);
  const uint16_t a = pairs[0], b = pairs[1];
  const UnsignedShort8 part = {a, b, a, b, a, b, a, b};
  return {{part, part, part, part}};
}

inline Short8 signed_even(UnsignedShort8 a) { return (Short8)(a << 8) >> 8; }
inline Short8 signed_odd(UnsignedShort8 a) { return (Short8)a >> 8; }
// The two lanes of each column.
inline Int4 sum_pairs(Short8 a) { return (((Int4)a << 16) >> 16) + ((Int4)a >> 16); }

struct Int32x16 {
  Int4 v[4];
};
template <typename Byte>
inline Int32x16 widen(const Byte* p) {
  Int32x16 a;
  for (int i = 0; i < 16; ++i) a.v[i / 4][i % 4] = p[i];
  return a;
}
inline Int32x16 low_nibbles(Int32x16 a) {
  for (Int4& part : a.v) part &= 15;
  return a;
}
inline Int32x16 high_nibbles(Int32x16 bytes) {
  for (Int4& part : bytes.v) part >>= 4;
  return bytes;
}
inline Vec16 to_float(const Int32x16& a) {
  return map([&](int i) { return __builtin_convertvector(a.v[i], Float4); });
}

// 2^(e - 127) of exponents e below 255; of 255 infinity.
inline Vec16 powers_of_two(const Int32x16& e) {
  return map([&](int i) {
    const Int4 bits = e.v[i] << 23;
    return (Float4)(bits > 0 ? bits : Int4{} + (1 << 22));  // 2^-127 has no exponent of its own
  });
}

template <int BITS, int OFFSET>
struct UnsignedDot {
  static constexpr int kOffset = OFFSET;
  // A pair's product is at most 2 * (2^BITS - 1) * 127: so many quads fit into 16 bits.
  static constexpr int kFold = BITS <= 4 ? 8 : BITS == 5 ? 4 : 2;
  using Weight = Quads;
  static Weight weight(const Quads& a) { return a; }

  Short8 pairs[4];  // two 16-bit lanes a column
  Int32x16 sum;     // of the first kFold quads
  static UnsignedDot first(int32_t, const Weight& u, const Quads& x) {
    UnsignedDot dot{};
    dot.add(u, x, 0);
    return dot;
  }
  void add(const Weight& u, const Quads& x, int index) {
    for (int i = 0; i < 4; ++i) {
      if (index == kFold) {
        sum.v[i] = sum_pairs(pairs[i]);
        pairs[i] = Short8{};
      }
      pairs[i] += (Short8)(u.v[i] & 0xff) * signed_even(x.v[i]) + (Short8)(u.v[i] >> 8) * signed_odd(x.v[i]);
    }
  }
  Vec16 total(int32_t correction) const {
    Int32x16 wide;
    for (int i = 0; i < 4; ++i) wide.v[i] = sum_pairs(pairs[i]) + sum.v[i] + (OFFSET != 0 ? correction : 0);
    return to_float(wide);
  }
};

struct ByteDot {
  static constexpr int kOffset = 0;
  using Weight = Quads;
  static Weight weight(const Quads& a) { return a; }

  Int32x16 sum;
  static ByteDot first(int32_t, const Weight& s, const Quads& x) {
    ByteDot dot{};
    dot.add(s, x, 0);
    return dot;
  }
  void add(const Weight& s, const Quads& x, int) {
    for (int i = 0; i < 4; ++i) {
      // A pair's sum is at most 2 * 128 * 127 = 32,512.
      sum.v[i] +=
          sum_pairs(signed_even(s.v[i]) * signed_even(x.v[i]) + signed_odd(s.v[i]) * signed_odd(x.v[i]));
    }
  }
  Vec16 total(int32_t) const { return to_float(sum); }
};

}  // namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE
