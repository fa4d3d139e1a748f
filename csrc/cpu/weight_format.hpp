// How weights are stored, in files and in the panels of a PackedMatrix.
//
// A panel holds 32 output columns (rows of the file's matrix). Along k it is a list of blocks, one a group of
// `group` elements, and a block holds the group of all 32 columns: [k / group][32 columns' group]. Nothing is
// inflated: a panel takes as many bytes as its 32 rows did.
//
// float32, float16, bfloat16 (group 1): [k][32].
// q4_0, q4_1, q8_0 (group 32): GGML's types of these names. A block of panels is
//   two slices of 16 columns, each: [words][16 columns][4 bytes], a word being four bytes of one column: byte
//   i
//     of 4 bits holds element i (low nibble, unsigned) and 16 + i; of 8 bits, element i (signed)
//   float16[32] scales, and for q4_1 float16[32] minima.
// An element is scale * (u - 8) for q4_0, scale * u + minimum for q4_1, scale * s for q8_0.
//
// To add a format: an entry and a packer in weight_format.cpp, and its micro-kernel in quantized.inl.
#pragma once

#include <cstddef>
#include <cstdint>

namespace streamllm::cpu {

inline constexpr int kPanelColumns = 32;
inline constexpr int kGroup = 32;  // elements along k that share a scale, in weights and in activations

enum class WeightFormat : uint8_t { float32, float16, bfloat16, q4_0, q4_1, q8_0 };
inline constexpr int kNumWeightFormats = 6;

struct WeightFormatInfo {
  const char* name;
  int group;        // k must be a multiple of it
  int group_bytes;  // of one row
  bool quantized;   // the product takes activations as QuantizedGroup
  // Copies `rows` rows of k elements, `row_stride` bytes apart, to the first columns of a
  // panel of zeros.
  void (*pack)(const uint8_t* source, int64_t row_stride, int64_t rows, int64_t k, uint8_t* panel);

  int64_t row_bytes(int64_t k) const { return k / group * group_bytes; }
};

const WeightFormatInfo& format_info(WeightFormat format);
// Throws std::invalid_argument that lists the names.
WeightFormat weight_format_from_name(const char* name);

}  // namespace streamllm::cpu
