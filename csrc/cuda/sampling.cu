// A token from each row of logits, as streamllm/runner/sampler.py defines it; a block a row.
//
// Sums are of integers (sampling_search.hpp), so a row's results are the same bits whatever the batch and the
// number of threads. They are the definition's except where the row's random number, or the edge of top-k,
// top-p or min-p, lies within the rounding of exp() (2 units in the last place) or of a weight to a multiple
// of 2^-44.
#include <cfloat>

#include "api.hpp"
#include "launch.hpp"
#include "sampling_rules.hpp"
#include "sampling_search.hpp"

namespace streamllm::cuda {

// The arrays of SamplingBuffers (streamllm/ops/step_inputs.py), with device addresses. Logits are
// `logits_stride` elements apart. A row with a target below -1 is padding: nothing of it is read or written.
struct SampleArgs {
  const float* logits;
  float* scratch;  // [num_blocks, 2, vocab_size]
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const uint64_t* seed;
  const int32_t* choice;
  const int32_t* position;
  const int32_t* num_logprobs;  // more than max_logprobs: max_logprobs
  const int32_t* logprobs_mode;
  const int64_t* edits;
  const int64_t* allowed_mask;
  const int64_t* grammar_mask;
  const int64_t* replacement;
  const int32_t* target;
  int32_t* token;
  float* logprob;
  int32_t* rank;
  int32_t* top_ids;     // [num_outputs, max_logprobs]
  float* top_logprobs;  // [num_outputs, max_logprobs]
  int64_t logits_stride;
  int32_t num_outputs;
  int32_t vocab_size;
  int32_t max_logprobs;
  int32_t num_blocks;   // that the rows are dealt out to
  int32_t num_threads;  // of a block
};

namespace sampling {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kMaxVocabSize = 1 << 19;  // sums of that many weights fit into 63 bits
constexpr int32_t kDrawn = -1;  // a target that is none
constexpr Key kEverything = 0;

template <typename T>
__device__ __forceinline__ const T* at_address(int64_t address) {
  return reinterpret_cast<const T*>(static_cast<uintptr_t>(address));
}

__device__ __forceinline__ bool is_finite(Key largest) {
  return largest >= least_key(-FLT_MAX) && largest < least_key(INFINITY);
}

// The row's random number of [0, 2^24): the first word of Philox4x32-10 (Salmon et al., "Parallel random
// numbers: as easy as 1, 2, 3", 2011) without its lowest 8 bits.
__device__ __forceinline__ uint32_t random24(uint64_t seed, int32_t choice, int32_t position) {
  uint32_t c0 = static_cast<uint32_t>(position), c1 = static_cast<uint32_t>(choice), c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c0, b = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c0 >> 8;
}

// floor(total * random / 2^24) without more than 64 bits.
__device__ __forceinline__ uint64_t share_of(uint64_t total, uint32_t random) {
  return (total >> 24) * random + ((total & 0xffffffu) * random >> 24);
}

struct Drawn {
  int32_t token;
  Key cutoff;  // tokens with weights of this key or a larger one could have been drawn
};

// Temperature, min-p, top-k, top-p and the draw. Leaves in `weights` those of all tokens, probabilities times
// a constant, 0 for what min-p drops.
__device__ Drawn draw(const SampleArgs& args, int row, const float* logits, float maximum, float* weights,
                      Memory& memory) {
  const float temperature = args.temperature[row], top_p = args.top_p[row];
  const float min_p = fminf(fmaxf(args.min_p[row], 0.0f), 1.0f);
  const float floor = fmaxf(min_p, FLT_MIN);
  const int top_k = args.top_k[row], count = args.vocab_size;
  uint64_t sums[2] = {};  // of units and of tokens
  uint32_t largest = 0;
  for_each(logits, count, [&](int id, float logit) {
    float weight = expf((logit - maximum) / temperature);
    if (!(weight >= floor)) weight = 0.0f;
    weights[id] = weight;
    sums[0] += units(weight);
    sums[1] += weight > 0.0f;
    largest = Largest{}(largest, ordered(weight));
  });
  reduce_all(sums, Sum{}, memory);
  uint64_t total = sums[0];
  if (total == 0) return {kNotFinite, kEverything};  // the row's temperature is NaN

  const bool filters = top_k > 0 || top_p < 1.0f || min_p > 0.0f;
  Key cutoff = filters ? least_key(floor) : kEverything;
  const Key end = least_key(1.0f) + (Key{1} << 32);
  if (top_k > 0 && static_cast<uint64_t>(top_k) < sums[1]) {
    const Key low = Largest{}(cutoff, lower_bound_of_largest(largest, top_k, memory));
    const Found last = find_last(weights, count, low, end, top_k, Count{});
    cutoff = least_key(value_of(last.key));  // with all that are equal
    total = mass_from(cutoff, weights, count, memory);
  }
  if (top_p < 1.0f) {
    const double share = ceil(static_cast<double>(top_p) * static_cast<double>(total));
    const uint64_t target = share < 1.0 ? 1 : Smaller{}(static_cast<uint64_t>(share), total);
    // All weights of fewer units than this are less, together, than what top-p leaves out. Twice a little
    // smaller: for what units() rounds off, and for its own rounding.
    const uint64_t least = (total - target) / count;
    const float bound = least < 2 ? 0.0f : static_cast<float>(least - 1) * 0x1p-44f * 0.999999f;
    const Found last = find_last(weights, count, Largest{}(cutoff, least_key(bound)), end, target, Mass{});
    cutoff = last.key;
    total = last.reached;
  }
  const uint32_t random = random24(args.seed[row], args.choice[row], args.position[row]);
  return {find_in_id_order(cutoff, weights, count, share_of(total, random), memory), cutoff};
}

// What logprobs are reported of; null: none are.
struct Reported {
  const float* values;
  float maximum;
  bool normalised;
};

// Writes logprob and rank of the row's token, and the likeliest tokens.
__device__ void report(const SampleArgs& args, int row, const Reported& what, Memory& memory) {
  const float* values = what.values;
  const float maximum = what.maximum;
  const bool normalised = what.normalised;
  const int count = args.vocab_size;
  const float sampled = values[args.token[row]];
  uint64_t sums[2] = {};  // of units and of greater values
  uint32_t largest = 0;
  for_each(values, count, [&](int, float value) {
    if (normalised) sums[0] += units(expf(value - maximum));
    sums[1] += value > sampled;
    largest = Largest{}(largest, ordered(value));
  });
  reduce_all(sums, Sum{}, memory);
  if (threadIdx.x == 0) memory.log_sum = normalised ? log(static_cast<double>(sums[0]) * 0x1p-44) : 0.0;
  __syncthreads();
  // Two steps, so that a large maximum does not swallow the sum.
  const double shift = normalised ? maximum : 0.0, log_sum = memory.log_sum;
  const auto reported = [&](float value) { return static_cast<float>((value - shift) - log_sum); };
  if (threadIdx.x == 0) {
    args.logprob[row] = reported(sampled);
    args.rank[row] = static_cast<int32_t>(sums[1] + 1);
  }

  const int wanted = min(args.num_logprobs[row], args.max_logprobs);
  if (wanted <= 0) return;
  int32_t* top_ids = args.top_ids + static_cast<int64_t>(row) * args.max_logprobs;
  float* top_logprobs = args.top_logprobs + static_cast<int64_t>(row) * args.max_logprobs;
  const int found = min(wanted, count);
  const Key low = lower_bound_of_largest(largest, found, memory);
  const Key last = find_last(values, count, low, least_key(INFINITY), found, Count{}).key;
  Key* list = memory.lists[0];
  if (threadIdx.x == 0) memory.sizes[0] = 0;
  __syncthreads();
  for_each(values, count, [&](int id, float value) {
    const Key key = key_of(value, id);
    if (key >= last) list[atomicAdd(&memory.sizes[0], 1)] = key;  // `found` of them
  });
  __syncthreads();
  for (int i = threadIdx.x; i < wanted; i += blockDim.x) {
    int place = i;
    if (i < found) {
      place = 0;
      for (int j = 0; j < found; ++j) place += list[j] > list[i];
    }
    // More may be asked for than the vocabulary holds.
    top_ids[place] = i < found ? id_of(list[i]) : -1;
    top_logprobs[place] = i < found ? reported(value_of(list[i])) : kLowest;
  }
}

// Writes the row's token, if there is one; else what there is instead.
__device__ Reported choose(const SampleArgs& args, int row, float* scratch, float* weights, Memory& memory) {
  constexpr Reported kNothing{nullptr, 0.0f, false};
  const int count = args.vocab_size;
  const float* raw = args.logits + row * args.logits_stride;
  const auto finish = [&](int32_t token) {
    if (threadIdx.x == 0) args.token[row] = token;
  };
  const Key raw_largest = largest_key(raw, count, memory);
  if (!is_finite(raw_largest)) return finish(kNotFinite), kNothing;
  if (args.target[row] >= 0) return finish(args.target[row]), Reported{raw, value_of(raw_largest), true};

  const float* logits = processed_logits(
      raw, count, at_address<float>(args.replacement[row]), at_address<uint32_t>(args.allowed_mask[row]),
      at_address<uint32_t>(args.grammar_mask[row]), at_address<RowEdits>(args.edits[row]), scratch);
  const Key largest = logits == raw ? raw_largest : largest_key(logits, count, memory);
  const float maximum = value_of(largest), temperature = args.temperature[row];
  if (!is_finite(largest)) return finish(maximum == kLowest ? kNothingAllowed : kNotFinite), kNothing;
  const bool greedy = temperature < kGreedyTemperature;
  const Drawn drawn = greedy ? Drawn{id_of(largest), kEverything}
                             : draw(args, row, logits, maximum, weights, memory);
  finish(drawn.token);
  if (drawn.token < 0 || args.num_logprobs[row] < 0) return kNothing;

  const auto mode = static_cast<LogprobsMode>(args.logprobs_mode[row]);
  const bool normalised = mode == LogprobsMode::raw_logprobs || mode == LogprobsMode::processed_logprobs;
  const bool is_raw = mode == LogprobsMode::raw_logprobs || mode == LogprobsMode::raw_logits;
  if (is_raw) return {raw, value_of(raw_largest), normalised};
  if (greedy) return {logits, maximum, normalised};
  for_each(logits, count, [&](int id, float logit) {
    scratch[id] = key_of(weights[id], id) >= drawn.cutoff ? logit / temperature : kLowest;
  });
  return {scratch, maximum / temperature, normalised};
}

__global__ void __launch_bounds__(kMaxThreads) sample_kernel(SampleArgs args) {
  Memory& memory = *shared_memory<Memory>();
  float* scratch = args.scratch + static_cast<int64_t>(blockIdx.x) * 2 * args.vocab_size;
  for (int row = blockIdx.x; row < args.num_outputs; row += gridDim.x) {
    if (args.target[row] < kDrawn) continue;
    const Reported reported = choose(args, row, scratch, scratch + args.vocab_size, memory);
    __syncthreads();  // the token, the scratch's values
    if (reported.values != nullptr) report(args, row, reported, memory);
    __syncthreads();  // before the next row changes what this one still reads
  }
}

}  // namespace
}  // namespace sampling
}  // namespace streamllm::cuda

STREAMLLM_API int streamllm_sample(const streamllm::cuda::SampleArgs* args, void* stream) {
  using namespace streamllm::cuda;
  using namespace streamllm::cuda::sampling;
  if (args->num_outputs == 0) return kSuccess;
  const bool possible =
      args->num_outputs > 0 && args->vocab_size > 0 && args->vocab_size <= kMaxVocabSize &&
      (args->logits_stride >= args->vocab_size || args->num_outputs == 1) && args->max_logprobs >= 0 &&
      args->max_logprobs <= kListSize && args->num_blocks > 0 && args->num_threads >= kWarpSize &&
      args->num_threads <= kMaxThreads && args->num_threads % kWarpSize == 0;
  if (!possible) return kUnsupportedSize;
  return launch(sample_kernel, dim3(static_cast<unsigned>(args->num_blocks)),
                dim3(static_cast<unsigned>(args->num_threads)), sizeof(Memory), stream, *args);
}
