// Matrix product with weights of float32, float16, bfloat16 or float8 in packed panels. Each output element
// is one chain of multiply-adds over k = 0 .. K-1 starting from 0, whatever the tile: the chain may pause in
// `out`, but is never split. float8 has such a chain for each block of elements that share a scale, and one
// over the blocks: sum = fma(block's sum, scale, sum).
#pragma once

#include "kernels.hpp"
#include "simd.hpp"

namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE {

// Part of the k axis that is done for all row tiles before the next, so that the panel stays in the
// second-level cache.
inline constexpr int64_t kDepth = 512;

// How far ahead weights are fetched, in steps of k: some 100 ns, however many rows share a step.
template <int ROWS>
inline constexpr int64_t kPrefetchSteps = ROWS <= 2   ? 64
                                          : ROWS <= 6 ? 32
                                                      : 16;

// Bytes of the scales of a block of float8, which lie before its elements.
inline constexpr int64_t kFloat8Scales = kPanelColumns * sizeof(float);

// Where element i begins in a panel; of float8, the block that it is in.
template <typename W>
constexpr int64_t panel_offset(int64_t i) {
  return i * kPanelColumns;
}
template <>
constexpr int64_t panel_offset<Float8E4M3>(int64_t i) {
  return i / kFloat8Block * (kFloat8Scales + kFloat8Block * kPanelColumns);
}

// Consecutive 16-column slices of `out` over one stretch of the k axis.
template <typename W>
struct LinearTile {
  const float* x;  // first row, first k of the stretch
  int64_t x_stride;
  const W* panel;        // the panel of the first slice, first k of the stretch
  int64_t panel_stride;  // elements from one panel to the next
  int first_half;        // 1: the first slice is the panel's second half
  int64_t depth;
  float* out;  // first row, first column of the first slice
  int64_t out_stride;
  int64_t columns;    // that exist from `out` on
  bool resume;        // continue the chains that stand in `out`
  const float* bias;  // of the first column; nullptr: none, or not yet
};

// sum += x * weights over the stretch; float16 and bfloat16 are converted in registers.
template <typename W, int ROWS, int SLICES>
inline void add_products(const LinearTile<W>& tile, Vec16 (&sum)[ROWS][SLICES]) {
  const W* w[SLICES];
  unroll<SLICES>([&](int s) {
    const int slice = tile.first_half + s;
    w[s] = tile.panel + (slice / 2) * tile.panel_stride + (slice % 2) * 16;
  });
  const float* x = tile.x;
  const int64_t x_stride = tile.x_stride, depth = tile.depth;
  for (int64_t i = 0; i < depth; ++i) {
    Vec16 weight[SLICES];
    unroll<SLICES>([&](int s) {
      weight[s] = load(w[s] + i * kPanelColumns);
      prefetch(w[s] + (i + kPrefetchSteps<ROWS>)*kPanelColumns);
      // The other half of the panel is read right after this one.
      if constexpr (SLICES == 1 && sizeof(W) == 4)
        prefetch(w[s] + (i + kPrefetchSteps<ROWS>)*kPanelColumns + 16);
    });
    unroll<ROWS>([&](int r) {
      const Vec16 value = splat(x[r * x_stride + i]);
      unroll<SLICES>([&](int s) { sum[r][s] = fma(value, weight[s], sum[r][s]); });
    });
  }
}

// The same with float8, which becomes float16 some steps of k at a time and in the first-level cache: read
// from there it takes half the instructions to convert.
template <int ROWS, int SLICES>
inline void add_products(const LinearTile<Float8E4M3>& tile, Vec16 (&sum)[ROWS][SLICES]) {
  constexpr int kPanels = (SLICES + 1) / 2, kColumns = SLICES > 1 ? kPanelColumns : 16;
  constexpr int64_t kSteps = 32, kPrefetched = 64 * kPanelColumns;
  alignas(64) Half halves[kPanels][kSteps][kColumns];
  for (int64_t begin = 0; begin < tile.depth; begin += kFloat8Block) {
    const int64_t end = tile.depth - begin < kFloat8Block ? tile.depth : begin + kFloat8Block;
    const Float8E4M3* block[kPanels];
    unroll<kPanels>([&](int p) {
      block[p] = tile.panel + p * tile.panel_stride + panel_offset<Float8E4M3>(begin);
    });
    Vec16 part[ROWS][SLICES];
    unroll<ROWS>([&](int r) { unroll<SLICES>([&](int s) { part[r][s] = splat(0.0f); }); });
    for (int64_t first = begin; first < end; first += kSteps) {
      const int64_t steps = end - first < kSteps ? end - first : kSteps;
      for (int64_t i = 0; i < steps; ++i) {
        unroll<kPanels>([&](int p) {
          const int64_t step = kFloat8Scales + (first - begin + i) * kPanelColumns;
          widen<kColumns>(block[p] + step + tile.first_half * 16, halves[p][i]);
          prefetch(block[p] + step + kPrefetched);
        });
      }
      for (int64_t i = 0; i < steps; ++i) {
        Vec16 weight[SLICES];
        unroll<SLICES>([&](int s) { weight[s] = load(&halves[s / 2][i][s % 2 * 16]); });
        unroll<ROWS>([&](int r) {
          const Vec16 value = splat(tile.x[r * tile.x_stride + first + i]);
          unroll<SLICES>([&](int s) { part[r][s] = fma(value, weight[s], part[r][s]); });
        });
      }
    }
    unroll<SLICES>([&](int s) {
      const float* scales = reinterpret_cast<const float*>(block[s / 2]);
      const Vec16 scale = load(scales + (tile.first_half + s) % 2 * 16);
      unroll<ROWS>([&](int r) { sum[r][s] = fma(part[r][s], scale, sum[r][s]); });
    });
  }
}

template <typename W, int ROWS, int SLICES>
[[gnu::flatten]] void linear_tile(const LinearTile<W>& tile) {
  Vec16 sum[ROWS][SLICES];
  unroll<SLICES>([&](int s) {
    const int64_t columns = tile.columns - s * 16;
    unroll<ROWS>([&](int r) {
      sum[r][s] = splat(0.0f);
      if (!tile.resume || columns <= 0) return;
      const float* source = tile.out + r * tile.out_stride + s * 16;
      sum[r][s] = columns >= 16 ? load(source) : load_partial(source, static_cast<int>(columns));
    });
  });
  add_products(tile, sum);
  unroll<SLICES>([&](int s) {
    const int64_t columns = tile.columns - s * 16;
    if (columns <= 0) return;
    const int count = columns >= 16 ? 16 : static_cast<int>(columns);
    const Vec16 bias = tile.bias != nullptr ? load_partial(tile.bias + s * 16, count) : splat(0.0f);
    unroll<ROWS>([&](int r) {
      const Vec16 result = tile.bias != nullptr ? sum[r][s] + bias : sum[r][s];
      float* target = tile.out + r * tile.out_stride + s * 16;
      if (count == 16) {
        store(target, result);
      } else {
        store_partial(target, result, count);
      }
    });
  });
}

template <typename W>
using LinearTileFunction = void (*)(const LinearTile<W>&);

// Half panels are for tiles too high for a whole one, and for their neighbours with a row less.
template <typename W, int ROWS, int SLICES>
constexpr LinearTileFunction<W> linear_tile_if_it_fits() {
  if constexpr (ROWS * SLICES <= kAccumulators && (SLICES > 1 || (ROWS + 1) * 2 > kAccumulators)) {
    return &linear_tile<W, ROWS, SLICES>;
  } else {
    return nullptr;
  }
}

inline constexpr int kTileRows = kAccumulators > 12 ? 12 : kAccumulators;

// By rows - 1 and log2 of the slices; nullptr where the sums do not fit in the registers.
template <typename W>
struct LinearTiles {
  LinearTileFunction<W> function[kTileRows][3];
};

template <typename W, int... INDEX>
constexpr LinearTiles<W> make_linear_tiles(std::integer_sequence<int, INDEX...>) {
  return {{{linear_tile_if_it_fits<W, INDEX + 1, 1>(), linear_tile_if_it_fits<W, INDEX + 1, 2>(),
            linear_tile_if_it_fits<W, INDEX + 1, 4>()}...}};
}

template <typename W>
inline constexpr LinearTiles<W> kLinearTiles =
    make_linear_tiles<W>(std::make_integer_sequence<int, kTileRows>());

template <typename W>
void linear(const LinearArgs& args, int64_t first_row, int64_t last_row, int64_t first_panel,
            int64_t last_panel) {
  const int64_t rows = last_row - first_row;
  if (rows <= 0) return;
  const int64_t num_tiles = (rows + kTileRows - 1) / kTileRows;
  const int64_t low = rows / num_tiles, num_higher = rows % num_tiles;  // tiles of `low` or `low + 1` rows
  const int64_t highest = low + (num_higher > 0 ? 1 : 0);
  const int64_t panel_stride = args.panel_bytes / static_cast<int64_t>(sizeof(W));

  int log2_slices = 2;
  while (kLinearTiles<W>.function[highest - 1][log2_slices] == nullptr) --log2_slices;
  for (int64_t panel = first_panel; panel < last_panel;) {
    // The panels that one tile covers, or the one that two tiles cover half each.
    while ((1 << log2_slices) > 2 * (last_panel - panel)) --log2_slices;
    const int step = 1 << log2_slices;
    const int64_t num_slices = step < 2 ? 2 : step;
    const int64_t depth_step = num_tiles > 1 || step < 2 ? kDepth : args.k;
    for (int64_t begin = 0; begin < args.k; begin += depth_step) {
      const int64_t end = args.k - begin > depth_step ? begin + depth_step : args.k;
      for (int64_t slice = 0; slice < num_slices; slice += step) {
        const int64_t column = panel * kPanelColumns + slice * 16;
        LinearTile<W> tile{
            .x = args.x + first_row * args.x_stride + begin,
            .x_stride = args.x_stride,
            .panel = reinterpret_cast<const W*>(args.panels) + panel * panel_stride + panel_offset<W>(begin),
            .panel_stride = panel_stride,
            .first_half = static_cast<int>(slice),
            .depth = end - begin,
            .out = args.out + first_row * args.out_stride + column,
            .out_stride = args.out_stride,
            .columns = args.n - column,
            .resume = begin > 0,
            .bias = args.bias != nullptr && end == args.k && column < args.n ? args.bias + column : nullptr,
        };
        for (int64_t t = 0; t < num_tiles; ++t) {
          const int64_t height = low + (t < num_higher ? 1 : 0);
          kLinearTiles<W>.function[height - 1][log2_slices](tile);
          tile.x += height * args.x_stride;
          tile.out += height * args.out_stride;
        }
      }
    }
    panel += num_slices / 2;
  }
}

inline float to_float(float value) { return value; }
inline float to_float(Half value) { return half_to_float(value); }
inline float to_float(BFloat16 value) { return bfloat16_to_float(value); }

template <typename W>
void unpack_column(const uint8_t* panel, int column, int64_t k, float* out) {
  const W* element = reinterpret_cast<const W*>(panel) + column;
  for (int64_t i = 0; i < k; ++i) out[i] = to_float(element[i * kPanelColumns]);
}

template <>
inline void unpack_column<Float8E4M3>(const uint8_t* panel, int column, int64_t k, float* out) {
  for (int64_t i = 0; i < k; ++i) {
    const auto* scales = reinterpret_cast<const float*>(panel + panel_offset<Float8E4M3>(i));
    const auto* values = reinterpret_cast<const Float8E4M3*>(scales + kPanelColumns);
    const Float8E4M3 value = values[i % kFloat8Block * kPanelColumns + column];
    out[i] = half_to_float(float8_in_half(value)) * scales[column];
  }
}

}  // namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE
