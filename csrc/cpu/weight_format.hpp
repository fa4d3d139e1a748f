// How weights are stored, in files and in the panels of a PackedMatrix.
//
// A panel holds 32 output columns (rows of the file's matrix). Along k it is a list of blocks, one a block of
// the file's format, and a block holds that block of all 32 columns: [k / elements][32 columns' block].
//
// float32, float16, bfloat16 (1 element): [k][32].
//
// float8_e4m3 (1 element). In a file, a row is a float32 scale for every 128 elements (the last ones perhaps
// fewer) and then its elements of 8 bits. In a panel, 128 elements are float32[32] scales times kFloat8InHalf,
// and then [128][32]. NaN makes a NaN of the scale instead, and so of all the elements that share it: a product
// gives NaN either way.
//
// int4_* and int8_* are blocks of so many elements with factors in float32 (streamllm/ops/stored_rows.py); the
// others are GGML's types of these names. What an element is made of is what the file holds: an integer, and
// the factors of the elements around it. A block of one group of 32 elements (q4_0 to q8_0, iq4_nl, mxfp4), of
// 256 (the other types of GGML: eight groups), or of as many as its name says, is
//   factor[32] d, and with minima factor[32] m: float16, but float32 in int*_*; d of mxfp4 is the byte e
//   that stands for half of 2^(e - 127), or for NaN (255);
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
// bits are signed; the four of iq4_nl and iq4_xs stand for an entry of kIq4Values, those of mxfp4 for one of
// kE2m1Values.
//
// To add a format: its layout here, a decoder beside the others (ggml_blocks.hpp), an entry in
// weight_format.cpp, and its micro-kernel in quantized.inl and kernels.inl.
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
  float8_e4m3,
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
  iq4_xs,
  mxfp4,
  int4_32,
  int4_64,
  int4_128,
  int8_32,
  int8_64,
  int8_128
};
inline constexpr int kNumWeightFormats = 23;
// The last ones are quantised: their activations are integers.
inline constexpr int kNumFloatFormats = static_cast<int>(WeightFormat::q4_0);
inline constexpr int kNumQuantizedFormats = kNumWeightFormats - kNumFloatFormats;

inline constexpr int kFloat8Block = 128;  // elements along k that share a scale

inline constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                          1,    13,   25,  38,  53,  69,  89,  113};
// Twice the numbers of E2M1, which are no integers.
inline constexpr int8_t kE2m1Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// What d and m are stored as.
enum class Factors : uint8_t { float16, float32, powers_of_two };

enum class GroupScales : uint8_t { none, bytes, nibbles };

// A block of a quantised format in a panel. Its members are consteval: no instruction set's copy of them can
// reach another's kernels.
struct BlockLayout {
  int groups;               // of 32 elements
  int low_bits, high_bits;  // of the planes; high_bits 0: there is one plane
  bool minima = false;
  GroupScales scales = GroupScales::none;
  int scales_per_group = 1;
  Factors factors = Factors::float16;

  consteval int factor_bytes() const {
    return factors == Factors::float16 ? 2 : factors == Factors::float32 ? 4 : 1;
  }
  consteval int elements() const { return groups * kGroup; }
  consteval int num_scales() const { return groups * scales_per_group; }
  consteval int64_t scales_offset() const { return (minima ? 2 : 1) * kPanelColumns * factor_bytes(); }
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
inline constexpr BlockLayout kMxfp4{1, 4, 0, false, GroupScales::none, 1, Factors::powers_of_two};
// Integers of BITS bits, signed, in blocks of ELEMENTS.
template <int BITS, int ELEMENTS>
inline constexpr BlockLayout kIntegers{ELEMENTS / kGroup, BITS, 0, true, GroupScales::none, 1,
                                       Factors::float32};

struct WeightFormatInfo {
  const char* name;
  int elements;      // of a block: k must be a multiple of it
  int stored_bytes;  // of a row's block in a file
  int panel_bytes;   // of a block of a panel, for each of its 32 columns
  bool quantized;    // the product takes activations as QuantizedGroup
  // Puts `rows` rows of k elements, `row_stride` bytes apart, into the first columns of a panel of zeros.
  void (*pack)(const uint8_t* source, int64_t row_stride, int64_t rows, int64_t k, uint8_t* panel);
  int scaled = 0;  // elements that share a float32 scale beside the blocks, the last perhaps fewer; 0: none

  int64_t row_bytes(int64_t k) const { return k / elements * stored_bytes + scale_bytes(k); }
  int64_t panel_row_bytes(int64_t k) const { return k / elements * panel_bytes + scale_bytes(k); }
  int64_t scale_bytes(int64_t k) const { return scaled == 0 ? 0 : (k + scaled - 1) / scaled * 4; }
};

const WeightFormatInfo& format_info(WeightFormat format);
// Throws std::invalid_argument that lists the names.
WeightFormat weight_format_from_name(const char* name);

}  // namespace streamllm::cpu
