// Norms and rotation of q and k, and the write of k and v into the paged cache.
#include <type_traits>

#include "api.hpp"
#include "cache_layout.hpp"
#include "chunk.hpp"
#include "launch.hpp"
#include "reduce.hpp"
#include "types.hpp"

namespace streamllm::cuda {

// Rows of qkv are [q heads | k heads | v heads], qkv_stride elements apart; q is rotated in place. The caches
// lie as cache_layout.hpp says. Slots below 0 write nothing. rope_cos and rope_sin have rows of
// rotary_dim / 2. A norm that is null is left out. What a scale divides is stored, in float8.
struct RotaryAndCacheArgs {
  void* qkv;
  void* keys;
  void* values;
  const int64_t* slot_mapping;
  const int32_t* rope_rows;
  const float* rope_cos;
  const float* rope_sin;
  const float* q_norm;
  const float* k_norm;
  int64_t qkv_stride;
  int32_t tokens;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t rotary_dim;
  int32_t block_size;
  int32_t dtype;
  int32_t cache_dtype;
  float norm_eps;
  float key_scale;
  float value_scale;
};

namespace {

constexpr int kThreads = 128;
constexpr int kMaxHeadDim = 256;
constexpr float kSmallestMagnitude = 1e-30f;  // in int8, heads below it are zeros

// A head as head_dim / 2 pairs of elements, so that one thread holds both that a rotation mixes (GPT-NeoX's
// pairing: i and i + rotary_dim / 2); the elements that are not rotated pair up likewise, after them.
struct Pairs {
  int rotated;
  int others;

  __device__ int first(int pair) const { return pair < rotated ? pair : rotated + pair; }
  __device__ int second(int pair) const { return first(pair) + (pair < rotated ? rotated : others); }
};

template <typename T, int N>
__device__ __forceinline__ void load_pairs(float (&x1)[N], float (&x2)[N], const T* head, const Pairs& pairs,
                                           int pair, int count, bool aligned) {
  if (aligned) {
    load_chunk(x1, head + pairs.first(pair), count, true);
    load_chunk(x2, head + pairs.second(pair), count, true);
    return;
  }
#pragma unroll
  for (int lane = 0; lane < N; ++lane) {
    x1[lane] = lane < count ? to_float(head[pairs.first(pair + lane)]) : 0.0f;
    x2[lane] = lane < count ? to_float(head[pairs.second(pair + lane)]) : 0.0f;
  }
}

// Not waited for (StoredChunk).
template <typename T>
__device__ __forceinline__ void load_pairs(StoredChunk<T>& x1, StoredChunk<T>& x2, const T* head,
                                           const Pairs& pairs, int pair, int count, bool aligned) {
  if (aligned) {
    x1.load(head + pairs.first(pair), count, true);
    x2.load(head + pairs.second(pair), count, true);
    return;
  }
  float values1[kChunkSize<T>], values2[kChunkSize<T>];
  load_pairs(values1, values2, head, pairs, pair, count, false);
  x1.set(values1);
  x2.set(values2);
}

template <bool kSaturate = false, typename T, int N>
__device__ __forceinline__ void store_pairs(T* head, const float (&x1)[N], const float (&x2)[N],
                                            const Pairs& pairs, int pair, int count, bool aligned) {
  if (aligned) {
    store_chunk<kSaturate>(head + pairs.first(pair), x1, count, true);
    store_chunk<kSaturate>(head + pairs.second(pair), x2, count, true);
    return;
  }
#pragma unroll
  for (int lane = 0; lane < N; ++lane) {
    if (lane >= count) continue;
    head[pairs.first(pair + lane)] = rounded<kSaturate, T>(x1[lane]);
    head[pairs.second(pair + lane)] = rounded<kSaturate, T>(x2[lane]);
  }
}

template <int N>
__device__ __forceinline__ void rotate(float (&x1)[N], float (&x2)[N], const float (&cos)[N],
                                       const float (&sin)[N], int count) {
#pragma unroll
  for (int lane = 0; lane < N; ++lane) {
    if (lane >= count) continue;
    const float old = x1[lane];
    x1[lane] = fmaf(old, cos[lane], -(x2[lane] * sin[lane]));
    x2[lane] = fmaf(x2[lane], cos[lane], old * sin[lane]);
  }
}

// The largest magnitude of a head, where magnitudes saturate as float16's do; NaN if there is one. All lanes
// of the warp call it.
template <int N>
__device__ __forceinline__ float largest_magnitude(const float (&x1)[N], const float (&x2)[N]) {
  unsigned largest = 0;  // the bits of floats that are not negative are ordered as they are, NaN above all
#pragma unroll
  for (int lane = 0; lane < N; ++lane) {
    largest = max(largest, __float_as_uint(fabsf(saturate_half(x1[lane]))));
    largest = max(largest, __float_as_uint(fabsf(saturate_half(x2[lane]))));
  }
  for (int offset = blockDim.x / 2; offset > 0; offset /= 2) {
    largest = max(largest, __shfl_xor_sync(kAllLanes, largest, offset));
  }
  return __uint_as_float(largest);
}

// Divides a head's elements by the scale that its largest magnitude gives it, which is returned: a magnitude
// of 127 at most is left. NaN makes the scale NaN: it then reaches every row that sees the position.
template <int N>
__device__ __forceinline__ float scale_to_int8(float (&x1)[N], float (&x2)[N], float largest) {
  const bool is_zero = !(largest >= kSmallestMagnitude);
  const float factor = 127.0f / largest;
#pragma unroll
  for (int lane = 0; lane < N; ++lane) {
    x1[lane] = is_zero ? 0.0f : saturate_half(x1[lane]) * factor;
    x2[lane] = is_zero ? 0.0f : saturate_half(x2[lane]) * factor;
  }
  return largest < kSmallestMagnitude ? 0.0f : largest / 127.0f;
}

// One head of one token belongs to blockDim.x threads, a power of two up to a warp; blockIdx.x is the token.
template <typename T, typename C>
__global__ void __launch_bounds__(kThreads) rotary_and_cache_kernel(RotaryAndCacheArgs args, bool aligned) {
  constexpr int N = kChunkSize<T>;
  const int token = blockIdx.x;
  const int head = blockIdx.y * blockDim.y + threadIdx.y;
  const bool is_query = head < args.num_heads;
  const bool is_value = head >= args.num_heads + args.num_kv_heads;
  // All loads come before what waits for one of them; whether there is a slot matters to stores alone.
  const int64_t slot = args.slot_mapping[token];
  const int rope_row = args.rope_rows[token];
  // Threads without a head stay: the others exchange sums with their whole warp.
  const bool exists = head < args.num_heads + 2 * args.num_kv_heads;

  const int rotated = is_value ? 0 : args.rotary_dim / 2;
  const Pairs pairs{rotated, args.head_dim / 2 - rotated};
  const int pair = threadIdx.x * N;
  const int count = exists ? min(args.head_dim / 2 - pair, N) : 0;
  T* x = static_cast<T*>(args.qkv) + token * args.qkv_stride + static_cast<int64_t>(head) * args.head_dim;
  StoredChunk<T> stored1, stored2;
  load_pairs(stored1, stored2, x, pairs, pair, count, aligned);
  const int num_rotated = min(count, pairs.rotated - pair);
  const int64_t angle = static_cast<int64_t>(rope_row) * (args.rotary_dim / 2) + pair;
  float cos[N], sin[N];
  load_chunk(cos, args.rope_cos + angle, num_rotated, aligned);
  load_chunk(sin, args.rope_sin + angle, num_rotated, aligned);
  float x1[N], x2[N];
  stored1.get(x1);
  stored2.get(x2);

  if (args.q_norm != nullptr || args.k_norm != nullptr) {
    float sum = 0.0f;
#pragma unroll
    for (int lane = 0; lane < N; ++lane) sum = fmaf(x2[lane], x2[lane], fmaf(x1[lane], x1[lane], sum));
    for (int offset = blockDim.x / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
    const float* norm = is_query ? args.q_norm : is_value ? nullptr : args.k_norm;
    if (norm != nullptr) {
      const float factor = 1.0f / sqrtf(sum / static_cast<float>(args.head_dim) + args.norm_eps);
      float weight1[N], weight2[N];
      load_pairs(weight1, weight2, norm, pairs, pair, count, aligned);
#pragma unroll
      for (int lane = 0; lane < N; ++lane) {
        x1[lane] = x1[lane] * factor * weight1[lane];
        x2[lane] = x2[lane] * factor * weight2[lane];
      }
    }
  }
  rotate(x1, x2, cos, sin, num_rotated);
  [[maybe_unused]] float largest = 0.0f;
  if constexpr (kScaled<C>) largest = largest_magnitude(x1, x2);
  if (count <= 0) return;
  if (is_query) {
    store_pairs(x, x1, x2, pairs, pair, count, aligned);
    return;
  }
  if (slot < 0) return;
  const int kv_head = (head - args.num_heads) % args.num_kv_heads;
  const int64_t stored_head = slot / args.block_size * args.num_kv_heads + kv_head;
  C* elements =
      reinterpret_cast<C*>(static_cast<char*>(is_value ? args.values : args.keys) +
                           stored_head * cache_head_bytes<C>(args.block_size, args.head_dim));
  const int64_t offset = slot % args.block_size;
  if constexpr (std::is_same_v<C, float8_e4m3>) {
    const float scale = is_value ? args.value_scale : args.key_scale;
#pragma unroll
    for (int lane = 0; lane < N; ++lane) {
      x1[lane] /= scale;
      x2[lane] /= scale;
    }
  }
  if constexpr (kScaled<C>) {
    const float scale = scale_to_int8(x1, x2, largest);
    float* scales = reinterpret_cast<float*>(elements + int64_t{args.block_size} * args.head_dim);
    if (threadIdx.x == 0) scales[offset] = scale;
  }
  store_pairs<true>(elements + offset * args.head_dim, x1, x2, pairs, pair, count, aligned);
}

template <typename T, typename C>
int rotary_and_cache(const RotaryAndCacheArgs& args, void* stream) {
  constexpr int N = kChunkSize<T>;
  const int half = args.rotary_dim / 2;
  const bool aligned = rows_are_aligned(args.qkv, args.qkv_stride, sizeof(T)) &&
                       args.head_dim % (2 * N) == 0 && half % N == 0 && is_aligned16(args.keys) &&
                       is_aligned16(args.values) && is_aligned16(args.rope_cos) &&
                       is_aligned16(args.rope_sin) && is_aligned16(args.q_norm) && is_aligned16(args.k_norm);
  unsigned lanes = 1;
  while (lanes * 2 * N < static_cast<unsigned>(args.head_dim)) lanes *= 2;
  const unsigned heads = kThreads / lanes;
  const unsigned num_heads = args.num_heads + 2 * args.num_kv_heads;
  return launch(rotary_and_cache_kernel<T, C>, dim3(args.tokens, (num_heads + heads - 1) / heads),
                dim3(lanes, heads), 0, stream, args, aligned);
}

}  // namespace
}  // namespace streamllm::cuda

STREAMLLM_API int streamllm_rotary_and_cache(const streamllm::cuda::RotaryAndCacheArgs* args, void* stream) {
  using namespace streamllm::cuda;
  if (args->tokens == 0) return kSuccess;
  const int32_t head_dim = args->head_dim, rotary_dim = args->rotary_dim;
  if (head_dim < 2 || head_dim > kMaxHeadDim || head_dim % 2 != 0) return kUnsupportedHeadSize;
  if (rotary_dim < 0 || rotary_dim > head_dim || rotary_dim % 2 != 0 || args->tokens < 0 ||
      args->num_heads < 0 || args->num_kv_heads < 1 || args->block_size < 1 ||
      (args->cache_dtype == kInt8 && args->block_size % 16 != 0)) {
    return kUnsupportedSize;
  }
  return with_activation_type(args->dtype, [&](auto activation) {
    using T = typename decltype(activation)::type;
    if (args->cache_dtype == kFloat8E4M3) return rotary_and_cache<T, float8_e4m3>(*args, stream);
    if (args->cache_dtype == kInt8) return rotary_and_cache<T, int8_t>(*args, stream);
    return with_activation_type(args->cache_dtype, [&](auto cache) {
      return rotary_and_cache<T, typename decltype(cache)::type>(*args, stream);
    });
  });
}
