// GGML's quantised blocks, as files hold them: what each is made of, as integers.
//
// A block type names its layout in a panel (weight_format.hpp), says how many bytes it takes in a file, and
// decodes itself. The bits lie as ggml-common.h has them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "weight_format.hpp"

namespace streamllm::cpu::ggml {

inline constexpr int kMostElements = 256;

// A block taken apart; arrays are as long as the type has them.
struct DecodedBlock {
  uint32_t d, m;  // bits of the factors; m is what integer minima are multiplied by, the file's sign turned
  uint8_t scales[16], minima[16];  // int8, except that q2_k has both in `scales`
  uint8_t values[kMostElements];   // unsigned, or of q8_0 and int8_* int8
};

inline uint16_t read16(const uint8_t* p) {
  uint16_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

inline void decode_nibbles(const uint8_t* source, int bytes, uint8_t* values) {
  for (int i = 0; i < bytes; ++i) {
    values[i] = source[i] & 15;
    values[bytes + i] = source[i] >> 4;
  }
}

// `count` runs of 32 elements, run j in bits BITS * j of the same 32 bytes; they are added to the values at
// `shift`.
template <int BITS>
void add_runs(const uint8_t* source, int count, int shift, uint8_t* values) {
  constexpr int kMask = (1 << BITS) - 1;
  for (int run = 0; run < count; ++run) {
    for (int i = 0; i < 32; ++i) values[32 * run + i] |= (source[i] >> (BITS * run) & kMask) << shift;
  }
}

// The fifth bits of 32 elements.
inline void add_fifth_bits(const uint8_t* source, uint8_t* values) {
  for (int i = 0; i < 32; ++i) values[i] |= (source[i / 8] >> i % 8 & 1) << 4;
}

// Eight scales and minima of 6 bits.
inline void decode_scales_and_minima(const uint8_t* source, DecodedBlock& out) {
  const uint8_t *low_scales = source, *low_minima = source + 4, *rest = source + 8;
  for (int i = 0; i < 4; ++i) {
    out.scales[i] = low_scales[i] & 63;
    out.minima[i] = low_minima[i] & 63;
    out.scales[4 + i] = (rest[i] & 15) | (low_scales[i] >> 2 & 0x30);
    out.minima[4 + i] = rest[i] >> 4 | (low_minima[i] >> 2 & 0x30);
  }
}

inline uint16_t negated(uint16_t half) { return half ^ 0x8000; }

struct Q4_0 {
  static constexpr BlockLayout kLayout = kQ4_0;
  static constexpr int kBytes = 18;
  static void decode(const uint8_t* block, DecodedBlock& out) {
    out.d = read16(block);
    decode_nibbles(block + 2, 16, out.values);
  }
};

struct Q4_1 {
  static constexpr BlockLayout kLayout = kQ4_1;
  static constexpr int kBytes = 20;
  static void decode(const uint8_t* block, DecodedBlock& out) {
    out.d = read16(block), out.m = read16(block + 2);
    decode_nibbles(block + 4, 16, out.values);
  }
};

struct Q5_0 {
  static constexpr BlockLayout kLayout = kQ5_0;
  static constexpr int kBytes = 22;
  static void decode(const uint8_t* block, DecodedBlock& out) {
    out.d = read16(block);
    decode_nibbles(block + 6, 16, out.values);
    add_fifth_bits(block + 2, out.values);
  }
};

struct Q5_1 {
  static constexpr BlockLayout kLayout = kQ5_1;
  static constexpr int kBytes = 24;
  static void decode(const uint8_t* block, DecodedBlock& out) {
    out.d = read16(block), out.m = read16(block + 2);
    decode_nibbles(block + 8, 16, out.values);
    add_fifth_bits(block + 4, out.values);
  }
};

struct Q8_0 {
  static constexpr BlockLayout kLayout = kQ8_0;
  static constexpr int kBytes = 34;
  static void decode(const uint8_t* block, DecodedBlock& out) {
    out.d = read16(block);
    std::memcpy(out.values, block + 2, 32);
  }
};

struct Q2_K {
  static constexpr BlockLayout kLayout = kQ2_K;
  static constexpr int kBytes = 84;
  static void decode(const uint8_t* block, DecodedBlock& out) {
    out.d = read16(block + 80), out.m = negated(read16(block + 82));
    std::memcpy(out.scales, block, 16);
    std::fill_n(out.values, 256, uint8_t{0});
    for (int half = 0; half < 2; ++half) add_runs<2>(block + 16 + 32 * half, 4, 0, out.values + 128 * half);
  }
};

struct Q3_K {
  static constexpr BlockLayout kLayout = kQ3_K;
  static constexpr int kBytes = 110;
  static void decode(const uint8_t* block, DecodedBlock& out) {
    out.d = read16(block + 108);
    const uint8_t *low_scales = block + 96, *high_scales = block + 104;
    for (int i = 0; i < 16; ++i) {
      const int low = low_scales[i % 8] >> (i / 8 * 4) & 15, high = high_scales[i % 4] >> (i / 4 * 2) & 3;
      out.scales[i] = static_cast<uint8_t>((low | high << 4) - 32);
    }
    std::fill_n(out.values, 256, uint8_t{0});
    for (int half = 0; half < 2; ++half) add_runs<2>(block + 32 + 32 * half, 4, 0, out.values + 128 * half);
    add_runs<1>(block, 8, 2, out.values);
  }
};

struct Q4_K {
  static constexpr BlockLayout kLayout = kQ4_K;
  static constexpr int kBytes = 144;
  static void decode(const uint8_t* block, DecodedBlock& out) {
    out.d = read16(block), out.m = negated(read16(block + 2));
    decode_scales_and_minima(block + 4, out);
    for (int i = 0; i < 4; ++i) decode_nibbles(block + 16 + 32 * i, 32, out.values + 64 * i);
  }
};

struct Q5_K {
  static constexpr BlockLayout kLayout = kQ5_K;
  static constexpr int kBytes = 176;
  static void decode(const uint8_t* block, DecodedBlock& out) {
    out.d = read16(block), out.m = negated(read16(block + 2));
    decode_scales_and_minima(block + 4, out);
    for (int i = 0; i < 4; ++i) decode_nibbles(block + 48 + 32 * i, 32, out.values + 64 * i);
    add_runs<1>(block + 16, 8, 4, out.values);
  }
};

struct Q6_K {
  static constexpr BlockLayout kLayout = kQ6_K;
  static constexpr int kBytes = 210;
  static void decode(const uint8_t* block, DecodedBlock& out) {
    out.d = read16(block + 208);
    std::memcpy(out.scales, block + 192, 16);
    for (int half = 0; half < 2; ++half) {
      decode_nibbles(block + 64 * half, 64, out.values + 128 * half);
      add_runs<2>(block + 128 + 32 * half, 4, 4, out.values + 128 * half);
    }
  }
};

struct Iq4Nl {
  static constexpr BlockLayout kLayout = kIq4Nl;
  static constexpr int kBytes = 18;
  static void decode(const uint8_t* block, DecodedBlock& out) { Q4_0::decode(block, out); }
};

struct Iq4Xs {
  static constexpr BlockLayout kLayout = kIq4Xs;
  static constexpr int kBytes = 136;
  static void decode(const uint8_t* block, DecodedBlock& out) {
    out.d = read16(block);
    const uint16_t high_scales = read16(block + 2);
    for (int i = 0; i < 8; ++i) {
      const int low = block[4 + i / 2] >> (i % 2 * 4) & 15, high = high_scales >> (2 * i) & 3;
      out.scales[i] = static_cast<uint8_t>((low | high << 4) - 32);
      decode_nibbles(block + 8 + 16 * i, 16, out.values + 32 * i);
    }
  }
};

struct Mxfp4 {
  static constexpr BlockLayout kLayout = kMxfp4;
  static constexpr int kBytes = 17;
  static void decode(const uint8_t* block, DecodedBlock& out) {
    out.d = block[0];
    decode_nibbles(block + 1, 16, out.values);
  }
};

}  // namespace streamllm::cpu::ggml
