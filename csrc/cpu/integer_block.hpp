// Blocks of integers with a float32 scale and minimum (streamllm/ops/stored_rows.py), decoded as those of
// ggml_blocks.hpp are.
#pragma once

#include "ggml_blocks.hpp"

namespace streamllm::cpu {

// int4_* and int8_*.
template <int BITS, int ELEMENTS>
struct IntegerBlock {
  static constexpr BlockLayout kLayout = kIntegers<BITS, ELEMENTS>;
  static constexpr int kBytes = 8 + ELEMENTS * BITS / 8;
  static void decode(const uint8_t* block, ggml::DecodedBlock& out) {
    std::memcpy(&out.d, block, 4);
    std::memcpy(&out.m, block + 4, 4);
    if constexpr (BITS == 8) {
      std::memcpy(out.values, block + 8, ELEMENTS);
    } else {
      for (int i = 0; i < kLayout.groups; ++i) {
        ggml::decode_nibbles(block + 8 + 16 * i, 16, out.values + kGroup * i);
      }
    }
  }
};

}  // namespace streamllm::cpu
