#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "checks.hpp"
#include "ops.hpp"
#include "philox.hpp"
#include "row_edits.hpp"
#include "sample_scratch.hpp"

namespace streamllm::cpu {

namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

template <typename T>
const T* at_address(int64_t address) {
  return reinterpret_cast<const T*>(static_cast<uintptr_t>(address));
}

// One uniform number in [0, 1) for a token, from the request's seed and the token's place in it.
double uniform(uint64_t seed, int32_t choice, int32_t position) {
  const auto words = philox4x32({static_cast<uint32_t>(position), static_cast<uint32_t>(choice), 0, 0},
                                {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return (words[0] >> 8) * 0x1p-24;
}

class SampleOp final : public Op {
 public:
  SampleOp(const SampleArgs& args, int num_threads)
      : args_(args), scratch_(static_cast<size_t>(num_threads), SampleScratch(args.vocab_size)) {}

  int64_t prepare(const RunSizes& sizes, int) override {
    for (int64_t row = 0; row < sizes.outputs; ++row) {
      if (args_.num_logprobs[row] > args_.max_logprobs) {
        throw std::invalid_argument(
            "num_logprobs must be at most max_logprobs = " + std::to_string(args_.max_logprobs) + ", not " +
            std::to_string(args_.num_logprobs[row]));
      }
    }
    return sizes.outputs;
  }

  void run_tile(int64_t row, int thread) noexcept override {
    const float* raw = args_.logits + row * args_.logits_stride;
    SampleScratch& scratch = scratch_[static_cast<size_t>(thread)];
    const RowMaximum raw_maximum = kernels().row_maximum(raw, args_.vocab_size);
    if (!raw_maximum.valid) {
      args_.token[row] = kNotFinite;
      return;
    }
    if (args_.target[row] >= 0) {
      args_.token[row] = args_.target[row];
      write_logprobs(row, raw, raw_maximum.value, true, scratch);
      return;
    }
    const float* logits = processed_logits(row, raw, scratch);
    const RowMaximum maximum =
        logits == raw ? raw_maximum : kernels().row_maximum(logits, args_.vocab_size);
    if (!maximum.valid) {
      args_.token[row] = maximum.value == kLowest ? kNothingAllowed : kNotFinite;
      return;
    }
    const bool greedy = args_.temperature[row] < kGreedyTemperature;
    const Drawn drawn = greedy ? Drawn{maximum.index} : draw(row, logits, maximum.value, scratch);
    args_.token[row] = drawn.token;
    if (drawn.token < 0 || args_.num_logprobs[row] < 0) return;
    if (is_raw(row)) {
      write_logprobs(row, raw, raw_maximum.value, is_normalised(row), scratch);
    } else {
      const float temperature = greedy ? 1.0f : args_.temperature[row];
      const float* kept = kept_logits(logits, drawn, temperature, scratch);
      write_logprobs(row, kept, maximum.value / temperature, is_normalised(row), scratch);
    }
  }

 private:
  static constexpr int64_t kAll = -1;
  static constexpr Candidate kEverything{kLowest, std::numeric_limits<int32_t>::max()};

  // What could have been drawn: the scratch's first num_candidates candidates; or, if that is kAll, those
  // tokens of the row that do not come after `last` in the order of before().
  struct Drawn {
    int32_t token;
    int64_t num_candidates = kAll;
    Candidate last = kEverything;
  };

  bool is_raw(int64_t row) const {
    const auto mode = static_cast<LogprobsMode>(args_.logprobs_mode[row]);
    return mode == LogprobsMode::raw_logprobs || mode == LogprobsMode::raw_logits;
  }

  bool is_normalised(int64_t row) const {
    const auto mode = static_cast<LogprobsMode>(args_.logprobs_mode[row]);
    return mode == LogprobsMode::raw_logprobs || mode == LogprobsMode::processed_logprobs;
  }

  // The row's logits after replacement, bias, penalties and bans: a copy, unless there is none of these.
  const float* processed_logits(int64_t row, const float* raw, SampleScratch& scratch) const {
    const auto* replacement = at_address<float>(args_.replacement[row]);
    const auto* first_mask = at_address<uint32_t>(args_.allowed_mask[row]);
    const auto* second_mask = at_address<uint32_t>(args_.grammar_mask[row]);
    const auto* edits = at_address<RowEdits>(args_.edits[row]);
    const float* logits = replacement != nullptr ? replacement : raw;
    if (first_mask == nullptr) std::swap(first_mask, second_mask);
    if (first_mask == nullptr && edits == nullptr) return logits;
    if (first_mask != nullptr) {
      kernels().masked_copy(logits, args_.vocab_size, first_mask, second_mask, scratch.logits.data());
    } else {
      std::copy_n(logits, args_.vocab_size, scratch.logits.data());
    }
    // What a mask forbids stays -inf whatever is added to it.
    if (edits != nullptr) apply_edits(*edits, scratch.logits.data(), args_.vocab_size);
    return scratch.logits.data();
  }

  // Logits over the temperature of those tokens that could have been drawn, -inf for all others.
  const float* kept_logits(const float* logits, const Drawn& drawn, float temperature,
                           SampleScratch& scratch) const {
    if (drawn.num_candidates == kAll) {
      const bool everything = drawn.last.value == kEverything.value;  // a greedy row has no weights
      for (int32_t id = 0; id < args_.vocab_size; ++id) {
        const bool kept = everything || !before(drawn.last, {scratch.weights[id], id});
        scratch.logits[id] = kept ? logits[id] / temperature : kLowest;
      }
      return scratch.logits.data();
    }
    for (int64_t i = 0; i < drawn.num_candidates; ++i) {
      scratch.values[i] = logits[scratch.ids[i]] / temperature;
    }
    std::fill(scratch.logits.begin(), scratch.logits.end(), kLowest);
    for (int64_t i = 0; i < drawn.num_candidates; ++i) scratch.logits[scratch.ids[i]] = scratch.values[i];
    return scratch.logits.data();
  }

  Drawn draw(int64_t row, const float* logits, float maximum, SampleScratch& scratch) const {
    kernels().softmax_weights(logits, args_.vocab_size, maximum, args_.temperature[row],
                              scratch.weights.data(), scratch.block_sums.data(), scratch.block_maxima.data());
    const double u = uniform(args_.seed[row], args_.choice[row], args_.position[row]);
    const float min_p = std::min(args_.min_p[row], 1.0f), top_p = args_.top_p[row];
    int64_t top_k = args_.top_k[row];
    if (top_k >= args_.vocab_size) top_k = 0;
    if (top_k > 0) {
      int64_t count = collect_top_k(top_k, std::max(min_p, 0.0f), scratch);
      if (top_p < 1.0f) count = scratch.keep_top_p(count, top_p * scratch.sum_of_candidates(count));
      return {draw_from_candidates(count, u, scratch), count};
    }
    Candidate last = kEverything;
    if (min_p > 0.0f) {
      last.value = min_p;
      kernels().block_sums_at_least(scratch.weights.data(), args_.vocab_size, min_p,
                                    scratch.block_sums.data());
    }
    if (top_p < 1.0f) {
      const double total = scratch.sum_of_blocks();
      const int64_t count = min_p > 0.0f ? kTooMany : collect_few_of_top_p(top_p * total, scratch);
      if (count != kTooMany) {
        const int64_t kept = scratch.keep_top_p(count, top_p * total);
        return {draw_from_candidates(kept, u, scratch), kept};
      }
      last = find_end_of_prefix(top_p, total, std::max(min_p, std::numeric_limits<float>::min()), scratch);
    }
    return {draw_from_blocks(last, u, scratch), kAll, last};
  }

  // Of the positive weights >= min_p, those that reach the top_k-th largest, in id order.
  int64_t collect_top_k(int64_t top_k, float min_p, SampleScratch& scratch) const {
    // Weights of 0, perhaps most of a row that is masked, cannot be drawn and need not be looked at.
    const float floor = std::max(min_p, std::numeric_limits<float>::min());
    const bool many = top_k > static_cast<int64_t>(scratch.block_maxima.size());
    const float threshold = many ? lower_bound_by_counting(top_k, floor, scratch)
                                 : std::max(floor, scratch.lower_bound_of_largest(top_k, floor));
    const int64_t count = scratch.collect(scratch.weights.data(), threshold);
    if (count <= top_k) return count;
    scratch.select_from(count);
    const auto nth = scratch.selection.begin() + (top_k - 1);
    std::nth_element(scratch.selection.begin(), nth, scratch.selection.begin() + count, before);
    return scratch.keep(count, {nth->value, std::numeric_limits<int32_t>::max()});
  }

  // A threshold that at least `count` weights reach, and not many more; `floor` if so many do not reach that.
  float lower_bound_by_counting(int64_t count, float floor, const SampleScratch& scratch) const {
    float low = floor, high = 1.0f;
    for (int pass = 0; pass < 16; ++pass) {
      const float middle = std::sqrt(low) * std::sqrt(high);
      const int64_t greater = kernels().count_greater(scratch.weights.data(), args_.vocab_size, middle);
      (greater >= count ? low : high) = middle;
      if (greater >= count && greater <= 2 * count) break;
    }
    return low;
  }

  static constexpr int64_t kTooMany = -1;

  // The largest weights of the whole row, in id order: enough of them that their sum reaches `target`;
  // kTooMany where they would be a large part of the row.
  int64_t collect_few_of_top_p(double target, SampleScratch& scratch) const {
    const auto& maxima = scratch.block_maxima;
    for (float threshold = 0x1p-4f; threshold > 0x1p-60f; threshold *= 0x1p-4f) {
      const auto reached =
          std::count_if(maxima.begin(), maxima.end(), [&](float maximum) { return maximum >= threshold; });
      if (reached * 10 > static_cast<int64_t>(maxima.size()) * 9 && maxima.size() > 16) return kTooMany;
      const int64_t count = scratch.collect(scratch.weights.data(), threshold);
      // A margin, because sums of other orders decide what is kept.
      if (scratch.sum_of_candidates(count) * (1.0 - 1e-9) >= target) return count;
    }
    return scratch.collect(scratch.weights.data(), std::numeric_limits<float>::min());
  }

  // The last token of the shortest prefix, in the order of before(), whose weights reach top_p of `total`,
  // the sum of all weights >= floor. Narrows down the weight of that token, without sorting; leaves the
  // blocks' sums of the prefix in the scratch.
  Candidate find_end_of_prefix(float top_p, double total, float floor, SampleScratch& scratch) const {
    const double target = top_p * total;
    // What lies below the least weight of interest is not more than the rest, if every token had that weight.
    const double least = (1.0 - top_p) * total / static_cast<double>(args_.vocab_size) * (1.0 - 1e-6);
    float low = std::max(floor, static_cast<float>(least)), high = 2.0f;
    for (int pass = 0; pass < 4 && high > 1.2f * low; ++pass) {  // few tokens have weights closer together
      float thresholds[kSumThresholds];
      double sums[kSumThresholds];
      const float ratio = std::pow(low / high, 1.0f / (kSumThresholds + 1));
      thresholds[0] = high * ratio;
      for (int t = 1; t < kSumThresholds; ++t) thresholds[t] = thresholds[t - 1] * ratio;
      kernels().sums_at_least(scratch.weights.data(), args_.vocab_size, thresholds, sums);
      // The margins are wider than what these sums are off.
      for (int t = kSumThresholds - 1; t >= 0 && sums[t] > target * (1.0 + 1e-4); --t) low = thresholds[t];
      for (int t = 0; t < kSumThresholds && sums[t] < target * (1.0 - 1e-4); ++t) high = thresholds[t];
    }
    kernels().block_sums_at_least(scratch.weights.data(), args_.vocab_size, high, scratch.block_sums.data());
    const double sum = scratch.sum_of_blocks();
    const int64_t count = kernels().collect_between(scratch.weights.data(), args_.vocab_size, low, high,
                                                    scratch.values.data(), scratch.ids.data());
    if (count == 0) return {high, std::numeric_limits<int32_t>::max()};
    scratch.select_from(count);
    Candidate* selection = scratch.selection.data();
    const Candidate last = end_of_prefix(selection, selection + count, sum, target);
    const int64_t kept = scratch.keep(count, last);
    for (int64_t i = 0; i < kept; ++i) scratch.block_sums[scratch.ids[i] / kSampleBlock] += scratch.values[i];
    return last;
  }

  static int32_t draw_from_candidates(int64_t count, double u, const SampleScratch& scratch) {
    if (count == 0) return kNotFinite;  // the row's parameters are NaN
    const double total = scratch.sum_of_candidates(count);
    double sum = 0.0;
    for (int64_t i = 0; i < count; ++i) {
      sum += scratch.values[i];
      if (sum > u * total) return scratch.ids[i];
    }
    return scratch.ids[count - 1];
  }

  // Inverse of the cumulative sum over the tokens up to `last`, which the block sums are made of: first by
  // blocks, then within one.
  int32_t draw_from_blocks(const Candidate& last, double u, const SampleScratch& scratch) const {
    const double target = u * scratch.sum_of_blocks();
    double sum = 0.0;
    size_t block = 0;
    while (block + 1 < scratch.block_sums.size() && sum + scratch.block_sums[block] <= target) {
      sum += scratch.block_sums[block++];
    }
    const int64_t begin = static_cast<int64_t>(block) * kSampleBlock;
    const int64_t end = std::min<int64_t>(begin + kSampleBlock, args_.vocab_size);
    int64_t drawn = begin;
    for (int64_t id = begin; id < end; ++id) {
      const float weight = scratch.weights[id];
      if (weight == 0.0f || before(last, {weight, static_cast<int32_t>(id)})) continue;
      drawn = id;
      sum += weight;
      if (sum > target) break;
    }
    return static_cast<int32_t>(drawn);
  }

  // log(sum(exp(logits - maximum)))
  double log_total(const float* logits, float maximum, SampleScratch& scratch) const {
    kernels().softmax_weights(logits, args_.vocab_size, maximum, 1.0f, scratch.weights.data(),
                              scratch.block_sums.data(), scratch.block_maxima.data());
    return std::log(scratch.sum_of_blocks());
  }

  void write_logprobs(int64_t row, const float* logits, float maximum, bool normalised,
                      SampleScratch& scratch) const {
    const double log_sum = normalised ? log_total(logits, maximum, scratch) : 0.0;
    // Two steps, so that a large maximum does not swallow the sum.
    const double shift = normalised ? maximum : 0.0;
    const auto reported = [&](float logit) { return static_cast<float>((logit - shift) - log_sum); };
    const float sampled = logits[args_.token[row]];
    args_.logprob[row] = reported(sampled);
    args_.rank[row] = static_cast<int32_t>(1 + kernels().count_greater(logits, args_.vocab_size, sampled));

    const int64_t wanted = args_.num_logprobs[row];
    if (wanted <= 0) return;
    kernels().block_maxima(logits, args_.vocab_size, scratch.block_maxima.data());
    const float threshold = scratch.lower_bound_of_largest(wanted, kLowest);
    const int64_t count = scratch.collect(logits, threshold);
    scratch.select_from(count);
    const int64_t found = std::min(wanted, count);
    std::partial_sort(scratch.selection.begin(), scratch.selection.begin() + found,
                      scratch.selection.begin() + count, before);
    int32_t* ids = args_.top_ids + row * args_.max_logprobs;
    float* logprobs = args_.top_logprobs + row * args_.max_logprobs;
    for (int64_t i = 0; i < wanted; ++i) {
      const bool exists = i < found;  // more may be asked for than the vocabulary holds
      ids[i] = exists ? scratch.selection[i].id : -1;
      logprobs[i] = exists ? reported(scratch.selection[i].value) : kLowest;
    }
  }

  const SampleArgs args_;
  std::vector<SampleScratch> scratch_;
};

}  // namespace

std::unique_ptr<Op> make_sample(const SampleArgs& args, int num_threads) {
  check_at_least("vocab_size", args.vocab_size, 1);
  check_rows("logits", args.logits, args.logits_stride, args.vocab_size);
  check_at_least("max_logprobs", args.max_logprobs, 0);
  check_address("temperature", args.temperature);
  check_address("top_k", args.top_k);
  check_address("top_p", args.top_p);
  check_address("min_p", args.min_p);
  check_address("seed", args.seed);
  check_address("choice", args.choice);
  check_address("position", args.position);
  check_address("num_logprobs", args.num_logprobs);
  check_address("logprobs_mode", args.logprobs_mode);
  check_address("edits", args.edits);
  check_address("allowed_mask", args.allowed_mask);
  check_address("grammar_mask", args.grammar_mask);
  check_address("replacement", args.replacement);
  check_address("target", args.target);
  check_address("token", args.token);
  check_address("logprob", args.logprob);
  check_address("rank", args.rank);
  if (args.max_logprobs > 0) {
    check_address("top_ids", args.top_ids);
    check_address("top_logprobs", args.top_logprobs);
  }
  return std::make_unique<SampleOp>(args, num_threads);
}

}  // namespace streamllm::cpu
