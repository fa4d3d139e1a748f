// The edits of one output row's logits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "../sampling_records.hpp"

namespace streamllm::cpu {

namespace row_edits {

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
