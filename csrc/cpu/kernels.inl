// All kernels, compiled once per instruction set. Nothing here may call an inline function of the
// standard library that the linker could share with other translation units: its copy from the AVX-512
// unit would then run on CPUs without AVX-512.
#pragma once

#include "kernels.hpp"
#include "simd.hpp"

#include "activations.inl"
#include "attention.inl"
#include "elementwise.inl"
#include "experts.inl"
#include "kv_cache.inl"
#include "lora.inl"
#include "matmul.inl"
#include "quantize_weights.inl"
#include "quantized.inl"
#include "rows.inl"
#include "sampling.inl"

namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE {

constexpr Kernels make_kernels(const char* name) {
  return Kernels{
      .name = name,
      .rms_norm = rms_norm,
      .layer_norm = layer_norm,
      .add_rows = add_rows,
      .scale = scale,
      .soft_cap = soft_cap,
      .sigmoid_scale = sigmoid_scale,
      .quantize_rows = quantize_rows,
      .quantize_q8_0 = quantize_q8_0,
      .quantize_q4_1 = quantize_q4_1,
      .floats = {{linear<float>, unpack_column<float>},
                 {linear<Half>, unpack_column<Half>},
                 {linear<BFloat16>, unpack_column<BFloat16>},
                 {linear<Float8E4M3>, unpack_column<Float8E4M3>}},
      .quantized = make_quantized_kernels(),
      .lora = {{lora_shrink<float>, lora_expand<float>}, {lora_shrink<BFloat16>, lora_expand<BFloat16>}},
      .dequantize_row = dequantize_row,
      .rotary_and_cache = rotary_and_cache,
      .activate = activate,
      .gate_and_mul = gate_and_mul,
      .add_weighted_rows = add_weighted_rows,
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
