// What one output row adds to its logits and forbids among them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace streamllm::cpu {

// streamllm/ops/step_inputs.py fills these as ROW_EDITS. Ids outside the vocabulary have no effect.
struct RowEdits {
  const int32_t* bias_ids;
  const float* bias_values;
  const int32_t* seen_ids;       // distinct tokens that the penalties know of
  const int32_t* output_counts;  // how often each of them stands in the output
  const int32_t* banned_ids;
  int64_t num_biases;
  int64_t num_seen;
  int64_t num_banned;
  float repetition_penalty, frequency_penalty, presence_penalty;
};

namespace row_edits {

// Penalties never make a finite logit infinite, nor any temperature what they leave.
constexpr float kLargestLogit = 1e30f;

inline float finite(float value) { return std::clamp(value, -kLargestLogit, kLargestLogit); }

inline void add_biases(const RowEdits& edits, float* logits, int64_t vocab_size) {
  for (int64_t i = 0; i < edits.num_biases; ++i) {
    const int64_t id = edits.bias_ids[i];
    if (id >= 0 && id < vocab_size) logits[id] += edits.bias_values[i];
  }
}

// Repetition (CTRL, Keskar et al. 2019) for all seen tokens; frequency and presence for those of the output.
inline void apply_penalties(const RowEdits& edits, float* logits, int64_t vocab_size) {
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < edits.num_seen; ++i) {
    const int64_t id = edits.seen_ids[i];
    if (id < 0 || id >= vocab_size || logits[id] == kLowest) continue;
    float x = logits[id];
    x = finite(x > 0.0f ? x / edits.repetition_penalty : x * edits.repetition_penalty);
    if (const int32_t count = edits.output_counts[i]; count > 0) {
      x -= edits.frequency_penalty * static_cast<float>(count);
      x -= edits.presence_penalty;
    }
    logits[id] = finite(x);
  }
}

inline void ban(const RowEdits& edits, float* logits, int64_t vocab_size) {
  for (int64_t i = 0; i < edits.num_banned; ++i) {
    const int64_t id = edits.banned_ids[i];
    if (id >= 0 && id < vocab_size) logits[id] = -std::numeric_limits<float>::infinity();
  }
}

}  // namespace row_edits

// Bias, then penalties, then bans, so that nothing undoes a ban.
inline void apply_edits(const RowEdits& edits, float* logits, int64_t vocab_size) {
  row_edits::add_biases(edits, logits, vocab_size);
  row_edits::apply_penalties(edits, logits, vocab_size);
  row_edits::ban(edits, logits, vocab_size);
}

}  // namespace streamllm::cpu
