// Rows of float32 as GGML's blocks of 32 elements. No operation is fused: every instruction set gives the
// same bytes.
//
// Q8_0: a scale d and integers u of 8 bits, which stand for d * u; the largest magnitude is 127 d.
//
// Q4_1: a scale d, a minimum m and integers u of 4 bits, which stand for d * u + m. d and m are searched: the
// integers that a few scales and minima give, each with the line that fits them best (weighted least
// squares), and of all those the one with the least error
//   sum of importance * (d * u + m - value)^2.
// Sixteen rows at a time lie in the lanes of a vector.
#pragma once

#include "kernels.hpp"
#include "simd.hpp"

namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE {

namespace q4_1 {

inline constexpr float kLargest = 15.0f;  // integer
inline constexpr int kBytes = 20;         // of a block
// Lines tried: scales, as parts of the one that reaches from the smallest to the largest value; and where the
// part of the range lies that they do not reach, from all above (0) to all below (1).
inline constexpr float kStretches[] = {0.6f, 0.72f, 0.84f, 0.96f};
inline constexpr float kAnchors[] = {0.0f, 0.5f, 1.0f};
inline constexpr int kRefinements = 2;  // of the best line: the integers nearest to it, a line through those

// Blocks of 16 rows at the same columns. `importance` sums to kGroup.
struct Blocks {
  Vec16 values[kGroup];
  float importance[kGroup];
};

struct Line {
  Vec16 d, m, error;
};

inline Vec16 nearest_integers(Vec16 values, Vec16 inverse, Vec16 offset) {
  const Vec16 shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec16 scaled = values * inverse + offset;
  // Of a NaN and a number, min returns the second operand.
  return max(min(scaled, splat(kLargest)), splat(0.0f)) + shift - shift;
}

inline Vec16 inverse_of(Vec16 d) {
  const Vec16 zero = splat(0.0f);
  return select(less(zero, d), splat(1.0f) / d, zero);
}

struct Moments {
  Vec16 sum, squares;  // importance * value, importance * value^2
};

inline Moments moments_of(const Blocks& blocks) {
  Moments result{splat(0.0f), splat(0.0f)};
  for (int i = 0; i < kGroup; ++i) {
    const Vec16 weighted = splat(blocks.importance[i]) * blocks.values[i];
    result.sum = result.sum + weighted;
    result.squares = result.squares + weighted * blocks.values[i];
  }
  return result;
}

// The best line for the integers that d and m give.
inline Line fitted(const Blocks& blocks, const Moments& moments, Vec16 d, Vec16 m) {
  const Vec16 zero = splat(0.0f), count = splat(kGroup), inverse = inverse_of(d);
  const Vec16 offset = zero - m * inverse;
  Vec16 sum = zero, squares = zero, products = zero;
  for (int i = 0; i < kGroup; ++i) {
    const Vec16 u = nearest_integers(blocks.values[i], inverse, offset);
    const Vec16 weighted = u * splat(blocks.importance[i]);
    sum = sum + weighted;
    squares = squares + weighted * u;
    products = products + weighted * blocks.values[i];
  }
  // Of integers that are all alike the determinant is 0, but for rounding: no slope then.
  const Vec16 determinant = count * squares - sum * sum;
  const Mask16 has_slope = less(splat(1e-6f) * count * squares, determinant);
  const Vec16 slope = (count * products - sum * moments.sum) / select(has_slope, determinant, splat(1.0f));
  Line line;
  line.d = select(has_slope, slope, zero);
  line.m = (moments.sum - line.d * sum) * splat(1.0f / kGroup);
  line.error = moments.squares - line.d * products - line.m * moments.sum;
  return line;
}

inline void keep_better(Line& best, const Line& line) {
  const Mask16 better = less(line.error, best.error);
  best.d = select(better, line.d, best.d);
  best.m = select(better, line.m, best.m);
  best.error = select(better, line.error, best.error);
}

inline Line search(const Blocks& blocks) {
  const Moments moments = moments_of(blocks);
  Vec16 low = blocks.values[0], high = blocks.values[0];
  for (int i = 1; i < kGroup; ++i) {
    low = min(low, blocks.values[i]), high = max(high, blocks.values[i]);
  }
  const Vec16 range = high - low;
  Line best{splat(0.0f), low, splat(__FLT_MAX__)};
  for (const float stretch : kStretches) {
    const Vec16 d = range * splat(stretch / kLargest);
    for (const float anchor : kAnchors) {
      keep_better(best, fitted(blocks, moments, d, low + range * splat((1.0f - stretch) * anchor)));
    }
  }
  for (int i = 0; i < kRefinements; ++i) keep_better(best, fitted(blocks, moments, best.d, best.m));
  // NaN or infinity among the values must not get lost.
  best.m = best.m + (moments.sum - moments.sum);
  return best;
}

// The blocks of the first `rows` lanes, `row_bytes` apart.
inline void store_blocks(const Blocks& blocks, const Line& line, int rows, uint8_t* out, int64_t row_bytes) {
  Half d[16], m[16];
  store(d, saturate(line.d));
  store(m, saturate(line.m));
  const Vec16 inverse = inverse_of(load(d)), offset = splat(0.0f) - load(m) * inverse;
  float integers[kGroup][16];
  for (int i = 0; i < kGroup; ++i) store(integers[i], nearest_integers(blocks.values[i], inverse, offset));
  for (int row = 0; row < rows; ++row) {
    uint8_t* block = out + row * row_bytes;
    std::memcpy(block, &d[row], 2);
    std::memcpy(block + 2, &m[row], 2);
    for (int i = 0; i < kGroup / 2; ++i) {
      const int low = static_cast<int>(integers[i][row]);
      const int high = static_cast<int>(integers[i + kGroup / 2][row]);
      block[4 + i] = static_cast<uint8_t>(low | high << 4);
    }
  }
}

// `importance` of a group, scaled so that it sums to kGroup; all alike where it is 0.
inline void take_importance(const float* importance, float* scaled) {
  float sum = 0.0f;
  for (int i = 0; i < kGroup; ++i) sum += importance[i];
  for (int i = 0; i < kGroup; ++i) scaled[i] = sum > 0.0f ? importance[i] * (kGroup / sum) : 1.0f;
}

}  // namespace q4_1

inline void quantize_q8_0(const QuantizeWeightsArgs& args) {
  uint8_t* block = args.out;
  for (int64_t i = 0; i < args.rows * args.k; i += kGroup, block += 2 + kGroup) {
    const Vec16 low = load(args.values + i), high = load(args.values + i + 16);
    const float largest = largest_magnitude(low, high);
    const bool is_finite = largest <= __FLT_MAX__;
    const float d = largest < 127.0f * kLargestHalf ? largest / 127.0f : kLargestHalf;
    const Half stored = is_finite ? float_to_half(d) : Half{0x7e00};  // NaN
    std::memcpy(block, &stored, 2);
    // Of scales that are 0 in float16 the integers do not matter.
    const float inverse = is_finite && largest > 1e-30f ? 1.0f / d : 0.0f;
    const Vec16 zero = splat(0.0f), limit = splat(127.0f);
    const auto scaled = [&](Vec16 values) {
      return is_finite ? max(min(values * splat(inverse), limit), zero - limit) : zero;
    };
    store_rounded(reinterpret_cast<int8_t*>(block + 2), scaled(low), scaled(high));
  }
}

inline void quantize_q4_1(const QuantizeWeightsArgs& args) {
  const int64_t row_bytes = args.k / kGroup * q4_1::kBytes;
  q4_1::Blocks blocks;
  for (int64_t group = 0; group < args.k / kGroup; ++group) {
    q4_1::take_importance(args.importance + group * kGroup, blocks.importance);
    for (int64_t row = 0; row < args.rows; row += 16) {
      const int count = args.rows - row < 16 ? static_cast<int>(args.rows - row) : 16;
      float lanes[kGroup][16] = {};
      for (int lane = 0; lane < count; ++lane) {
        const float* values = args.values + (row + lane) * args.k + group * kGroup;
        for (int i = 0; i < kGroup; ++i) lanes[i][lane] = values[i];
      }
      for (int i = 0; i < kGroup; ++i) blocks.values[i] = load(lanes[i]);
      uint8_t* out = args.out + row * row_bytes + group * q4_1::kBytes;
      q4_1::store_blocks(blocks, q4_1::search(blocks), count, out, row_bytes);
    }
  }
}

}  // namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE
