// How weights are stored, in files and in the panels of a PackedMatrix.
//
// A panel holds 32 output columns (rows of the file's matrix). Along k it is a list of blocks, one a block of
// the file's format, and a block holds that block of all 32 columns: [k / elements][32 columns' block].
//
// float32, float16, bfloat16 (1 element): [k][32].
//
// The others are GGML's types of these names. What an element is made of is what the file holds: an integer,
// and the factors of the elements around it. A block of 32 elements (q4_0 to q8_0, iq4_nl) or of 256 (the
// others: eight groups of 32) is
//   float16[32] d, and with minima float16[32] m;
//   of 256 elements, a scale of each 32 or 16 elements: int8[scales][32], and with minima int8[scales][32];
//     q2_k: uint8[scales][32], scales in the low nibbles and minima in the high ones;
//   for each group two slices of 16 columns, each made of planes of the integers' bits.
// An element is scale * (u - offset) + minimum: scale is d, or d times the integer scale, and minimum is m,
// or m times the integer minimum (m with the other sign than in a file, where blocks of 256 subtract it). The
// integers have 4 or 6 bits in a file; as bytes they make a panel up to 4 % larger than its rows were, q3_k's
// most. Their products with d as float32 would make it a third larger, and are not exact in float16.
//
// A plane has BITS bits of each element: BITS vectors of 64 bytes, [16 columns][4 bytes], one after the other
// for 32 / BITS elements. Byte i holds, from the lowest bits up, elements i, 4 + i, 8 + i ... of those. Eight
// bits are signed; the four of iq4_nl and iq4_xs stand for an entry of kIq4Values.
//
// To add a format: its layout here, an entry and a decoder in weight_format.cpp, and its micro-kernel in
// quantized.inl.
#pragma once

#include <cstddef>
#include <cstdint>

namespace streamllm::cpu {

inline constexpr int kPanelColumns = 32;
inline constexpr int kGroup = 32;  // elements along k that share a scale in activations

enum class WeightFormat : uint8_t {
  float32,
  float16,
  bfloat16,
  q4_0,
  q4_1,
  q5_0,
  q5_1,
  q8_0,
  q2_k,
  q3_k,
  q4_k,
  q5_k,
  q6_k,
  iq4_nl,
  iq4_xs
};
inline constexpr int kNumWeightFormats = 15;

inline constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                          1,    13,   25,  38,  53,  69,  89,  113};

enum class GroupScales : uint8_t { none, bytes, nibbles };

// A block of a quantised format in a panel. Its members are consteval: no instruction set's copy of them can
// reach another's kernels.
struct BlockLayout {
  int groups;               // of 32 elements
  int low_bits, high_bits;  // of the planes; high_bits 0: there is one plane
  bool minima = false;
  GroupScales scales = GroupScales::none;
  int scales_per_group = 1;

  consteval int elements() const { return groups * kGroup; }
  consteval int num_scales() const { return groups * scales_per_group; }
  consteval int64_t scales_offset() const { return (minima ? 2 : 1) * kPanelColumns * 2; }
  consteval int64_t minima_offset() const { return scales_offset() + num_scales() * kPanelColumns; }
  consteval int64_t values_offset() const {
    if (scales == GroupScales::none) return scales_offset();
    return scales == GroupScales::bytes && minima ? minima_offset() + num_scales() * kPanelColumns
                                                  : minima_offset();
  }
  consteval int64_t slice_bytes() const { return (low_bits + high_bits) * 64; }
  consteval int64_t bytes() const { return values_offset() + groups * 2 * slice_bytes(); }
};

inline constexpr BlockLayout kQ4_0{1, 4, 0};
inline constexpr BlockLayout kQ4_1{1, 4, 0, true};
inline constexpr BlockLayout kQ5_0{1, 4, 1};
inline constexpr BlockLayout kQ5_1{1, 4, 1, true};
inline constexpr BlockLayout kQ8_0{1, 8, 0};
inline constexpr BlockLayout kQ2_K{8, 2, 0, true, GroupScales::nibbles, 2};
inline constexpr BlockLayout kQ3_K{8, 2, 1, false, GroupScales::bytes, 2};
inline constexpr BlockLayout kQ4_K{8, 4, 0, true, GroupScales::bytes};
inline constexpr BlockLayout kQ5_K{8, 4, 1, true, GroupScales::bytes};
inline constexpr BlockLayout kQ6_K{8, 4, 2, false, GroupScales::bytes, 2};
inline constexpr BlockLayout kIq4Nl{1, 4, 0};
inline constexpr BlockLayout kIq4Xs{8, 4, 0, false, GroupScales::bytes};

struct WeightFormatInfo {
  const char* name;
  int elements;      // of a block: k must be a multiple of it
  int stored_bytes;  // of a row's block in a file
  int panel_bytes;   // of a block of a panel, for each of its 32 columns
  bool quantized;    // the product takes activations as QuantizedGroup
  // Puts `rows` rows of k elements, `row_stride` bytes apart, into the first columns of a panel of zeros.
  void (*pack)(const uint8_t* source, int64_t row_stride, int64_t rows, int64_t k, uint8_t* panel);

  int64_t row_bytes(int64_t k) const { return k / elements * stored_bytes; }
  int64_t panel_row_bytes(int64_t k) const { return k / elements * panel_bytes; }
};

const WeightFormatInfo& format_info(WeightFormat format);
// Throws std::invalid_argument that lists the names.
WeightFormat weight_format_from_name(const char* name);

}  // namespace streamllm::cpu
