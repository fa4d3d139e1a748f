// Matrix product of quantised weights with activations quantised to 8 bits in groups of 32 along k.
//
// An output element is a chain over the elements that share a scale, 32 or 16 of them, from k = 0 on:
//   sum = fma(dot, weight scale * activation scale, sum)       then, if there are minima,
//   sum = fma(weight minimum, activation sum, sum)
// where dot is an exact integer: all instruction sets that fuse multiply and add give the same bits.
#pragma once

#include "dot.hpp"
#include "kernels.hpp"
#include "rows.inl"
#include "simd.hpp"

namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE {

// Quad `index` of a plane of BITS bits, which land at bit TO of their bytes.
template <int BITS, int TO>
inline Quads plane_quad(const uint8_t* plane, int index) {
  constexpr int kMask = ((1 << BITS) - 1) << TO;
  return shift_and_mask(load_quads(plane + index * BITS / 8 * 64), index * BITS % 8 - TO, kMask);
}
template <int BITS>
inline int plane_value(const uint8_t* plane, int i) {
  const int quad = i / 4;
  return plane[quad * BITS / 8 * 64 + i % 4] >> (quad * BITS % 8) & ((1 << BITS) - 1);
}

// What a group's integers are, from the planes of one slice: in quads, and of one column (whose words
// `planes` then points to) one by one.
template <BlockLayout LAYOUT, int OFFSET>
struct Unsigned {
  using Dot = UnsignedDot<LAYOUT.low_bits + LAYOUT.high_bits, OFFSET>;
  static Quads quad(const uint8_t* planes, int index) {
    const Quads low = plane_quad<LAYOUT.low_bits, 0>(planes, index);
    if constexpr (LAYOUT.high_bits == 0) return low;
    return low | plane_quad<LAYOUT.high_bits, LAYOUT.low_bits>(planes + LAYOUT.low_bits * 64, index);
  }
  static int value(const uint8_t* planes, int i) {
    int value = plane_value<LAYOUT.low_bits>(planes, i);
    if constexpr (LAYOUT.high_bits > 0) {
      value |= plane_value<LAYOUT.high_bits>(planes + LAYOUT.low_bits * 64, i) << LAYOUT.low_bits;
    }
    return value - OFFSET;
  }
};

struct Bytes {
  using Dot = ByteDot;
  static Quads quad(const uint8_t* plane, int index) { return load_quads(plane + index * 64); }
  static int value(const uint8_t* plane, int i) { return static_cast<int8_t>(plane_value<8>(plane, i)); }
};

// Four bits that stand for an entry of a table.
template <const int8_t* TABLE>
struct Entries {
  using Dot = ByteDot;
  static Quads quad(const uint8_t* plane, int index) {
    return look_up(TABLE, plane_quad<4, 0>(plane, index));
  }
  static int value(const uint8_t* plane, int i) { return TABLE[plane_value<4>(plane, i)]; }
};

template <BlockLayout LAYOUT, typename Values>
struct BlockFormat : Values {
  static constexpr BlockLayout kLayout = LAYOUT;
  static constexpr int kQuadsPerScale = kGroup / 4 / LAYOUT.scales_per_group;

  static const uint8_t* planes(const uint8_t* block, int group, int slice) {
    return block + LAYOUT.values_offset() + (2 * group + slice) * LAYOUT.slice_bytes();
  }
  // Scales and minima of 16 columns, number `index` of the block.
  static Vec16 scale(const uint8_t* block, int index, int column) {
    const Vec16 d = factors(block, column);
    if constexpr (LAYOUT.scales == GroupScales::none) return d;
    const uint8_t* scales = block + LAYOUT.scales_offset() + index * kPanelColumns + column;
    if constexpr (LAYOUT.scales == GroupScales::nibbles) return d * to_float(low_nibbles(widen(scales)));
    return d * to_float(widen(reinterpret_cast<const int8_t*>(scales)));
  }
  static Vec16 minimum(const uint8_t* block, int index, int column) {
    const Vec16 m = factors(block, kPanelColumns + column);
    if constexpr (LAYOUT.scales == GroupScales::none) return m;
    if constexpr (LAYOUT.scales == GroupScales::nibbles) {
      const uint8_t* minima = block + LAYOUT.scales_offset() + index * kPanelColumns + column;
      return m * to_float(high_nibbles(widen(minima)));
    }
    return m * to_float(widen(block + LAYOUT.minima_offset() + index * kPanelColumns + column));
  }
  // What the minimum is multiplied by.
  static float scaled_sum(const QuantizedGroup& x, int part) {
    return LAYOUT.scales_per_group == 1 ? x.scaled_sum : x.scaled_half_sums[part];
  }
  static int32_t correction(const QuantizedGroup& x, int part) {
    constexpr int kOffset = Values::Dot::kOffset;
    if constexpr (LAYOUT.scales_per_group == 2) return kOffset / 4 * x.minus_4_half_sums[part];
    return kOffset == 128 ? x.minus_128_sums : kOffset / 8 * x.minus_8_sums;
  }

 private:
  static Vec16 factors(const uint8_t* block, int first) {
    if constexpr (LAYOUT.factors == Factors::powers_of_two) return half_power_of_two(block + first);
    if constexpr (LAYOUT.factors == Factors::float32) {
      return load(reinterpret_cast<const float*>(block) + first);
    }
    return load(reinterpret_cast<const Half*>(block) + first);
  }
  // 2^(e - 128) of 16 bytes e; NaN of 255.
  static Vec16 half_power_of_two(const uint8_t* exponents) {
    const Vec16 power = powers_of_two(widen(exponents));
    // 0, or what makes infinity NaN.
    return fma(power, splat(0.5f), power - power);
  }
};

using Q4_0 = BlockFormat<kQ4_0, Unsigned<kQ4_0, 8>>;
using Q4_1 = BlockFormat<kQ4_1, Unsigned<kQ4_1, 0>>;
using Q5_0 = BlockFormat<kQ5_0, Unsigned<kQ5_0, 16>>;
using Q5_1 = BlockFormat<kQ5_1, Unsigned<kQ5_1, 0>>;
using Q8_0 = BlockFormat<kQ8_0, Bytes>;
using Q2_K = BlockFormat<kQ2_K, Unsigned<kQ2_K, 0>>;
using Q3_K = BlockFormat<kQ3_K, Unsigned<kQ3_K, 4>>;
using Q4_K = BlockFormat<kQ4_K, Unsigned<kQ4_K, 0>>;
using Q5_K = BlockFormat<kQ5_K, Unsigned<kQ5_K, 0>>;
using Q6_K = BlockFormat<kQ6_K, Unsigned<kQ6_K, 32>>;
using Iq4Nl = BlockFormat<kIq4Nl, Entries<kIq4Values>>;
using Iq4Xs = BlockFormat<kIq4Xs, Entries<kIq4Values>>;
using Mxfp4 = BlockFormat<kMxfp4, Entries<kE2m1Values>>;
template <int ELEMENTS>
using Int4 = BlockFormat<kIntegers<4, ELEMENTS>, Unsigned<kIntegers<4, ELEMENTS>, 8>>;
template <int ELEMENTS>
using Int8 = BlockFormat<kIntegers<8, ELEMENTS>, Bytes>;

// One or both 16-column slices of a panel, by some rows.
struct QuantizedTile {
  const QuantizedGroup* x;  // first row, first group
  int64_t x_stride;
  const uint8_t* blocks;
  int64_t num_blocks;
  int first_slice;
  float* out;  // first row, first column of the slice
  int64_t out_stride;
  int64_t columns;    // that exist from `out` on
  const float* bias;  // of the first column, or nullptr
};

template <typename Format, int ROWS, int SLICES>
[[gnu::flatten]] void quantized_tile(const QuantizedTile& tile) {
  using Dot = typename Format::Dot;
  constexpr BlockLayout kLayout = Format::kLayout;
  constexpr int64_t kBytesPerGroup = kLayout.bytes() / kLayout.groups;
  // Weights are fetched some 4 KiB ahead where few rows share them; else the arithmetic hides the latency.
  constexpr int64_t kPrefetchBytes = ROWS <= 2 ? 4096 : 2048;
  Vec16 sum[ROWS][SLICES];
  unroll<ROWS>([&](int r) { unroll<SLICES>([&](int s) { sum[r][s] = splat(0.0f); }); });

  const QuantizedGroup* x = tile.x;
  const uint8_t* block = tile.blocks;
  for (int64_t i = 0; i < tile.num_blocks; ++i) {
    for (int group = 0; group < kLayout.groups; ++group) {
      const uint8_t* ahead = block + kPrefetchBytes + group * kBytesPerGroup;
      for (int64_t byte = 0; byte < kBytesPerGroup; byte += 64) prefetch(ahead + byte);
      const uint8_t* planes[SLICES];
      unroll<SLICES>([&](int s) { planes[s] = Format::planes(block, group, tile.first_slice + s); });
      unroll<kLayout.scales_per_group>([&](int part) {
        Dot dot[ROWS][SLICES];
        unroll<Format::kQuadsPerScale>([&](int index) {
          const int quad = part * Format::kQuadsPerScale + index;
          typename Dot::Weight weight[SLICES];
          unroll<SLICES>([&](int s) { weight[s] = Dot::weight(Format::quad(planes[s], quad)); });
          unroll<ROWS>([&](int r) {
            const Quads value = splat_quad(x[r].values + 4 * quad);
            unroll<SLICES>([&](int s) {
              if (index == 0) {
                dot[r][s] = Dot::first(Format::correction(x[r], part), weight[s], value);
              } else {
                dot[r][s].add(weight[s], value, index);
              }
            });
          });
        });
        unroll<SLICES>([&](int s) {
          const int column = (tile.first_slice + s) * 16;
          const int factor = group * kLayout.scales_per_group + part;
          const Vec16 scale = Format::scale(block, factor, column);
          unroll<ROWS>([&](int r) {
            const Vec16 total = dot[r][s].total(Format::correction(x[r], part));
            sum[r][s] = fma(total, scale * splat(x[r].scale), sum[r][s]);
          });
          if constexpr (kLayout.minima) {
            const Vec16 minimum = Format::minimum(block, factor, column);
            unroll<ROWS>(
                [&](int r) { sum[r][s] = fma(minimum, splat(Format::scaled_sum(x[r], part)), sum[r][s]); });
          }
        });
      });
      x += tile.x_stride;
    }
    block += kLayout.bytes();
  }

  unroll<SLICES>([&](int s) {
    const int64_t columns = tile.columns - s * 16;
    if (columns <= 0) return;
    const int count = columns >= 16 ? 16 : static_cast<int>(columns);
    const Vec16 bias = tile.bias != nullptr ? load_partial(tile.bias + s * 16, count) : splat(0.0f);
    unroll<ROWS>([&](int r) {
      store_lanes(tile.out + r * tile.out_stride + s * 16, tile.bias ? sum[r][s] + bias : sum[r][s], count);
    });
  });
}

using QuantizedTileFunction = void (*)(const QuantizedTile&);

template <typename Format, int ROWS, int SLICES>
constexpr QuantizedTileFunction quantized_tile_if_it_fits() {
  // One slice is for tiles too high for both, and for their neighbours with a row less.
  if constexpr (ROWS * SLICES <= kDotAccumulators && (SLICES == 2 || (ROWS + 1) * 2 > kDotAccumulators)) {
    return &quantized_tile<Format, ROWS, SLICES>;
  } else {
    return nullptr;
  }
}

// The highest tiles: whole panels if that leaves them at least as high as wide.
inline constexpr int kQuantizedTileRows = kDotAccumulators >= 8 ? kDotAccumulators / 2 : kDotAccumulators;

// By rows - 1 and slices - 1; nullptr where the sums do not fit in the registers.
struct QuantizedTiles {
  QuantizedTileFunction function[kQuantizedTileRows][2];
};

template <typename Format, int... INDEX>
constexpr QuantizedTiles make_quantized_tiles(std::integer_sequence<int, INDEX...>) {
  return {{{quantized_tile_if_it_fits<Format, INDEX + 1, 1>(),
            quantized_tile_if_it_fits<Format, INDEX + 1, 2>()}...}};
}

template <typename Format>
inline constexpr QuantizedTiles kQuantizedTiles =
    make_quantized_tiles<Format>(std::make_integer_sequence<int, kQuantizedTileRows>());

template <typename Format>
void linear_quantized(const LinearArgs& args, int64_t first_row, int64_t last_row, int64_t first_panel,
                      int64_t last_panel) {
  constexpr int kElements = Format::kLayout.elements();
  const int64_t rows = last_row - first_row;
  if (rows <= 0) return;
  const int64_t num_tiles = (rows + kQuantizedTileRows - 1) / kQuantizedTileRows;
  const int64_t low = rows / num_tiles, num_higher = rows % num_tiles;  // tiles of `low` or `low + 1` rows
  const int64_t highest = low + (num_higher > 0 ? 1 : 0);
  const QuantizedTiles& tiles = kQuantizedTiles<Format>;
  const int slices = tiles.function[highest - 1][1] != nullptr ? 2 : 1;
  for (int64_t panel = first_panel; panel < last_panel; ++panel) {
    for (int slice = 0; slice < 2; slice += slices) {
      const int64_t column = panel * kPanelColumns + slice * 16;
      QuantizedTile tile{
          .x = args.quantized + first_row,
          .x_stride = args.quantized_stride,
          .blocks = args.panels + panel * args.panel_bytes,
          .num_blocks = args.k / kElements,
          .first_slice = slice,
          .out = args.out + first_row * args.out_stride + column,
          .out_stride = args.out_stride,
          .columns = args.n - column,
          .bias = args.bias != nullptr && column < args.n ? args.bias + column : nullptr,
      };
      for (int64_t t = 0; t < num_tiles; ++t) {
        const int64_t height = low + (t < num_higher ? 1 : 0);
        tiles.function[height - 1][slices - 1](tile);
        tile.x += height;
        tile.out += height * args.out_stride;
      }
    }
  }
}

template <typename Format>
void unpack_quantized_column(const uint8_t* panel, int column, int64_t k, float* out) {
  constexpr BlockLayout kLayout = Format::kLayout;
  constexpr int kElementsPerScale = kGroup / kLayout.scales_per_group;
  const int first = column / 16 * 16, lane = column % 16;
  float lanes[16];
  for (const uint8_t* block = panel; block < panel + k / kLayout.elements() * kLayout.bytes();
       block += kLayout.bytes()) {
    for (int index = 0; index < kLayout.num_scales(); ++index, out += kElementsPerScale) {
      store(lanes, Format::scale(block, index, first));
      const float scale = lanes[lane];
      if constexpr (kLayout.minima) store(lanes, Format::minimum(block, index, first));
      const float minimum = lanes[lane];
      const int start = index * kElementsPerScale % kGroup;
      const uint8_t* planes = Format::planes(block, index / kLayout.scales_per_group, column / 16) + lane * 4;
      for (int i = 0; i < kElementsPerScale; ++i) {
        const float value = scale * static_cast<float>(Format::value(planes, start + i));
        out[i] = kLayout.minima ? value + minimum : value;
      }
    }
  }
}

// In the order of WeightFormat.
template <typename... FORMATS>
constexpr QuantizedKernels quantized_kernels() {
  return {{{linear_quantized<FORMATS>, unpack_quantized_column<FORMATS>}...}};
}

constexpr QuantizedKernels make_quantized_kernels() {
  return quantized_kernels<Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, Iq4Nl, Iq4Xs, Mxfp4,
                           Int4<32>, Int4<64>, Int4<128>, Int8<32>, Int8<64>, Int8<128>>();
}

}  // namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE
