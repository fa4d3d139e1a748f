// Activations, alone and joined with a second factor as gated MLPs do.
#pragma once

#include "kernels.hpp"
#include "rows.inl"
#include "simd.hpp"

namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE {

// x * sigmoid(y)
inline Vec16 times_sigmoid(Vec16 x, Vec16 y) { return x / (splat(1.0f) + exp(splat(0.0f) - y)); }

// The standard normal distribution function, (1 + erf(x / sqrt(2))) / 2, within 1e-7; for x > -3 within 6e-7
// of its value too. With z = |x| it is exp(q(z) - z * z / 2) below 0, where q varies slowly:
//   q(z) = ln(erfc(z / sqrt(2)) / 2) + z * z / 2,
// a minimax polynomial on [0, 5.5]. Beyond, what is left of the distribution is below 2e-8.
inline Vec16 normal_distribution(Vec16 x) {
  const Vec16 z = max(splat(0.0f) - x, x);
  const Vec16 near = min(splat(5.5f), z);
  Vec16 q = splat(-1.68181433e-8f);
  q = fma(q, near, splat(5.04368131e-7f));
  q = fma(q, near, splat(-6.52196695e-6f));
  q = fma(q, near, splat(4.60859446e-5f));
  q = fma(q, near, splat(-1.67901366e-4f));
  q = fma(q, near, splat(-5.83867368e-5f));
  q = fma(q, near, splat(4.89242142e-3f));
  q = fma(q, near, splat(-3.64060141e-2f));
  q = fma(q, near, splat(1.81712613e-1f));
  q = fma(q, near, splat(-7.97887325e-1f));
  q = fma(q, near, splat(-6.93147123e-1f));
  const Vec16 tail = exp(fma(z * splat(-0.5f), z, q));
  return select(less(x, splat(0.0f)), tail, splat(1.0f) - tail);
}

inline Vec16 silu(Vec16 x) { return times_sigmoid(x, x); }

inline Vec16 gelu(Vec16 x) { return x * normal_distribution(x); }

// x / 2 * (1 + tanh(y)) with y = sqrt(2 / pi) * (x + 0.044715 x^3), as x * sigmoid(2 y): nothing cancels.
inline Vec16 gelu_tanh(Vec16 x) {
  const Vec16 cubic = fma(x * x, splat(0.044715f), splat(1.0f));
  return times_sigmoid(x, splat(1.5957691216f) * x * cubic);
}

// Of a NaN and a number, max and min return the second operand.
inline Vec16 relu(Vec16 x) { return max(splat(0.0f), x); }

// Calls function(activation), a type of its own for each, so that loops know theirs.
template <typename Function>
inline void with_activation(Activation activation, Function function) {
  switch (activation) {
    case Activation::silu:
      return function([](Vec16 x) { return silu(x); });
    case Activation::gelu:
      return function([](Vec16 x) { return gelu(x); });
    case Activation::gelu_tanh:
      return function([](Vec16 x) { return gelu_tanh(x); });
    case Activation::relu:
      return function([](Vec16 x) { return relu(x); });
  }
}

inline void activate(const ActivationArgs& args, int64_t first_row, int64_t last_row) {
  with_activation(args.activation, [&](auto activation) {
    for (int64_t row = first_row; row < last_row; ++row) {
      const float* x = args.x + row * args.x_stride;
      write_row(args.out, row, 0, args.dim,
                [&](int64_t i, int count) { return activation(load_lanes(x + i, count)); });
    }
  });
}

// out = join(gate, up) for rows [gate | up].
template <typename Join>
inline void join_halves(const GateArgs& args, int64_t first_row, int64_t last_row, Join join) {
  for (int64_t row = first_row; row < last_row; ++row) {
    const float* gate = args.x + row * args.x_stride;
    const float* up = gate + args.dim;
    write_row(args.out, row, 0, args.dim, [&](int64_t i, int count) {
      return join(load_lanes(gate + i, count), load_lanes(up + i, count));
    });
  }
}

inline void gate_and_mul(const GateArgs& args, int64_t first_row, int64_t last_row) {
  if (args.limit > 0.0f) {
    const Vec16 limit = splat(args.limit), minus_limit = splat(-args.limit);
    join_halves(args, first_row, last_row, [&](Vec16 gate, Vec16 up) {
      gate = min(limit, gate);
      up = max(minus_limit, min(limit, up));
      return times_sigmoid(gate, splat(1.702f) * gate) * (up + splat(1.0f));
    });
  } else {
    with_activation(args.activation, [&](auto activation) {
      join_halves(args, first_row, last_row, [&](Vec16 gate, Vec16 up) { return activation(gate) * up; });
    });
  }
}

}  // namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE
