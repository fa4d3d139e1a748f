// What Python (streamllm/ops/step_inputs.py), the CPU's sampler and the GPU's agree on.
#pragma once

#include <cstdint>

namespace streamllm {

// Which values a row's logprobs come from, and whether they are normalised.
enum class LogprobsMode : int32_t { raw_logprobs = 0, processed_logprobs, raw_logits, processed_logits };

// Tokens of rows that have none.
inline constexpr int32_t kNotFinite = -1;       // the row's logits hold NaN, +inf or nothing but -inf
inline constexpr int32_t kNothingAllowed = -2;  // every token is forbidden

inline constexpr float kGreedyTemperature = 1e-5f;

// Penalties never make a finite logit infinite, nor any temperature what they leave.
inline constexpr float kLargestLogit = 1e30f;

// What one output row adds to its logits and forbids among them: ROW_EDITS, with addresses of the memory that
// the sampler reads. Ids outside the vocabulary have no effect; bias_ids are distinct, and so are seen_ids.
struct RowEdits {
  const int32_t* bias_ids;
  const float* bias_values;
  const int32_t* seen_ids;       // tokens that the penalties know of
  const int32_t* output_counts;  // how often each of them stands in the output
  const int32_t* banned_ids;
  int64_t num_biases;
  int64_t num_seen;
  int64_t num_banned;
  float repetition_penalty, frequency_penalty, presence_penalty;
};

}  // namespace streamllm
