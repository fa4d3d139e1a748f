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

// Appends, in index order, the values in [low, high) and their indices; returns how many.
inline int64_t collect_between(const float* x, int64_t count, float low, float high, float* values,
                               int32_t* indices) {
  int64_t found = 0;
  for_each_vector(count, [&](int64_t i, int lanes) {
    const Vec16 a = load_lanes(x + i, lanes);
    uint32_t kept = bits(greater_equal(a, splat(low))) & bits(less(a, splat(high))) & ((1u << lanes) - 1u);
    for (; kept != 0; kept &= kept - 1) {
      const int64_t index = i + __builtin_ctz(kept);
      values[found] = x[index];
      indices[found++] = static_cast<int32_t>(index);
    }
  });
  return found;
}

inline void block_sums_at_least(const float* x, int64_t count, float threshold, double* sums) {
  for (int64_t begin = 0; begin < count; begin += kSampleBlock) {
    Double8 sum = double_zero();
    for_each_vector(block_end(begin, count) - begin, [&](int64_t i, int lanes) {
      const Vec16 a = load_lanes(x + begin + i, lanes);
      sum = add_lanes(sum, select(greater_equal(a, splat(threshold)), a, splat(0.0f)));
    });
    sums[begin / kSampleBlock] = sum_lanes(sum);
  }
}

inline void sums_at_least(const float* x, int64_t count, const float* thresholds, double* sums) {
  constexpr int64_t kStretch = 1024;  // what is summed in float32: few enough to be precise
  for (int t = 0; t < kSumThresholds; ++t) sums[t] = 0.0;
  for (int64_t begin = 0; begin < count; begin += kStretch) {
    Vec16 partial[kSumThresholds];
    unroll<kSumThresholds>([&](int t) { partial[t] = splat(0.0f); });
    for_each_vector(count - begin < kStretch ? count - begin : kStretch, [&](int64_t i, int lanes) {
      const Vec16 a = load_lanes(x + begin + i, lanes);
      unroll<kSumThresholds>([&](int t) {
        partial[t] = partial[t] + select(greater_equal(a, splat(thresholds[t])), a, splat(0.0f));
      });
    });
    for (int t = 0; t < kSumThresholds; ++t) sums[t] += static_cast<double>(sum_lanes(partial[t]));
  }
}

// out = x where every mask that is there (bit i % 32 of word i / 32) has a 1, else -inf.
inline void masked_copy(const float* x, int64_t count, const uint32_t* first, const uint32_t* second,
                        float* out) {
  for_each_vector(count, [&](int64_t i, int lanes) {
    uint32_t allowed = first[i / 32];
    if (second != nullptr) allowed &= second[i / 32];
    const Mask16 kept = lanes_of((allowed >> (i % 32)) & 0xffffu);
    store_lanes(out + i, select(kept, load_lanes(x + i, lanes), splat(kLowest)), lanes);
  });
}

inline int64_t count_greater(const float* x, int64_t count, float threshold) {
  int64_t found = 0;
  for_each_vector(count, [&](int64_t i, int lanes) {
    found += __builtin_popcount(bits(less(splat(threshold), load_or_lowest(x + i, lanes))));
  });
  return found;
}

}  // namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE
