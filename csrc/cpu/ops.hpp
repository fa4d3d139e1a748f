// The operations that a plan can record. Each factory checks its arguments once (std::invalid_argument) and
// keeps the addresses; the memory must outlive the plan's runs.
#pragma once

#include <memory>

#include "kernels.hpp"
#include "packed_matrix.hpp"
#include "plan.hpp"

namespace streamllm::cpu {

using MatrixPtr = std::shared_ptr<const PackedMatrix>;

// Rows of logits to tokens. Arrays have one entry per output row.
struct SampleArgs {
  const float* logits;
  int64_t logits_stride;
  int64_t vocab_size;
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const uint64_t* seed;
  const int32_t* choice;
  const int32_t* position;
  const int32_t* num_logprobs;  // -1: none, and logprob and rank are not written
  int32_t* token;               // -1: the row holds NaN, +inf or nothing but -inf
  float* logprob;
  int32_t* rank;
  int32_t* top_ids;     // [outputs][max_logprobs]
  float* top_logprobs;  // [outputs][max_logprobs]
  int64_t max_logprobs;
};

// The panels, n and k of the args are filled in from `weight`.
std::unique_ptr<Op> make_embedding(EmbeddingArgs args, MatrixPtr weight);
std::unique_ptr<Op> make_linear(LinearArgs args, MatrixPtr weight, bool on_outputs);
std::unique_ptr<Op> make_rms_norm(const RmsNormArgs& args);
std::unique_ptr<Op> make_rotary_and_cache(const RotaryArgs& args);
std::unique_ptr<Op> make_paged_attention(const AttentionArgs& args, int num_threads);
std::unique_ptr<Op> make_silu_and_mul(const SiluArgs& args);
std::unique_ptr<Op> make_gather_rows(const float* x, int64_t x_stride, const int32_t* indices, int64_t dim,
                                     float* out, int64_t out_stride);
std::unique_ptr<Op> make_sample(const SampleArgs& args, int num_threads);

KvType kv_type_from_name(const char* name);

}  // namespace streamllm::cpu
