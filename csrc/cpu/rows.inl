// Rows of activations: reading and writing them in vectors, and quantising them for products with quantised
// weights.
#pragma once

#include "kernels.hpp"
#include "simd.hpp"

namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE {

// Calls function(first, count) for vectors of `dim` elements: 16 lanes each, the last one perhaps fewer.
template <typename Function>
inline void for_each_vector(int64_t dim, Function function) {
  int64_t i = 0;
  for (; i + 16 <= dim; i += 16) function(i, 16);
  if (i < dim) function(i, static_cast<int>(dim - i));
}

template <typename T>
inline Vec16 load_lanes(const T* p, int count) {
  return count == 16 ? load(p) : load_partial(p, count);
}

template <typename T>
inline void store_lanes(T* p, Vec16 a, int count) {
  if (count == 16) {
    store_saturated(p, a);
  } else {
    store_partial(p, a, count);
  }
}

// Groups whose largest magnitude is below this count as zeros: 127 divided by it must be finite.
inline constexpr float kSmallestMagnitude = 1e-30f;

// Elements 0 .. 15 and 16 .. 31 of a group.
inline void quantize_group(Vec16 low, Vec16 high, QuantizedGroup& out) {
  const float largest = largest_magnitude(low, high);
  const bool finite = largest < __builtin_inff();
  if (!finite || largest < kSmallestMagnitude) {
    out = {};
    if (!finite) out.scale = __builtin_nanf("");
    return;
  }
  const Vec16 factor = splat(127.0f / largest);
  const Int4 sums = store_rounded(out.values, low * factor, high * factor);
  const float scale = largest / 127.0f;
  Float4 scaled = __builtin_convertvector(sums, Float4) * scale;
  scaled[0] = scale;
  const Int4 corrections = sums * Int4{-8, -128, -4, -4};
  std::memcpy(&out.scale, &scaled, sizeof scaled);
  std::memcpy(&out.minus_8_sums, &corrections, sizeof corrections);
}

// Writes `dim` elements of a row from `column` on; values(i, count) gives `count` of them from the i-th on.
// Quantised rows are written in whole groups.
template <typename Values>
inline void write_row(const OutputRows& out, int64_t row, int64_t column, int64_t dim, Values values) {
  if (out.quantized) {
    QuantizedGroup* group = static_cast<QuantizedGroup*>(out.data) + column / kGroup * out.stride + row;
    for (int64_t i = 0; i < dim; i += kGroup, group += out.stride) {
      quantize_group(values(i, 16), values(i + 16, 16), *group);
    }
  } else {
    float* target = static_cast<float*>(out.data) + row * out.stride + column;
    for_each_vector(dim, [&](int64_t i, int count) { store_lanes(target + i, values(i, count), count); });
  }
}

inline void quantize_rows(const QuantizeArgs& args, int64_t first_row, int64_t last_row) {
  for (int64_t row = first_row; row < last_row; ++row) {
    const float* x = args.x + row * args.x_stride;
    write_row(args.out, row, 0, args.k, [&](int64_t i, int) { return load(x + i); });
  }
}

}  // namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE
