// Searching a row of float32 values without sorting it, by all threads of a block.
//
// Everything that is summed is an integer: counts, or weights as multiples of 2^-44. So sums have no rounding
// and no order, and which thread looks at what, or in which order candidates are noted, does not show.
#pragma once

#include <cstdint>

#include "launch.hpp"
#include "reduce.hpp"

namespace streamllm::cuda::sampling {

// A value and its place in the row, in one number: of two elements the one with the larger value has the
// larger key, of equal values the one with the lower id. No two elements of a row have the same key.
using Key = uint64_t;

// Floats as integers of the same order: -inf, ..., zeros (both alike), ..., +inf, NaN.
__device__ __forceinline__ uint32_t ordered(float value) {
  if (value != value) return 0xffffffffu;
  const uint32_t bits = __float_as_uint(value == 0.0f ? 0.0f : value);
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}

// The least key of an element with this value.
__device__ __forceinline__ Key least_key(float value) { return static_cast<Key>(ordered(value)) << 32; }

__device__ __forceinline__ Key key_of(float value, int id) {
  return least_key(value) | (0xffffffffu - static_cast<uint32_t>(id));
}

__device__ __forceinline__ float value_of(Key key) {
  const auto bits = static_cast<uint32_t>(key >> 32);
  return __uint_as_float(bits >> 31 != 0 ? bits & 0x7fffffffu : ~bits);
}

__device__ __forceinline__ int id_of(Key key) {
  return static_cast<int>(0xffffffffu - static_cast<uint32_t>(key));
}

// A weight of [0, 1] as a multiple of 2^-44, rounded down: exact from 2^-21 on, 0 below 2^-44.
__device__ __forceinline__ uint64_t units(float weight) { return static_cast<uint64_t>(weight * 0x1p44f); }

// What a search adds up.
struct Count {
  __device__ __forceinline__ uint64_t operator()(Key) const { return 1; }
};
struct Mass {
  __device__ __forceinline__ uint64_t operator()(Key key) const { return units(value_of(key)); }
};

struct Largest {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};

struct Smaller {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a < b ? a : b;
  }
};

inline constexpr int kMaxWarps = 32;
inline constexpr int kBuckets = 8;      // parts that a pass of a search cuts its range of keys into
inline constexpr int kListSize = 2048;  // noted candidates, so that later passes need not read the row
inline constexpr int kRankSize = 256;   // candidates that are few enough to be compared each with each

struct Found {
  Key key;
  uint64_t reached;  // the measure of this key and all larger ones
};

// Of the block, in shared memory.
struct Memory {
  uint64_t partial[kMaxWarps * kBuckets];
  uint64_t totals[kBuckets];
  Key lists[2][kListSize];
  Found found;
  double log_sum;
  int sizes[2];
};

// visit(id, value) for each of [begin, end) that is this one's: the `first`-th and every `step`-th after it.
// kLoads are on their way at once.
template <int kLoads = 8, typename Visit>
__device__ __forceinline__ void for_each(const float* values, int begin, int end, int first, int step,
                                         Visit visit) {
  for (int id = begin + first; id < end; id += kLoads * step) {
    float loaded[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) loaded[i] = id + i * step < end ? values[id + i * step] : 0.0f;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (id + i * step < end) visit(id + i * step, loaded[i]);
    }
  }
}

template <int kLoads = 8, typename Visit>
__device__ __forceinline__ void for_each(const float* values, int count, Visit visit) {
  for_each<kLoads>(values, 0, count, threadIdx.x, blockDim.x, visit);
}

// Each of N numbers over all threads; every thread gets all results. An operation that 0 does not change.
template <int N, typename Operation>
__device__ __forceinline__ void reduce_all(uint64_t (&values)[N], Operation operation, Memory& memory) {
  static_assert(N <= kBuckets);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int num_warps = blockDim.x / kWarpSize;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    values[i] = warp_reduce(values[i], operation);
    if (lane == 0) memory.partial[warp * N + i] = values[i];
  }
  __syncthreads();
  if (threadIdx.x < N) {
    uint64_t total = 0;
    for (int w = 0; w < num_warps; ++w) total = operation(total, memory.partial[w * N + threadIdx.x]);
    memory.totals[threadIdx.x] = total;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = memory.totals[i];
}

__device__ __forceinline__ uint64_t largest_of_all(uint64_t value, Memory& memory) {
  uint64_t values[1] = {value};
  reduce_all(values, Largest{}, memory);
  return values[0];
}

__device__ __forceinline__ Key largest_key(const float* values, int count, Memory& memory) {
  Key largest = 0;
  for_each(values, count, [&](int id, float value) { largest = Largest{}(largest, key_of(value, id)); });
  return largest_of_all(largest, memory);
}

// A key that at least `count` elements reach, and for small counts not many more: the least among the largest
// of groups that the elements are dealt out to. `largest`: ordered(), of the elements that this thread saw.
__device__ __forceinline__ Key lower_bound_of_largest(uint32_t largest, int64_t count, Memory& memory) {
  constexpr int kGroup = 16;  // threads
  if (count > blockDim.x / kGroup) return 0;
  const uint64_t of_group = warp_reduce<kGroup>(largest, Largest{});
  return (0xffffffffu - largest_of_all(0xffffffffu - of_group, memory)) << 32;
}

// Of the noted keys in [low, low + width) the one that find_last looks for.
template <typename Measure>
__device__ __forceinline__ Found find_by_rank(const Key* list, int size, Key low, Key width, uint64_t above,
                                              uint64_t target, Measure measure, Memory& memory) {
  for (int i = threadIdx.x; i < size; i += blockDim.x) {
    const Key key = list[i];
    if (key - low >= width) continue;
    uint64_t before = above;
    for (int j = 0; j < size; ++j) {
      const Key other = list[j];
      if (other > key && other - low < width) before += measure(other);
    }
    const uint64_t reached = before + measure(key);
    if (before < target && reached >= target) memory.found = {key, reached};
  }
  __syncthreads();
  return memory.found;
}

// The largest key whose measure, together with that of all larger ones, reaches `target`, at least 1. Keys of
// the row are below `high`, and those of [low, high) reach the target. Each pass cuts the range of keys into
// parts and goes on with the one where the target is reached. A call of its own, for the registers' sake; it
// asks for the block's memory itself, so that the compiler knows that this is shared memory.
template <typename Measure>
__device__ __noinline__ Found find_last(const float* values, int count, Key low, Key high, uint64_t target,
                                        Measure measure) {
  Memory& memory = *shared_memory<Memory>();
  constexpr int kBits = 3;
  static_assert(1 << kBits == kBuckets);
  Key width = high - low;
  int shift = 0;
  while ((width - 1) >> shift >= kBuckets) ++shift;
  uint64_t above = 0;         // the measure of what is beyond the range
  const Key* list = nullptr;  // what the last pass found in its range, if that was not too much
  int size = 0;
  for (int pass = 0;; ++pass) {
    Key* noted = memory.lists[pass % 2];
    int& num_noted = memory.sizes[pass % 2];
    if (threadIdx.x == 0) num_noted = 0;
    __syncthreads();
    uint64_t sums[kBuckets] = {};
    const auto visit = [&](Key key) {
      const Key offset = key - low;
      if (offset >= width) return;
      const auto bucket = static_cast<int>(offset >> shift);
      const uint64_t amount = measure(key);
#pragma unroll
      for (int i = 0; i < kBuckets; ++i) sums[i] += bucket == i ? amount : 0;
      if (num_noted > kListSize) return;  // once it is too much, it stays too much
      const int place = atomicAdd(&num_noted, 1);
      if (place < kListSize) noted[place] = key;
    };
    if (list != nullptr) {
#pragma unroll 1  // registers are few
      for (int i = threadIdx.x; i < size; i += blockDim.x) visit(list[i]);
    } else {
      for_each<4>(values, count, [&](int id, float value) { visit(key_of(value, id)); });
    }
    reduce_all(sums, Sum{}, memory);

    uint64_t reached = 0;
    int bucket = -1;
#pragma unroll
    for (int i = kBuckets - 1; i >= 0; --i) {
      if (bucket >= 0) continue;
      reached = above + sums[i];
      if (i == 0 || reached >= target) {
        bucket = i;
      } else {
        above = reached;
      }
    }
    low += static_cast<Key>(bucket) << shift;
    width = static_cast<Key>(1) << shift;
    if (shift == 0) return {low, reached};
    size = num_noted;
    if (size <= kListSize) list = noted;
    if (size <= kRankSize) return find_by_rank(list, size, low, width, above, target, measure, memory);
    shift = shift > kBits ? shift - kBits : 0;
  }
}

// The sum of the weights with keys >= cutoff.
__device__ __forceinline__ uint64_t mass_from(Key cutoff, const float* weights, int count, Memory& memory) {
  uint64_t sums[1] = {};
  for_each(weights, count, [&](int id, float weight) {
    if (key_of(weight, id) >= cutoff) sums[0] += units(weight);
  });
  reduce_all(sums, Sum{}, memory);
  return sums[0];
}

// The lowest id at which the sum of the weights with keys >= cutoff, in id order, exceeds `target`; there
// must be one. Each pass cuts the range of ids into parts and goes on within one of them.
__device__ __forceinline__ int find_in_id_order(Key cutoff, const float* weights, int count, uint64_t target,
                                                Memory& memory) {
  constexpr int kParts = 32;
  const int lane = threadIdx.x % kWarpSize;
  uint64_t before = 0;
  int begin = 0, end = count;
  while (end - begin > 1) {
    const int part_size = (end - begin + kParts - 1) / kParts;
    for (int part = threadIdx.x / kWarpSize; part < kParts; part += blockDim.x / kWarpSize) {
      const int first = begin + part * part_size;
      uint64_t sum = 0;
      for_each(weights, first, min(first + part_size, end), lane, kWarpSize, [&](int id, float weight) {
        if (key_of(weight, id) >= cutoff) sum += units(weight);
      });
      sum = warp_sum(sum);
      if (lane == 0) memory.partial[part] = sum;
    }
    __syncthreads();
    int part = 0;
    for (; part < kParts - 1 && before + memory.partial[part] <= target; ++part) {
      before += memory.partial[part];
    }
    __syncthreads();
    begin += part * part_size;
    end = min(begin + part_size, end);
  }
  return begin;
}

}  // namespace streamllm::cuda::sampling
