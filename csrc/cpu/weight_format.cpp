#include "weight_format.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "ggml_blocks.hpp"
#include "half.hpp"
#include "integer_block.hpp"

namespace streamllm::cpu {

namespace {

template <int ELEMENT_BYTES>
void pack_elements(const uint8_t* source, int64_t row_stride, int64_t rows, int64_t k, uint8_t* panel) {
  // One cache line of each source row at a time: its target lines stay in the first-level cache.
  constexpr int64_t kStretch = 64 / ELEMENT_BYTES;
  for (int64_t begin = 0; begin < k; begin += kStretch) {
    const int64_t end = std::min(k, begin + kStretch);
    for (int64_t row = 0; row < rows; ++row) {
      const uint8_t* from = source + row * row_stride;
      uint8_t* to = panel + row * ELEMENT_BYTES;
      for (int64_t i = begin; i < end; ++i) {
        std::memcpy(to + i * kPanelColumns * ELEMENT_BYTES, from + i * ELEMENT_BYTES, ELEMENT_BYTES);
      }
    }
  }
}

void pack_float8(const uint8_t* source, int64_t row_stride, int64_t rows, int64_t k, uint8_t* panel) {
  const int64_t num_scales = (k + kFloat8Block - 1) / kFloat8Block;
  for (int64_t block = 0; block < num_scales; ++block) {
    const int64_t begin = block * kFloat8Block, count = std::min<int64_t>(kFloat8Block, k - begin);
    uint8_t* values = panel + kPanelColumns * sizeof(float);
    for (int64_t row = 0; row < rows; ++row) {
      const uint8_t* from = source + row * row_stride;
      float scale;
      std::memcpy(&scale, from + block * sizeof scale, sizeof scale);
      scale *= kFloat8InHalf;
      from += num_scales * sizeof scale + begin;
      for (int64_t i = 0; i < count; ++i) {
        values[i * kPanelColumns + row] = from[i];
        if ((from[i] & 0x7f) == 0x7f) scale = std::numeric_limits<float>::quiet_NaN();
      }
      std::memcpy(panel + row * sizeof scale, &scale, sizeof scale);
    }
    panel = values + count * kPanelColumns;
  }
}

// Writes BITS bits, from SHIFT on, of the eight quads of a group to one column of a plane.
template <int BITS, int SHIFT>
void pack_plane(const uint32_t* quads, uint8_t* plane) {
  constexpr int kQuads = 8 / BITS;
  constexpr uint32_t kMask = ((1u << BITS) - 1) * 0x01010101u;
  for (int vector = 0; vector < BITS; ++vector) {
    uint32_t word = 0;
    for (int i = 0; i < kQuads; ++i) word |= (quads[vector * kQuads + i] >> SHIFT & kMask) << (BITS * i);
    std::memcpy(plane + vector * 64, &word, sizeof word);
  }
}

template <typename Block>
void pack_column(const ggml::DecodedBlock& decoded, int column, uint8_t* block) {
  constexpr BlockLayout kLayout = Block::kLayout;
  constexpr int kFactorBytes = kLayout.factor_bytes();
  std::memcpy(block + column * kFactorBytes, &decoded.d, kFactorBytes);
  if constexpr (kLayout.minima) {
    std::memcpy(block + (kPanelColumns + column) * kFactorBytes, &decoded.m, kFactorBytes);
  }
  if constexpr (kLayout.scales != GroupScales::none) {
    for (int i = 0; i < kLayout.num_scales(); ++i) {
      block[kLayout.scales_offset() + i * kPanelColumns + column] = decoded.scales[i];
      if constexpr (kLayout.scales == GroupScales::bytes && kLayout.minima) {
        block[kLayout.minima_offset() + i * kPanelColumns + column] = decoded.minima[i];
      }
    }
  }
  for (int group = 0; group < kLayout.groups; ++group) {
    uint32_t quads[kGroup / 4];
    std::memcpy(quads, decoded.values + group * kGroup, sizeof quads);
    uint8_t* slice = block + kLayout.values_offset() + (2 * group + column / 16) * kLayout.slice_bytes();
    pack_plane<kLayout.low_bits, 0>(quads, slice + column % 16 * 4);
    if constexpr (kLayout.high_bits > 0) {
      pack_plane<kLayout.high_bits, kLayout.low_bits>(quads, slice + kLayout.low_bits * 64 + column % 16 * 4);
    }
  }
}

template <typename Block>
void pack_blocks(const uint8_t* source, int64_t row_stride, int64_t rows, int64_t k, uint8_t* panel) {
  constexpr BlockLayout kLayout = Block::kLayout;
  ggml::DecodedBlock decoded;
  for (int64_t block = 0; block < k / kLayout.elements(); ++block) {
    for (int64_t row = 0; row < rows; ++row) {
      Block::decode(source + row * row_stride + block * Block::kBytes, decoded);
      pack_column<Block>(decoded, static_cast<int>(row), panel + block * kLayout.bytes());
    }
  }
}

template <int ELEMENT_BYTES>
constexpr WeightFormatInfo floats(const char* name) {
  return {name, 1, ELEMENT_BYTES, ELEMENT_BYTES, false, pack_elements<ELEMENT_BYTES>};
}

template <typename Block>
constexpr WeightFormatInfo blocks(const char* name) {
  constexpr BlockLayout kLayout = Block::kLayout;
  static_assert(kLayout.bytes() % kPanelColumns == 0);
  return {name, kLayout.elements(), Block::kBytes, kLayout.bytes() / kPanelColumns, true, pack_blocks<Block>};
}

constexpr WeightFormatInfo kFormats[kNumWeightFormats] = {
    floats<4>("float32"),       floats<2>("float16"),          floats<2>("bfloat16"),
    {"float8_e4m3", 1, 1, 1, false, pack_float8, kFloat8Block},
    blocks<ggml::Q4_0>("q4_0"), blocks<ggml::Q4_1>("q4_1"),    blocks<ggml::Q5_0>("q5_0"),
    blocks<ggml::Q5_1>("q5_1"), blocks<ggml::Q8_0>("q8_0"),    blocks<ggml::Q2_K>("q2_k"),
    blocks<ggml::Q3_K>("q3_k"), blocks<ggml::Q4_K>("q4_k"),    blocks<ggml::Q5_K>("q5_k"),
    blocks<ggml::Q6_K>("q6_k"), blocks<ggml::Iq4Nl>("iq4_nl"), blocks<ggml::Iq4Xs>("iq4_xs"),
    blocks<ggml::Mxfp4>("mxfp4"),
    blocks<IntegerBlock<4, 32>>("int4_32"),
    blocks<IntegerBlock<4, 64>>("int4_64"),
    blocks<IntegerBlock<4, 128>>("int4_128"),
    blocks<IntegerBlock<8, 32>>("int8_32"),
    blocks<IntegerBlock<8, 64>>("int8_64"),
    blocks<IntegerBlock<8, 128>>("int8_128"),
};

}  // namespace

const WeightFormatInfo& format_info(WeightFormat format) { return kFormats[static_cast<int>(format)]; }

WeightFormat weight_format_from_name(const char* name) {
  std::string names;
  for (int i = 0; i < kNumWeightFormats; ++i) {
    if (std::strcmp(kFormats[i].name, name) == 0) return static_cast<WeightFormat>(i);
    names += (i == 0 ? "" : ", ") + std::string(kFormats[i].name);
  }
  throw std::invalid_argument("weight format '" + std::string(name) + "' is not known; choose one of " +
                              names);
}

}  // namespace streamllm::cpu
