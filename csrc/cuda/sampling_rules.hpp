// Replacement, masks, bias, penalties and bans of one row of logits (steps 1 to 4 of
// streamllm/runner/sampler.py), by all threads of a block.
#pragma once

#include <cstdint>

#include "../sampling_records.hpp"
#include "launch.hpp"
#include "sampling_search.hpp"

namespace streamllm::cuda::sampling {

inline constexpr float kLowest = -INFINITY;

// NaN stays NaN.
__device__ __forceinline__ float finite(float value) {
  return value > kLargestLogit ? kLargestLogit : value < -kLargestLogit ? -kLargestLogit : value;
}

// Repetition penalty (CTRL, Keskar et al. 2019) for all seen tokens; frequency and presence for those of the
// output.
__device__ __forceinline__ float penalised(float logit, const RowEdits& edits, int32_t output_count) {
  if (logit == kLowest) return logit;
  float x = finite(logit > 0.0f ? logit / edits.repetition_penalty : logit * edits.repetition_penalty);
  if (output_count > 0) {
    // The product rounded by itself, as the definition has it: fmaf() keeps the compiler from fusing it.
    x -= fmaf(edits.frequency_penalty, static_cast<float>(output_count), 0.0f);
    x -= edits.presence_penalty;
  }
  return finite(x);
}

// for_id(id, i) for those of `ids` that are in the vocabulary; done for all threads when it returns.
template <typename ForId>
__device__ __forceinline__ void for_each_id(const int32_t* ids, int64_t count, int vocab_size, ForId for_id) {
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    if (ids[i] >= 0 && ids[i] < vocab_size) for_id(ids[i], i);
  }
  __syncthreads();
}

// Bias, then penalties, then bans, so that nothing undoes a ban.
__device__ __forceinline__ void apply_edits(const RowEdits& edits, float* logits, int vocab_size) {
  for_each_id(edits.bias_ids, edits.num_biases, vocab_size,
              [&](int id, int64_t i) { logits[id] += edits.bias_values[i]; });
  for_each_id(edits.seen_ids, edits.num_seen, vocab_size,
              [&](int id, int64_t i) { logits[id] = penalised(logits[id], edits, edits.output_counts[i]); });
  for_each_id(edits.banned_ids, edits.num_banned, vocab_size, [&](int id, int64_t) { logits[id] = kLowest; });
}

// The row after replacement, masks and edits: as it is, or a copy in `scratch` if it must change. Masks: bit
// id % 32 of word id / 32; those that are null allow everything. What they forbid stays -inf whatever is
// added to it.
__device__ __forceinline__ const float* processed_logits(const float* raw, int vocab_size,
                                                         const float* replacement, const uint32_t* first_mask,
                                                         const uint32_t* second_mask, const RowEdits* edits,
                                                         float* scratch) {
  const float* logits = replacement != nullptr ? replacement : raw;
  if (first_mask == nullptr && second_mask == nullptr && edits == nullptr) return logits;
  for_each(logits, vocab_size, [&](int id, float logit) {
    uint32_t allowed = 0xffffffffu;
    if (first_mask != nullptr) allowed &= first_mask[id / 32];
    if (second_mask != nullptr) allowed &= second_mask[id / 32];
    scratch[id] = allowed >> (id % 32) & 1u ? logit : kLowest;
  });
  __syncthreads();
  if (edits != nullptr) apply_edits(*edits, scratch, vocab_size);
  return scratch;
}

}  // namespace streamllm::cuda::sampling
