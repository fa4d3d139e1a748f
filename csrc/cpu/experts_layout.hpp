// What the operations of one mixture-of-experts layer share while a plan runs: how the rows were routed, and
// where each thread works. All of it lies in the plan's scratch, in which layers follow each other.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "ops.hpp"

namespace streamllm::cpu {

// Rows that a product takes at once: their activations then stay in the second-level cache.
inline constexpr int64_t kExpertBlockRows = 48;

// Consecutive routed rows of one expert.
struct ExpertBlock {
  int32_t expert, first_row, num_rows;
};

// A routed row is a token with one of its experts. Choices lie in order of tokens; rows in order of experts,
// and of tokens within an expert.
class ExpertsLayout {
 public:
  // `quantized_bytes_per_token`: of the tokens that make_quantize leaves; 0 for none.
  ExpertsLayout(int64_t num_experts, int64_t top_k, bool on_outputs, size_t quantized_bytes_per_token,
                std::shared_ptr<Scratch> scratch)
      : num_experts_(num_experts),
        top_k_(top_k),
        on_outputs_(on_outputs),
        quantized_bytes_per_token_(quantized_bytes_per_token),
        scratch_(std::move(scratch)) {}

  // What an operation's tiles need as working memory, before the first run.
  void require_thread_bytes(size_t num_bytes) { thread_bytes_ = std::max(thread_bytes_, padded(num_bytes)); }

  void prepare(const RunSizes& sizes, int num_threads) {
    tokens_ = on_outputs_ ? sizes.outputs : sizes.tokens;
    size_t end = padded(static_cast<size_t>(quantized_stride(tokens_)) * quantized_bytes_per_token_);
    const auto place = [&](size_t num_bytes) {
      const size_t start = end;
      end += padded(num_bytes);
      return start;
    };
    const auto rows = static_cast<size_t>(num_rows());
    choices_ = place(rows * sizeof(int32_t));
    choice_weights_ = place(rows * sizeof(float));
    row_tokens_ = place(rows * sizeof(int32_t));
    row_weights_ = place(rows * sizeof(float));
    first_rows_ = place(static_cast<size_t>(num_experts_ + 1) * sizeof(int32_t));
    blocks_ = place(static_cast<size_t>(max_blocks()) * sizeof(ExpertBlock));
    threads_ = place(static_cast<size_t>(num_threads) * thread_bytes_);
    scratch_->reserve(end);
  }

  int64_t num_experts() const { return num_experts_; }
  int64_t top_k() const { return top_k_; }
  int64_t tokens() const { return tokens_; }
  int64_t num_rows() const { return tokens_ * top_k_; }
  // Of any routing: an expert's rows are cut into as few blocks as hold them.
  int64_t max_blocks() const { return num_rows() / kExpertBlockRows + std::min(num_experts_, num_rows()); }
  int64_t min_blocks() const {
    return std::max(std::min(top_k_, num_rows()), (num_rows() + kExpertBlockRows - 1) / kExpertBlockRows);
  }

  // [num_rows()]
  int32_t* choices() const { return at<int32_t>(choices_); }
  float* choice_weights() const { return at<float>(choice_weights_); }
  int32_t* row_tokens() const { return at<int32_t>(row_tokens_); }
  float* row_weights() const { return at<float>(row_weights_); }
  // [num_experts + 1]: an expert's rows end where the next one's begin.
  int32_t* first_rows() const { return at<int32_t>(first_rows_); }
  // [max_blocks()]; those that this routing does not need have no rows.
  ExpertBlock* blocks() const { return at<ExpertBlock>(blocks_); }
  // The tokens quantised, where make_quantize leaves them.
  const QuantizedGroup* quantized_tokens() const { return at<const QuantizedGroup>(0); }
  void* thread_memory(int thread) const {
    return at<uint8_t>(threads_ + static_cast<size_t>(thread) * thread_bytes_);
  }

 private:
  static constexpr size_t padded(size_t num_bytes) { return (num_bytes + 63) / 64 * 64; }

  template <typename T>
  T* at(size_t offset) const {
    return reinterpret_cast<T*>(static_cast<uint8_t*>(scratch_->data()) + offset);
  }

  const int64_t num_experts_, top_k_;
  const bool on_outputs_;
  const size_t quantized_bytes_per_token_;
  const std::shared_ptr<Scratch> scratch_;
  int64_t tokens_ = 0;
  size_t choices_ = 0, choice_weights_ = 0, row_tokens_ = 0, row_weights_ = 0, first_rows_ = 0, blocks_ = 0;
  size_t threads_ = 0, thread_bytes_ = 0;
};

// The operations that fill the layout for a run, the first of which prepares it.
void add_routing(const ExpertsArgs& args, const std::shared_ptr<ExpertsLayout>& layout,
                 std::vector<std::unique_ptr<Op>>& ops);

}  // namespace streamllm::cpu
