// Products with the narrow matrices of low-rank adapters, in panels of 16 columns: one vector. Each output
// element is made in one order, whatever rows share a tile.
#pragma once

#include "kernels.hpp"
#include "rows.inl"
#include "simd.hpp"

namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE {

// Sums that an element of x @ a^T is split into, over every so many'th k: few rows would otherwise wait for
// each multiply-add.
inline constexpr int kLoraChains = 2;
// Output panels that share each load of h.
inline constexpr int kLoraPanels = 2;
inline constexpr int kLoraTileRows = kAccumulators >= 16 ? 8 : kAccumulators >= 6 ? 3 : 1;

template <typename W, int ROWS>
[[gnu::flatten]] void lora_shrink_tile(const LoraShrinkArgs& args, int64_t first_row, int64_t panel) {
  const W* a = reinterpret_cast<const W*>(args.a) + panel * args.k * kLoraColumns;
  const float* x[ROWS];
  Vec16 sum[kLoraChains][ROWS];
  unroll<ROWS>([&](int r) {
    x[r] = args.x[first_row + r];
    unroll<kLoraChains>([&](int c) { sum[c][r] = splat(0.0f); });
  });
  int64_t i = 0;
  for (; i + kLoraChains <= args.k; i += kLoraChains) {
    unroll<kLoraChains>([&](int c) {
      const Vec16 weight = load(a + (i + c) * kLoraColumns);
      unroll<ROWS>([&](int r) { sum[c][r] = fma(splat(x[r][i + c]), weight, sum[c][r]); });
    });
  }
  for (; i < args.k; ++i) {
    const Vec16 weight = load(a + i * kLoraColumns);
    unroll<ROWS>([&](int r) { sum[0][r] = fma(splat(x[r][i]), weight, sum[0][r]); });
  }
  unroll<ROWS>([&](int r) {
    store(args.out + (first_row + r) * args.out_stride + panel * kLoraColumns, sum[0][r] + sum[1][r]);
  });
}

template <typename W, int ROWS, int PANELS>
[[gnu::flatten]] void lora_expand_tile(const LoraExpandArgs& args, int64_t first_row, int64_t panel) {
  const W* b[PANELS];
  Vec16 sum[ROWS][PANELS];
  unroll<PANELS>([&](int p) {
    b[p] = reinterpret_cast<const W*>(args.b) + (panel + p) * args.rank * kLoraColumns;
    unroll<ROWS>([&](int r) { sum[r][p] = splat(0.0f); });
  });
  const float* h = args.h + first_row * args.h_stride;
  for (int64_t i = 0; i < args.rank; ++i) {
    Vec16 weight[PANELS];
    unroll<PANELS>([&](int p) { weight[p] = load(b[p] + i * kLoraColumns); });
    unroll<ROWS>([&](int r) {
      const Vec16 value = splat(h[r * args.h_stride + i]);
      unroll<PANELS>([&](int p) { sum[r][p] = fma(value, weight[p], sum[r][p]); });
    });
  }
  unroll<PANELS>([&](int p) {
    const int64_t column = (panel + p) * kLoraColumns;
    const int count = args.n - column >= 16 ? 16 : static_cast<int>(args.n - column);
    unroll<ROWS>([&](int r) {
      float* out = args.out[first_row + r] + column;
      store_lanes(out, load_lanes(out, count) + sum[r][p], count);
    });
  });
}

// By rows - 1.
template <typename W>
struct LoraTiles {
  void (*shrink[kLoraTileRows])(const LoraShrinkArgs&, int64_t, int64_t);
  void (*expand[kLoraTileRows][kLoraPanels])(const LoraExpandArgs&, int64_t, int64_t);
};

template <typename W, int... INDEX>
constexpr LoraTiles<W> make_lora_tiles(std::integer_sequence<int, INDEX...>) {
  return {{&lora_shrink_tile<W, INDEX + 1>...},
          {{&lora_expand_tile<W, INDEX + 1, 1>, &lora_expand_tile<W, INDEX + 1, 2>}...}};
}

template <typename W>
inline constexpr LoraTiles<W> kLoraTiles =
    make_lora_tiles<W>(std::make_integer_sequence<int, kLoraTileRows>());

template <typename W>
void lora_shrink(const LoraShrinkArgs& args, int64_t rows) {
  for (int64_t panel = 0; panel * kLoraColumns < args.rank; ++panel) {
    for (int64_t row = 0; row < rows; row += kLoraTileRows) {
      const int64_t height = rows - row < kLoraTileRows ? rows - row : kLoraTileRows;
      kLoraTiles<W>.shrink[height - 1](args, row, panel);
    }
  }
}

template <typename W>
void lora_expand(const LoraExpandArgs& args, int64_t rows, int64_t first_panel, int64_t last_panel) {
  for (int64_t panel = first_panel; panel < last_panel; panel += kLoraPanels) {
    const int64_t panels = last_panel - panel < kLoraPanels ? last_panel - panel : kLoraPanels;
    for (int64_t row = 0; row < rows; row += kLoraTileRows) {
      const int64_t height = rows - row < kLoraTileRows ? rows - row : kLoraTileRows;
      kLoraTiles<W>.expand[height - 1][panels - 1](args, row, panel);
    }
  }
}

inline void dequantize_row(const QuantizedGroup* x, int64_t stride, int64_t k, float* out) {
  for (int64_t i = 0; i < k; i += kGroup, x += stride) {
    const Vec16 scale = splat(x->scale);
    store(out + i, load(x->values) * scale);
    store(out + i + 16, load(x->values + 16) * scale);
  }
}

}  // namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE
