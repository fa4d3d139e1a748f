// Matrix product of quantised weights with activations quantised to 8 bits in groups of 32 along k.
//
// An output element is a chain over the groups from k = 0 on:
//   sum = fma(dot, weight scale * activation scale, sum)       then, if there are minima,
//   sum = fma(weight minimum, activation sum, sum)
// where dot is an exact integer: all instruction sets that fuse multiply and add give the same bits.
#pragma once

#include "dot.hpp"
#include "kernels.hpp"
#include "rows.inl"
#include "simd.hpp"

namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE {

// The formats' micro-kernels. A block (weight_format.hpp) has two slices of kLoads vectors of words each; a
// vector gives one or two quads, which stand at quad_index in the group.
template <int OFFSET>
struct Nibbles {
  using Dot = NibbleDot<OFFSET>;
  static constexpr int kLoads = 4, kQuadsPerLoad = 2;
  static constexpr int quad_index(int load, int part) { return load + 4 * part; }
  static Quads quads(Quads words, int part) { return part == 0 ? low_nibbles(words) : high_nibbles(words); }
  static int value(const uint8_t* words, int i) {
    return (words[i / 4 % 4 * 64 + i % 4] >> (i / 16 * 4)) & 15;
  }
};

struct Bytes {
  using Dot = ByteDot;
  static constexpr int kLoads = 8, kQuadsPerLoad = 1;
  static constexpr int quad_index(int load, int) { return load; }
  static Quads quads(Quads words, int) { return words; }
  static int value(const uint8_t* words, int i) { return static_cast<int8_t>(words[i / 4 * 64 + i % 4]); }
};

template <typename Values, bool MINIMUM, int OFFSET>
struct GroupFormat : Values {
  static constexpr bool kMinimum = MINIMUM;
  static constexpr int kOffset = OFFSET;
  static constexpr int64_t kSliceBytes = Values::kLoads * 64;
  static constexpr int64_t kBlockBytes = 2 * kSliceBytes + (MINIMUM ? 2 : 1) * kPanelColumns * 2;

  static const Half* scales(const uint8_t* block) {
    return reinterpret_cast<const Half*>(block + 2 * kSliceBytes);
  }
  static const Half* minima(const uint8_t* block) { return scales(block) + kPanelColumns; }
};

using Q4_0 = GroupFormat<Nibbles<8>, false, 8>;
using Q4_1 = GroupFormat<Nibbles<0>, true, 0>;
using Q8_0 = GroupFormat<Bytes, false, 0>;

// One or both 16-column slices of a panel, by some rows.
struct QuantizedTile {
  const QuantizedGroup* x;  // first row, first group
  int64_t x_stride;
  const uint8_t* blocks;
  int64_t num_groups;
  int first_slice;
  float* out;  // first row, first column of the slice
  int64_t out_stride;
  int64_t columns;    // that exist from `out` on
  const float* bias;  // of the first column, or nullptr
};

template <typename Format, int ROWS, int SLICES>
[[gnu::flatten]] void quantized_tile(const QuantizedTile& tile) {
  using Dot = typename Format::Dot;
  // Weights are fetched some 4 KiB ahead where few rows share them; else the arithmetic hides the latency.
  constexpr int64_t kPrefetchBytes = ROWS <= 2 ? 4096 : 2048;
  Vec16 sum[ROWS][SLICES];
  unroll<ROWS>([&](int r) { unroll<SLICES>([&](int s) { sum[r][s] = splat(0.0f); }); });

  const QuantizedGroup* x = tile.x;
  const uint8_t* block = tile.blocks;
  for (int64_t group = 0; group < tile.num_groups; ++group) {
    Dot dot[ROWS][SLICES];
    for (int64_t byte = 0; byte < Format::kBlockBytes; byte += 64) prefetch(block + kPrefetchBytes + byte);
    unroll<Format::kLoads>([&](int load) {
      Quads words[SLICES];
      unroll<SLICES>([&](int s) {
        words[s] = load_quads(block + (tile.first_slice + s) * Format::kSliceBytes + load * 64);
      });
      unroll<Format::kQuadsPerLoad>([&](int part) {
        typename Dot::Weight weight[SLICES];
        unroll<SLICES>([&](int s) { weight[s] = Dot::weight(Format::quads(words[s], part)); });
        unroll<ROWS>([&](int r) {
          const Quads value = splat_quad(x[r].values + 4 * Format::quad_index(load, part));
          unroll<SLICES>([&](int s) {
            if (load + part == 0) {
              dot[r][s] = Dot::first(x[r], weight[s], value);
            } else {
              dot[r][s].add(weight[s], value);
            }
          });
        });
      });
    });
    unroll<SLICES>([&](int s) {
      const int column = (tile.first_slice + s) * 16;
      const Vec16 scale = load(Format::scales(block) + column);
      unroll<ROWS>(
          [&](int r) { sum[r][s] = fma(dot[r][s].total(x[r]), scale * splat(x[r].scale), sum[r][s]); });
      if constexpr (Format::kMinimum) {
        const Vec16 minimum = load(Format::minima(block) + column);
        unroll<ROWS>([&](int r) { sum[r][s] = fma(minimum, splat(x[r].scaled_sum), sum[r][s]); });
      }
    });
    x += tile.x_stride;
    block += Format::kBlockBytes;
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
  if constexpr (ROWS * SLICES <= kDotAccumulators) {
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
          .num_groups = args.k / kGroup,
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
  for (int64_t group = 0; group < k / kGroup; ++group, panel += Format::kBlockBytes, out += kGroup) {
    const uint8_t* words = panel + column / 16 * Format::kSliceBytes + column % 16 * 4;
    const float scale = half_to_float(Format::scales(panel)[column]);
    const float minimum = Format::kMinimum ? half_to_float(Format::minima(panel)[column]) : 0.0f;
    for (int i = 0; i < kGroup; ++i) {
      const float value = scale * static_cast<float>(Format::value(words, i) - Format::kOffset);
      out[i] = Format::kMinimum ? value + minimum : value;
    }
  }
}

}  // namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE
