#include "weight_format.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

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

// A group in GGML's files: its scale, its minimum if there is one (float16 each), then VALUE_BYTES of values.
template <int FACTORS, int VALUE_BYTES>
void pack_groups(const uint8_t* source, int64_t row_stride, int64_t rows, int64_t k, uint8_t* panel) {
  constexpr int64_t kGroupBytes = FACTORS * 2 + VALUE_BYTES;
  constexpr int64_t kSliceBytes = 16 * VALUE_BYTES;
  for (int64_t group = 0; group < k / kGroup; ++group) {
    uint8_t* block = panel + group * kGroupBytes * kPanelColumns;
    for (int64_t row = 0; row < rows; ++row) {
      const uint8_t* from = source + row * row_stride + group * kGroupBytes;
      for (int factor = 0; factor < FACTORS; ++factor) {
        std::memcpy(block + 2 * kSliceBytes + (factor * kPanelColumns + row) * 2, from + factor * 2, 2);
      }
      uint8_t* words = block + row / 16 * kSliceBytes + row % 16 * 4;
      for (int word = 0; word < VALUE_BYTES / 4; ++word) {
        std::memcpy(words + word * 64, from + FACTORS * 2 + word * 4, 4);
      }
    }
  }
}

constexpr WeightFormatInfo kFormats[kNumWeightFormats] = {
    {"float32", 1, 4, false, pack_elements<4>},     {"float16", 1, 2, false, pack_elements<2>},
    {"bfloat16", 1, 2, false, pack_elements<2>},    {"q4_0", kGroup, 18, true, pack_groups<1, 16>},
    {"q4_1", kGroup, 20, true, pack_groups<2, 16>}, {"q8_0", kGroup, 34, true, pack_groups<1, 32>},
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
