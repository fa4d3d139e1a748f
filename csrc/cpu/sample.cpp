#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "checks.hpp"
#include "ops.hpp"
#include "philox.hpp"

namespace streamllm::cpu {

namespace {

constexpr float kGreedyTemperature = 1e-5f;

struct Candidate {
  float value;
  int32_t id;
};

// Larger values first, equal ones by id.
bool before(const Candidate& a, const Candidate& b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}

// One uniform number in [0, 1) for a token, from the request's seed and the token's place in it.
double uniform(uint64_t seed, int32_t choice, int32_t position) {
  const auto words = philox4x32({static_cast<uint32_t>(position), static_cast<uint32_t>(choice), 0, 0},
                                {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return (words[0] >> 8) * 0x1p-24;
}

// Weights of (0, 1] in falling order: 16 buckets for each power of two, the last one for all that are
// smaller.
constexpr int kNumBuckets = 512;

int bucket_of(float weight) {
  const uint32_t distance = std::bit_cast<uint32_t>(1.0f) - std::bit_cast<uint32_t>(weight);
  return static_cast<int>(std::min<uint32_t>(distance >> 19, kNumBuckets - 1));
}

// The memory of one thread.
struct SampleScratch {
  explicit SampleScratch(int64_t vocab_size)
      : weights(vocab_size),
        values(vocab_size),
        ids(vocab_size),
        selection(vocab_size),
        block_sums((vocab_size + kSampleBlock - 1) / kSampleBlock),
        block_maxima(block_sums.size()),
        sorted_maxima(block_sums.size()) {}

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
};

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
    const float* logits = args_.logits + row * args_.logits_stride;
    SampleScratch& scratch = scratch_[static_cast<size_t>(thread)];
    const RowMaximum maximum = kernels().row_maximum(logits, args_.vocab_size);
    if (!maximum.valid) {
      args_.token[row] = -1;
      return;
    }
    args_.token[row] = args_.temperature[row] < kGreedyTemperature
                           ? maximum.index
                           : draw(row, logits, maximum.value, scratch);
    if (args_.token[row] >= 0 && args_.num_logprobs[row] >= 0)
      write_logprobs(row, logits, maximum.value, scratch);
  }

 private:
  int32_t draw(int64_t row, const float* logits, float maximum, SampleScratch& scratch) const {
    kernels().softmax_weights(logits, args_.vocab_size, maximum, args_.temperature[row],
                              scratch.weights.data(), scratch.block_sums.data(), scratch.block_maxima.data());
    const double u = uniform(args_.seed[row], args_.choice[row], args_.position[row]);
    const float min_p = std::min(args_.min_p[row], 1.0f), top_p = args_.top_p[row];
    int64_t top_k = args_.top_k[row];
    if (top_k >= args_.vocab_size) top_k = 0;
    if (top_k <= 0 && !(min_p > 0.0f) && !(top_p < 1.0f)) return draw_from_all(u, scratch);

    double total = 0.0;
    int64_t count;
    if (top_k <= 0 && !(min_p > 0.0f)) {
      count = collect_top_p_candidates(top_p, total, scratch);
    } else {
      count = collect_top_k(top_k, std::max(min_p, 0.0f), scratch);
      for (int64_t i = 0; i < count; ++i) total += scratch.values[i];
    }
    if (top_p < 1.0f) count = keep_top_p(count, top_p * total, scratch);
    return draw_from_candidates(count, u, scratch);
  }

  // Of the weights >= min_p, those that reach the top_k-th largest (0: all), in id order.
  int64_t collect_top_k(int64_t top_k, float min_p, SampleScratch& scratch) const {
    float threshold = min_p;
    if (top_k > 0) threshold = std::max(threshold, scratch.lower_bound_of_largest(top_k, min_p));
    const int64_t count = scratch.collect(scratch.weights.data(), threshold);
    if (top_k <= 0 || count <= top_k) return count;
    scratch.select_from(count);
    const auto nth = scratch.selection.begin() + (top_k - 1);
    std::nth_element(scratch.selection.begin(), nth, scratch.selection.begin() + count, before);
    return keep(count, {nth->value, std::numeric_limits<int32_t>::max()}, scratch);
  }

  // The largest weights of the whole row, in id order: enough of them that their sum reaches top_p of
  // `total`.
  int64_t collect_top_p_candidates(float top_p, double& total, SampleScratch& scratch) const {
    for (const double sum : scratch.block_sums) total += sum;
    for (float threshold = 0x1p-4f;; threshold *= 0x1p-4f) {
      if (threshold < 0x1p-60f) threshold = 0.0f;
      const int64_t count = scratch.collect(scratch.weights.data(), threshold);
      double sum = 0.0;
      for (int64_t i = 0; i < count; ++i) sum += scratch.values[i];
      // A margin, because sums of other orders decide what is kept.
      if (threshold == 0.0f || sum * (1.0 - 1e-9) >= top_p * total) return count;
    }
  }

  // Keeps the candidates up to `last` in the order of before(); they stay in id order.
  static int64_t keep(int64_t count, const Candidate& last, SampleScratch& scratch) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (before(last, {scratch.values[i], scratch.ids[i]})) continue;
      scratch.values[kept] = scratch.values[i];
      scratch.ids[kept++] = scratch.ids[i];
    }
    return kept;
  }

