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
inline Quads low_nibbles(Quads a) {
  for (UnsignedShort8& part : a.v) part &= 0x0f0f;
  return a;
}
inline Quads high_nibbles(Quads a) {
  for (UnsignedShort8& part : a.v) part = (part >> 4) & 0x0f0f;
  return a;
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
inline Vec16 to_float(const Int4* sums) {
  return map([=](int i) { return __builtin_convertvector(sums[i], Float4); });
}

template <int OFFSET>
struct NibbleDot {
  using Weight = Quads;
  static Weight weight(Quads a) { return a; }

  // Two 16-bit lanes a column. A pair's sum is at most 2 * 15 * 127, and eight of them 30,480.
  Short8 sum[4];
  static NibbleDot first(const QuantizedGroup&, const Weight& u, const Quads& x) {
    NibbleDot dot{};
    dot.add(u, x);
    return dot;
  }
  void add(const Weight& u, const Quads& x) {
    for (int i = 0; i < 4; ++i) {
      sum[i] += (Short8)(u.v[i] & 0xff) * signed_even(x.v[i]) + (Short8)(u.v[i] >> 8) * signed_odd(x.v[i]);
    }
  }
  Vec16 total(const QuantizedGroup& group) const {
    Int4 wide[4];
    for (int i = 0; i < 4; ++i) wide[i] = sum_pairs(sum[i]) + (OFFSET == 8 ? group.minus_8_sums : 0);
    return to_float(wide);
  }
};

struct ByteDot {
  using Weight = Quads;
  static Weight weight(Quads a) { return a; }

  Int4 sum[4];
  static ByteDot first(const QuantizedGroup&, const Weight& s, const Quads& x) {
    ByteDot dot{};
    dot.add(s, x);
    return dot;
  }
  void add(const Weight& s, const Quads& x) {
    for (int i = 0; i < 4; ++i) {
      // A pair's sum is at most 2 * 128 * 127 = 32,512.
      sum[i] +=
          sum_pairs(signed_even(s.v[i]) * signed_even(x.v[i]) + signed_odd(s.v[i]) * signed_odd(x.v[i]));
    }
  }
  Vec16 total(const QuantizedGroup&) const { return to_float(sum); }
};

}  // namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE
