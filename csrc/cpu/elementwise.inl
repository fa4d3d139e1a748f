// RMSNorm, rotary embedding with the cache write, SiLU.
#pragma once

#include "kernels.hpp"
#include "rows.inl"
#include "simd.hpp"

namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE {

// 1 / sqrt(mean(x^2) + eps)
inline float inverse_rms(const float* x, int64_t dim, float eps) {
  Vec16 sum = splat(0.0f);
  for_each_vector(dim, [&](int64_t i, int count) {
    const Vec16 a = load_lanes(x + i, count);
    sum = fma(a, a, sum);
  });
  return 1.0f / __builtin_sqrtf(sum_lanes(sum) / static_cast<float>(dim) + eps);
}

inline void normalize(const float* x, const float* weight, int64_t dim, float eps, const OutputRows& out,
                      int64_t row) {
  const Vec16 factor = splat(inverse_rms(x, dim, eps));
  write_row(out, row, 0, dim, [&](int64_t i, int count) {
    return load_lanes(x + i, count) * factor * load_lanes(weight + i, count);
  });
}

inline void rms_norm(const RmsNormArgs& args, int64_t first_row, int64_t last_row) {
  for (int64_t row = first_row; row < last_row; ++row) {
    const float* x = args.x + row * args.x_stride;
    if (args.residual != nullptr) {
      float* residual = args.residual + row * args.residual_stride;
      for_each_vector(args.dim, [&](int64_t i, int count) {
        store_lanes(residual + i, load_lanes(residual + i, count) + load_lanes(x + i, count), count);
      });
      x = residual;
    }
    normalize(x, args.weight, args.dim, args.eps, args.out, row);
  }
}

// Rotates (x1, x2) = (head[:half], head[half:2 * half]) by the angles of one position (NeoX order).
inline void rotate(float* head, const float* cos, const float* sin, int half) {
  for_each_vector(half, [&](int64_t i, int count) {
    const Vec16 c = load_lanes(cos + i, count), s = load_lanes(sin + i, count);
    const Vec16 x1 = load_lanes(head + i, count), x2 = load_lanes(head + half + i, count);
    store_lanes(head + i, x1 * c - x2 * s, count);
    store_lanes(head + half + i, x2 * c + x1 * s, count);
  });
}

template <typename KV>
inline void write_cache(const RotaryArgs& args, int64_t slot, int head, const float* key,
                        const float* value) {
  const int64_t block = slot / args.block_size, offset = slot % args.block_size;
  const int64_t head_base = (block * args.num_kv_heads + head) * args.block_size * args.head_dim;
  KV* keys = static_cast<KV*>(args.key_cache) + head_base + offset / kKeyTile * args.head_dim * kKeyTile +
             offset % kKeyTile;
  for_each_vector(args.head_dim, [&](int64_t i, int count) {
    KV converted[16];
    store_saturated(converted, load_lanes(key + i, count));
    for (int lane = 0; lane < count; ++lane) keys[(i + lane) * kKeyTile] = converted[lane];
  });
  KV* values = static_cast<KV*>(args.value_cache) + head_base + offset * args.head_dim;
  for_each_vector(args.head_dim, [&](int64_t i, int count) {
    store_lanes(values + i, load_lanes(value + i, count), count);
  });
}

inline void rotary_and_cache(const RotaryArgs& args, int64_t first_row, int64_t last_row) {
  const int half = args.rotary_dim / 2;
  const int64_t head_dim = args.head_dim;
  for (int64_t row = first_row; row < last_row; ++row) {
    float* q = args.qkv + row * args.qkv_stride;
    const float* k = q + args.num_heads * head_dim;
    const float* v = k + args.num_kv_heads * head_dim;
    const float* cos = args.cos + static_cast<int64_t>(args.rope_rows[row]) * half;
    const float* sin = args.sin + static_cast<int64_t>(args.rope_rows[row]) * half;
    for (int head = 0; head < args.num_heads; ++head, q += head_dim) {
      if (args.q_norm != nullptr) normalize(q, args.q_norm, head_dim, args.norm_eps, {q}, 0);
      rotate(q, cos, sin, half);
    }
    const int64_t slot = args.slot_mapping[row];
    if (slot < 0) continue;
    for (int head = 0; head < args.num_kv_heads; ++head, k += head_dim, v += head_dim) {
      float key[kMaxHeadDim];
      if (args.k_norm != nullptr) {
        normalize(k, args.k_norm, head_dim, args.norm_eps, {key}, 0);
      } else {
        std::memcpy(key, k, static_cast<size_t>(head_dim) * sizeof(float));
      }
      rotate(key, cos, sin, half);
      if (args.kv_type == KvType::float16) {
        write_cache<Half>(args, slot, head, key, v);
      } else {
        write_cache<float>(args, slot, head, key, v);
      }
    }
  }
}

inline void silu_and_mul(const SiluArgs& args, int64_t first_row, int64_t last_row) {
  for (int64_t row = first_row; row < last_row; ++row) {
    const float* gate = args.x + row * args.x_stride;
    const float* up = gate + args.dim;
    write_row(args.out, row, 0, args.dim, [&](int64_t i, int count) {
      const Vec16 g = load_lanes(gate + i, count);
      const Vec16 silu = g / (splat(1.0f) + exp(splat(0.0f) - g));
      return silu * load_lanes(up + i, count);
    });
  }
}

}  // namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE
