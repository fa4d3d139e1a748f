// All kernels, compiled once per instruction set. Nothing here may call an inline function of the
// standard library that the linker could share with other translation units: its copy from the AVX-512
// unit would then run on CPUs without AVX-512.
#pragma once

#include "kernels.hpp"
#include "simd.hpp"

#include "attention.inl"
#include "elementwise.inl"
#include "matmul.inl"
#include "quantized.inl"
#include "rows.inl"
#include "sampling.inl"

namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE {

constexpr Kernels make_kernels(const char* name) {
  return Kernels{
      .name = name,
      .rms_norm = rms_norm,
      .quantize_rows = quantize_rows,
      .weights = {{linear<float>, unpack_column<float>},
                  {linear<Half>, unpack_column<Half>},
                  {linear<BFloat16>, unpack_column<BFloat16>},
                  {linear_quantized<Q4_0>, unpack_quantized_column<Q4_0>},
                  {linear_quantized<Q4_1>, unpack_quantized_column<Q4_1>},
                  {linear_quantized<Q8_0>, unpack_quantized_column<Q8_0>}},
      .rotary_and_cache = rotary_and_cache,
      .silu_and_mul = silu_and_mul,
      .paged_attention = paged_attention,
      .merge_attention = merge_attention,
      .row_maximum = row_maximum,
      .block_maxima = block_maxima,
      .softmax_weights = softmax_weights,
      .collect = collect,
      .count_greater = count_greater,
      .collect_between = collect_between,
      .block_sums_at_least = block_sums_at_least,
      .sums_at_least = sums_at_least,
      .masked_copy = masked_copy,
  };
}

}  // namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE
