// Passes over a row of logits. Tables hold one entry per kSampleBlock elements.
#pragma once

#include "elementwise.inl"
#include "kernels.hpp"
#include "simd.hpp"

namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE {

inline constexpr float kLowest = -__builtin_inff();

// Like load_lanes, with missing lanes at -inf.
inline Vec16 load_or_lowest(const float* x, int count) {
  return count == 16 ? load(x) : select(lanes_between(0, count), load_partial(x, count), splat(kLowest));
}

inline int64_t block_end(int64_t begin, int64_t count) {
  return count - begin > kSampleBlock ? begin + kSampleBlock : count;
}

inline RowMaximum row_maximum(const float* x, int64_t count) {
  // Maxima of long stretches, so that the index needs a search in one stretch only.
  constexpr int64_t kStretch = 1024;
  Mask16 nan = no_lanes();
  float best = kLowest;
  int64_t best_begin = 0;
  for (int64_t begin = 0; begin < count; begin += kStretch) {
    const int64_t length = count - begin < kStretch ? count - begin : kStretch;
    Vec16 maximum[4] = {splat(kLowest), splat(kLowest), splat(kLowest), splat(kLowest)};
    int64_t i = 0;
    for (; i + 64 <= length; i += 64) {
      for (int j = 0; j < 4; ++j) {
        const Vec16 a = load(x + begin + i + 16 * j);
        nan = nan | unordered(a, a);
        maximum[j] = max(maximum[j], a);
      }
    }
    for_each_vector(length - i, [&](int64_t j, int lanes) {
      const Vec16 a = load_or_lowest(x + begin + i + j, lanes);
      nan = nan | unordered(a, a);
      maximum[0] = max(maximum[0], a);
    });
    const float value = max_lanes(max(max(maximum[0], maximum[1]), max(maximum[2], maximum[3])));
    if (value > best) {
      best = value;
      best_begin = begin;
    }
  }
  RowMaximum result{best, 0, bits(nan) == 0 && best > kLowest && best < -kLowest};
  if (result.valid) {
    int64_t index = best_begin;
    while (x[index] != best) ++index;
    result.index = static_cast<int32_t>(index);
  }
  return result;
}

inline void block_maxima(const float* x, int64_t count, float* maxima) {
  for (int64_t begin = 0; begin < count; begin += kSampleBlock) {
    Vec16 maximum = splat(kLowest);
    for_each_vector(block_end(begin, count) - begin, [&](int64_t i, int lanes) {
      maximum = max(maximum, load_or_lowest(x + begin + i, lanes));
    });
    maxima[begin / kSampleBlock] = max_lanes(maximum);
  }
}

inline void softmax_weights(const float* x, int64_t count, float maximum, float temperature, float* weights,
                            double* block_sums, float* block_maxima) {
  for (int64_t begin = 0; begin < count; begin += kSampleBlock) {
    Vec16 largest = splat(0.0f);
    Double8 sum = double_zero();
    for_each_vector(block_end(begin, count) - begin, [&](int64_t i, int lanes) {
      const Vec16 weight = exp((load_or_lowest(x + begin + i, lanes) - splat(maximum)) / splat(temperature));
      store_lanes(weights + begin + i, weight, lanes);
      largest = max(largest, weight);
      sum = add_lanes(sum, weight);
    });
    block_sums[begin / kSampleBlock] = sum_lanes(sum);
    block_maxima[begin / kSampleBlock] = max_lanes(largest);
  }
}

inline int64_t collect(const float* x, int64_t count, const float* block_maxima, float threshold,
                       float* values, int32_t* indices) {
  int64_t found = 0;
  for (int64_t begin = 0; begin < count; begin += kSampleBlock) {
    if (block_maxima[begin / kSampleBlock] < threshold) continue;
    for_each_vector(block_end(begin, count) - begin, [&](int64_t i, int lanes) {
      const Vec16 a = load_lanes(x + begin + i, lanes);
      uint32_t kept = bits(greater_equal(a, splat(threshold))) & ((1u << lanes) - 1u);
      for (; kept != 0; kept &= kept - 1) {
        const int64_t index = begin + i + __builtin_ctz(kept);
        values[found] = x[index];
        indices[found++] = static_cast<int32_t>(index);
      }
    });
  }
  return found;
}

inline int64_t count_greater(const float* x, int64_t count, float threshold) {
  int64_t found = 0;
  for_each_vector(count, [&](int64_t i, int lanes) {
    found += __builtin_popcount(bits(less(splat(threshold), load_or_lowest(x + i, lanes))));
  });
  return found;
}

}  // namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE
