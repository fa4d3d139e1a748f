// The sum of a mixture of experts.
#pragma once

#include "kernels.hpp"
#include "rows.inl"
#include "simd.hpp"

namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE {

inline void add_weighted_rows(const WeightedRowsArgs& args, int64_t first_row, int64_t last_row) {
  for (int64_t row = first_row; row < last_row; ++row) {
    const Vec16 weight = splat(args.weights[row]);
    const float* x = args.x + row * args.x_stride;
    float* out = args.out + args.targets[row] * args.out_stride;
    for_each_vector(args.dim, [&](int64_t i, int count) {
      store_lanes(out + i, fma(weight, load_lanes(x + i, count), load_lanes(out + i, count)), count);
    });
  }
}

}  // namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE
