// One thread's memory for sampling a row, and what is done with the candidates that are collected in it.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>
#include <vector>

#include "kernels.hpp"

namespace streamllm::cpu {

struct Candidate {
  float value;
  int32_t id;
};

// Larger values first, equal ones by id.
inline bool before(const Candidate& a, const Candidate& b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}

// The last of the shortest prefix of [begin, end), in the order of before(), whose sum, added to `sum`,
// reaches `target`; at least the first. Reorders them.
inline Candidate end_of_prefix(Candidate* begin, Candidate* end, double sum, double target) {
  // Halve by selection until what is left is cheap to sort.
  while (end - begin > 64) {
    Candidate* middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end, before);
    double upper = sum;
    for (const Candidate* c = begin; c < middle; ++c) upper += c->value;
    if (upper >= target) {
      end = middle;
    } else {
      begin = middle;
      sum = upper;
    }
  }
  std::sort(begin, end, before);
  const Candidate* last = begin;
  for (; last + 1 < end; ++last) {
    sum += last->value;
    if (sum >= target) break;
  }
  return *last;
}

// Weights are those of the row's tokens; candidates are in values[0..count) and ids[0..count), in id order.
struct SampleScratch {
  explicit SampleScratch(int64_t vocab_size)
      : logits(vocab_size),
        weights(vocab_size),
        values(vocab_size),
        ids(vocab_size),
        selection(vocab_size),
        block_sums((vocab_size + kSampleBlock - 1) / kSampleBlock),
        block_maxima(block_sums.size()),
        sorted_maxima(block_sums.size()) {}

  std::vector<float> logits;  // of a row whose logits are not taken as they came
  std::vector<float> weights;
  std::vector<float> values;
  std::vector<int32_t> ids;
  std::vector<Candidate> selection;
  std::vector<double> block_sums;
  std::vector<float> block_maxima;
  std::vector<float> sorted_maxima;

  // At least `count` elements reach the count-th largest of the block maxima.
  float lower_bound_of_largest(int64_t count, float otherwise) {
    const auto num_blocks = static_cast<int64_t>(block_maxima.size());
    if (count > num_blocks) return otherwise;
    std::copy(block_maxima.begin(), block_maxima.end(), sorted_maxima.begin());
    const auto nth = sorted_maxima.begin() + (count - 1);
    std::nth_element(sorted_maxima.begin(), nth, sorted_maxima.end(), std::greater<>());
    return *nth;
  }

  int64_t collect(const float* x, float threshold) {
    return kernels().collect(x, static_cast<int64_t>(weights.size()), block_maxima.data(), threshold,
                             values.data(), ids.data());
  }

  void select_from(int64_t count) {
    for (int64_t i = 0; i < count; ++i) selection[i] = {values[i], ids[i]};
  }

  double sum_of_blocks() const {
    double total = 0.0;
    for (const double sum : block_sums) total += sum;
    return total;
  }

  double sum_of_candidates(int64_t count) const {
    double total = 0.0;
    for (int64_t i = 0; i < count; ++i) total += values[i];
    return total;
  }

  // Keeps the candidates up to `last` in the order of before().
  int64_t keep(int64_t count, const Candidate& last) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (before(last, {values[i], ids[i]})) continue;
      values[kept] = values[i];
      ids[kept++] = ids[i];
    }
    return kept;
  }

  // Keeps the shortest prefix, in the order of before(), whose sum reaches `target`; at least one candidate.
  int64_t keep_top_p(int64_t count, double target) {
    double sum = 0.0;  // of all candidates before the selected ones
    const int64_t selected = select_bucket_of_prefix_end(count, target, sum);
    return keep(count, end_of_prefix(selection.data(), selection.data() + selected, sum, target));
  }

 private:
  // Weights of (0, 1] in falling order: 16 buckets for each power of two, the last one for all that are
  // smaller.
  static constexpr int kNumBuckets = 512;

  static int bucket_of(float weight) {
    const uint32_t distance = std::bit_cast<uint32_t>(1.0f) - std::bit_cast<uint32_t>(weight);
    return static_cast<int>(std::min<uint32_t>(distance >> 19, kNumBuckets - 1));
  }

  // Selects the candidates of the bucket of similar weights in which a prefix in falling order reaches
  // `target`; returns their number, and in `sum` the sum of all larger ones.
  int64_t select_bucket_of_prefix_end(int64_t count, double target, double& sum) {
    double bucket_sums[kNumBuckets] = {};
    for (int64_t i = 0; i < count; ++i) bucket_sums[bucket_of(values[i])] += values[i];
    int last = kNumBuckets - 1;
    while (last > 0 && bucket_sums[last] == 0.0) --last;
    int bucket = 0;
    while (bucket < last && sum + bucket_sums[bucket] < target) sum += bucket_sums[bucket++];
    int64_t selected = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (bucket_of(values[i]) == bucket) selection[selected++] = {values[i], ids[i]};
    }
    return selected;
  }
};

}  // namespace streamllm::cpu