  // Fills scratch.selection with the candidates of the bucket of similar weights in which a prefix in falling
  // order reaches `target`; returns their number, and in `sum` the sum of all larger ones.
  static int64_t select_bucket_of_prefix_end(int64_t count, double target, double& sum,
                                             SampleScratch& scratch) {
    double bucket_sums[kNumBuckets] = {};
    for (int64_t i = 0; i < count; ++i) bucket_sums[bucket_of(scratch.values[i])] += scratch.values[i];
    int last = kNumBuckets - 1;
    while (last > 0 && bucket_sums[last] == 0.0) --last;
    int bucket = 0;
    while (bucket < last && sum + bucket_sums[bucket] < target) sum += bucket_sums[bucket++];
    int64_t selected = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (bucket_of(scratch.values[i]) == bucket)
        scratch.selection[selected++] = {scratch.values[i], scratch.ids[i]};
    }
    return selected;
  }

  // Keeps the shortest prefix, in the order of before(), whose sum reaches `target`; at least one candidate.
  static int64_t keep_top_p(int64_t count, double target, SampleScratch& scratch) {
    double sum = 0.0;  // of all candidates before `begin`
    Candidate* begin = scratch.selection.data();
    Candidate* end = begin + select_bucket_of_prefix_end(count, target, sum, scratch);
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
    return keep(count, *last, scratch);
  }

  static int32_t draw_from_candidates(int64_t count, double u, const SampleScratch& scratch) {
    double total = 0.0, sum = 0.0;
    if (count == 0) return -1;  // the row's parameters are NaN
    for (int64_t i = 0; i < count; ++i) total += scratch.values[i];
    for (int64_t i = 0; i < count; ++i) {
      sum += scratch.values[i];
      if (sum > u * total) return scratch.ids[i];
    }
    return scratch.ids[count - 1];
  }

  // Inverse of the cumulative sum over the whole row: first by blocks, then within one.
  int32_t draw_from_all(double u, const SampleScratch& scratch) const {
    double total = 0.0, sum = 0.0;
    for (const double block : scratch.block_sums) total += block;
    const double target = u * total;
    size_t block = 0;
    while (block + 1 < scratch.block_sums.size() && sum + scratch.block_sums[block] <= target) {
      sum += scratch.block_sums[block++];
    }
    const int64_t begin = static_cast<int64_t>(block) * kSampleBlock;
    const int64_t end = std::min<int64_t>(begin + kSampleBlock, args_.vocab_size);
    int64_t last = begin;
    for (int64_t id = begin; id < end; ++id) {
      if (scratch.weights[id] == 0.0f) continue;
      last = id;
      sum += scratch.weights[id];
      if (sum > target) break;
    }
    return static_cast<int32_t>(last);
  }

  void write_logprobs(int64_t row, const float* logits, float maximum, SampleScratch& scratch) const {
    kernels().softmax_weights(logits, args_.vocab_size, maximum, 1.0f, scratch.weights.data(),
                              scratch.block_sums.data(), scratch.block_maxima.data());
    double total = 0.0;
    for (const double sum : scratch.block_sums) total += sum;
    const double log_sum = maximum + std::log(total);
    const float sampled = logits[args_.token[row]];
    args_.logprob[row] = static_cast<float>(sampled - log_sum);
    args_.rank[row] = static_cast<int32_t>(1 + kernels().count_greater(logits, args_.vocab_size, sampled));

    const int64_t wanted = args_.num_logprobs[row];
    if (wanted == 0) return;
    kernels().block_maxima(logits, args_.vocab_size, scratch.block_maxima.data());
    const float threshold = scratch.lower_bound_of_largest(wanted, -std::numeric_limits<float>::infinity());
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
      logprobs[i] = exists ? static_cast<float>(scratch.selection[i].value - log_sum)
                           : -std::numeric_limits<float>::infinity();
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
