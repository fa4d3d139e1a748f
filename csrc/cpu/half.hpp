// IEEE binary16, bfloat16 and 8-bit floats as storage, with conversions for CPUs that have no instruction for
// them.
#pragma once

#include <cstdint>
#include <cstring>

namespace streamllm::cpu {

struct Half {
  uint16_t bits;
};

// The upper half of a float32.
struct BFloat16 {
  uint16_t bits;
};

// Sign, 4 bits of exponent, 3 of mantissa; no infinity; 0x7f and 0xff are NaN.
struct Float8E4M3 {
  uint8_t bits;
};

inline constexpr float kLargestHalf = 65504.0f;
// Exponent and mantissa of a Float8E4M3 in a Half's place mean the number divided by this.
inline constexpr float kFloat8InHalf = 256.0f;

namespace {  // compiled into each translation unit with its own instruction set

inline float half_to_float(Half half) {
  const uint32_t sign = static_cast<uint32_t>(half.bits & 0x8000u) << 16;
  uint32_t magnitude = static_cast<uint32_t>(half.bits & 0x7fffu) << 13;
  float value;
  if (magnitude >= 0x0f800000u) {  // infinity or NaN
    magnitude |= 0x7f800000u;
    std::memcpy(&value, &magnitude, sizeof value);
  } else {  // the product rebases the exponent, and is exact for subnormals too
    std::memcpy(&value, &magnitude, sizeof value);
    value *= 0x1p112f;
  }
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits |= sign;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float bfloat16_to_float(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// The number divided by kFloat8InHalf; not for NaN.
inline Half float8_in_half(Float8E4M3 value) {
  return Half{static_cast<uint16_t>((value.bits & 0x80) << 8 | (value.bits & 0x7f) << 7)};
}

// Rounds to nearest even; the magnitude must not exceed kLargestHalf. NaN stays NaN.
inline Half float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return Half{static_cast<uint16_t>(sign | 0x7e00u)};
  if (bits < 0x38800000u) {  // below 2^-14: adding 0.5 rounds to multiples of 2^-24, a subnormal's unit
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof magnitude);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, sizeof bits);
    return Half{static_cast<uint16_t>(sign | (bits - 0x3f000000u))};
  }
  bits += 0xfffu + ((bits >> 13) & 1u);
  return Half{static_cast<uint16_t>(sign | ((bits - 0x38000000u) >> 13))};
}

}  // namespace
}  // namespace streamllm::cpu
