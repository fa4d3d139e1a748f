// Norms, sums and factors of rows, rotary embedding with the cache write.
#pragma once

#include "kernels.hpp"
#include "kv_cache.inl"
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

inline void apply_norm(const float* x, float factor, const float* weight, int64_t dim, const OutputRows& out,
                       int64_t row) {
  const Vec16 factors = splat(factor);
  write_row(out, row, 0, dim, [&](int64_t i, int count) {
    return load_lanes(x + i, count) * factors * load_lanes(weight + i, count);
  });
}

inline void normalize(const float* x, const float* weight, int64_t dim, float eps, const OutputRows& out,
                      int64_t row) {
  apply_norm(x, inverse_rms(x, dim, eps), weight, dim, out, row);
}

// sum += x
inline void add_row(const float* x, int64_t dim, float* sum) {
  for_each_vector(dim, [&](int64_t i, int count) {
    store_lanes(sum + i, load_lanes(sum + i, count) + load_lanes(x + i, count), count);
  });
}

// What the norm of a row reads: x, or the residual once x has been added to it.
inline const float* norm_input(const NormArgs& args, int64_t row) {
  const float* x = args.x + row * args.x_stride;
  if (args.residual == nullptr) return x;
  float* residual = args.residual + row * args.residual_stride;
  add_row(x, args.dim, residual);
  return residual;
}

inline void rms_norm(const NormArgs& args, int64_t first_row, int64_t last_row) {
  for (int64_t row = first_row; row < last_row; ++row) {
    normalize(norm_input(args, row), args.weight, args.dim, args.eps, args.out, row);
  }
}

inline void layer_norm(const NormArgs& args, int64_t first_row, int64_t last_row) {
  const float dim = static_cast<float>(args.dim);
  for (int64_t row = first_row; row < last_row; ++row) {
    const float* x = norm_input(args, row);
    Vec16 sum = splat(0.0f), squares = splat(0.0f);
    for_each_vector(args.dim, [&](int64_t i, int count) { sum = sum + load_lanes(x + i, count); });
    const Vec16 mean = splat(sum_lanes(sum) / dim);
    for_each_vector(args.dim, [&](int64_t i, int count) {
      const Vec16 difference = load_lanes(x + i, count) - mean;
      const Vec16 counted =
          count == 16 ? difference : select(lanes_between(0, count), difference, splat(0.0f));
      squares = fma(counted, counted, squares);
    });
    const Vec16 factor = splat(1.0f / __builtin_sqrtf(sum_lanes(squares) / dim + args.eps));
    write_row(args.out, row, 0, args.dim, [&](int64_t i, int count) {
      return fma((load_lanes(x + i, count) - mean) * factor, load_lanes(args.weight + i, count),
                 load_lanes(args.bias + i, count));
    });
  }
}

inline void add_rows(const AddArgs& args, int64_t first_row, int64_t last_row) {
  for (int64_t row = first_row; row < last_row; ++row) {
    add_row(args.x + row * args.x_stride, args.dim, args.sum + row * args.sum_stride);
  }
}

// Rewrites a row in place.
template <typename Function>
inline void transform_row(float* x, int64_t dim, Function function) {
  for_each_vector(
      dim, [&](int64_t i, int count) { store_lanes(x + i, function(load_lanes(x + i, count)), count); });
}

inline void scale(const InPlaceArgs& args, int64_t first_row, int64_t last_row) {
  const Vec16 factor = splat(args.constant);
  for (int64_t row = first_row; row < last_row; ++row) {
    transform_row(args.x + row * args.x_stride, args.dim, [&](Vec16 x) { return x * factor; });
  }
}

inline void soft_cap(const InPlaceArgs& args, int64_t first_row, int64_t last_row) {
  const Vec16 cap = splat(args.constant);
  for (int64_t row = first_row; row < last_row; ++row) {
    transform_row(args.x + row * args.x_stride, args.dim, [&](Vec16 x) { return cap * tanh(x / cap); });
  }
}

inline void sigmoid_scale(const SigmoidScaleArgs& args, int64_t first_row, int64_t last_row) {
  for (int64_t row = first_row; row < last_row; ++row) {
    const float gate = args.gate[row * args.gate_stride];
    const Vec16 factor = splat(1.0f / (1.0f + exp_scalar(-gate)));
    transform_row(args.x + row * args.x_stride, args.dim, [&](Vec16 x) { return x * factor; });
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

inline void rotary_and_cache(const RotaryArgs& args, int64_t first_row, int64_t last_row) {
  const int half = args.rotary_dim / 2;
  const int64_t head_dim = args.head_dim;
  for (int64_t row = first_row; row < last_row; ++row) {
    float* q = args.qkv + row * args.qkv_stride;
    const float* k = q + args.num_heads * head_dim;
    const float* v = k + args.num_kv_heads * head_dim;
    const float *cos = nullptr, *sin = nullptr;
    if (half > 0) {
      cos = args.cos + static_cast<int64_t>(args.rope_rows[row]) * half;
      sin = args.sin + static_cast<int64_t>(args.rope_rows[row]) * half;
    }
    if (args.q_norm.weight != nullptr) {
      const int64_t dim = args.q_norm.dim;
      for (float* x = q; x < k; x += dim) normalize(x, args.q_norm.weight, dim, args.norm_eps, {x}, 0);
    }
    for (int head = 0; head < args.num_heads; ++head, q += head_dim) rotate(q, cos, sin, half);
    const int64_t slot = args.slot_mapping[row];
    if (slot < 0) continue;
    float factor = 1.0f;
    for (int head = 0; head < args.num_kv_heads; ++head, k += head_dim, v += head_dim) {
      float key[kMaxHeadDim];
      if (args.k_norm.weight != nullptr) {
        const int64_t place = head * head_dim % args.k_norm.dim;
        if (place == 0) factor = inverse_rms(k, args.k_norm.dim, args.norm_eps);
        apply_norm(k, factor, args.k_norm.weight + place, head_dim, {key}, 0);
      } else {
        std::memcpy(key, k, static_cast<size_t>(head_dim) * sizeof(float));
      }
      rotate(key, cos, sin, half);
      write_cache(args, slot, head, key, v);
    }
  }
}

}  // namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE
