// The operations that a plan can record. Each factory checks its arguments once (std::invalid_argument) and
// keeps the addresses; the memory must outlive the plan's runs.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "../sampling_records.hpp"
#include "kernels.hpp"
#include "packed_matrix.hpp"
#include "plan.hpp"

namespace streamllm::cpu {

using MatrixPtr = std::shared_ptr<const PackedMatrix>;

// Rows of logits to tokens. Arrays have one entry per output row; of addresses, 0 stands for none.
//
// In this order: replacement, bias, penalties, bans (masks and banned ids), temperature, min-p, top-k, top-p,
// draw. Raw logprobs are those of the logits as they came.
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
  const int32_t* logprobs_mode;
  const int64_t* edits;         // addresses of RowEdits
  const int64_t* allowed_mask;  // addresses of uint32[ceil(vocab_size / 32)]: bit id % 32 of word id / 32
  const int64_t* grammar_mask;  // the same; a token must be in both
  const int64_t* replacement;   // addresses of float32[vocab_size], taken instead of the row's logits
  const int32_t* target;        // >= 0: this token's raw logprob is reported, and nothing is drawn
  int32_t* token;
  float* logprob;
  int32_t* rank;
  int32_t* top_ids;     // [outputs][max_logprobs]
  float* top_logprobs;  // [outputs][max_logprobs]
  int64_t max_logprobs;
};

// The gated MLPs of a mixture-of-experts layer.
struct ExpertsArgs {
  const float* x;
  int64_t x_stride;
  const QuantizedGroup* quantized_x;  // x quantised; nullptr: it is not, and x is read
  const float* router_logits;         // [rows][number of experts]
  int64_t router_stride;
  std::vector<MatrixPtr> gate_up;  // [2 * intermediate, hidden] an expert
  std::vector<MatrixPtr> down;     // [hidden, intermediate] an expert
  const float* gate_up_bias;       // float32[number of experts][2 * intermediate] or nullptr
  const float* down_bias;          // float32[number of experts][hidden] or nullptr
  int64_t top_k;
  bool normalize;  // weights are the softmax over the chosen logits, not over all
  Activation activation;
  float limit;  // of GateArgs
  OutputRows active;
  float* out;
  int64_t out_stride;
  bool on_outputs;
};

// out[t, :] = weight[token_ids[t] - first_row, :]; an id outside the matrix gives zeros.
std::unique_ptr<Op> make_embedding(const int32_t* token_ids, MatrixPtr weight, int64_t first_row, float* out,
                                   int64_t out_stride);

// Calls `function` with the number of rows, on the driver thread; not for a run without rows. What it throws
// becomes the run's failure.
std::unique_ptr<Op> make_host_call(std::function<void(int64_t)> function, bool on_outputs,
                                   std::shared_ptr<RunFailure> failure);

// Leaves x quantised at the beginning of `scratch`, for an operation that follows.
std::unique_ptr<Op> make_quantize(const float* x, int64_t x_stride, int64_t k, bool on_outputs,
                                  const std::shared_ptr<Scratch>& scratch);

// out = x @ weight^T + bias (nullptr: none). If a segment of the weight is quantised, another operation comes
// first, which leaves x quantised in `scratch`.
std::vector<std::unique_ptr<Op>> make_linear(const float* x, int64_t x_stride, const MatrixPtr& weight,
                                             const float* bias, float* out, int64_t out_stride,
                                             bool on_outputs, const std::shared_ptr<Scratch>& scratch);
// The same for x that another operation of the plan has written quantised.
std::unique_ptr<Op> make_linear_of_quantized(const QuantizedGroup* x, const MatrixPtr& weight,
                                             const float* bias, float* out, int64_t out_stride,
                                             bool on_outputs);

// On rows of tokens, or of outputs.
std::unique_ptr<Op> make_rms_norm(const NormArgs& args, bool on_outputs);
std::unique_ptr<Op> make_layer_norm(const NormArgs& args, bool on_outputs);
std::unique_ptr<Op> make_add(const AddArgs& args, bool on_outputs);
std::unique_ptr<Op> make_scale(const InPlaceArgs& args, bool on_outputs);
std::unique_ptr<Op> make_soft_cap(const InPlaceArgs& args, bool on_outputs);
std::unique_ptr<Op> make_sigmoid_scale(const SigmoidScaleArgs& args, bool on_outputs);
std::unique_ptr<Op> make_activate(const ActivationArgs& args, bool on_outputs);
std::unique_ptr<Op> make_gate_and_mul(const GateArgs& args, bool on_outputs);

std::unique_ptr<Op> make_rotary_and_cache(const RotaryArgs& args);
std::unique_ptr<Op> make_paged_attention(const AttentionArgs& args, int num_threads);
std::unique_ptr<Op> make_gather_rows(const float* x, int64_t x_stride, const int32_t* indices, int64_t dim,
                                     float* out, int64_t out_stride);
std::unique_ptr<Op> make_sample(const SampleArgs& args, int num_threads);

// The weighted sum of each row's experts, where x is the rows as they are or quantised (the products then
// take quantised weights only). `active` has room for top_k rows of intermediate values for each row of x.
std::vector<std::unique_ptr<Op>> make_experts(const ExpertsArgs& args,
                                              const std::shared_ptr<Scratch>& scratch);

// Rows of a light operation that make a tile worth a trip to the shared counter.
constexpr int64_t light_rows_per_tile(int64_t elements_per_row) {
  constexpr int64_t kElementsPerTile = 8192;
  return elements_per_row < kElementsPerTile ? kElementsPerTile / elements_per_row : 1;
}

KvType kv_type_from_name(const char* name);
Activation activation_from_name(const char* name);

}  // namespace streamllm::cpu
