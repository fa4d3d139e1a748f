// Which experts a token uses and with what weights, and the rows of every expert side by side.
#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "experts_layout.hpp"

namespace streamllm::cpu {

namespace {

// Of x[0 .. count) the indices of the largest, largest first, the lower one among equals. Without NaN.
void choose_largest(const float* x, int64_t count, int64_t num_chosen, int32_t* chosen) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (found == num_chosen && !(x[i] > x[chosen[found - 1]])) continue;
    int64_t place = found < num_chosen ? found++ : found - 1;
    for (; place > 0 && x[i] > x[chosen[place - 1]]; --place) chosen[place] = chosen[place - 1];
    chosen[place] = static_cast<int32_t>(i);
  }
}

class RouteOp final : public Op {
 public:
  RouteOp(const ExpertsArgs& args, std::shared_ptr<ExpertsLayout> layout)
      : logits_(args.router_logits),
        logits_stride_(args.router_stride),
        normalize_(args.normalize),
        layout_(std::move(layout)) {
    layout_->require_thread_bytes(static_cast<size_t>(layout_->num_experts()) * sizeof(float));
  }

  int64_t prepare(const RunSizes& sizes, int num_threads) override {
    layout_->prepare(sizes, num_threads);
    return (layout_->tokens() + tokens_per_tile_ - 1) / tokens_per_tile_;
  }

  void run_tile(int64_t tile, int thread) noexcept override {
    const int64_t first = tile * tokens_per_tile_, top_k = layout_->top_k();
    for (int64_t token = first; token < std::min(first + tokens_per_tile_, layout_->tokens()); ++token) {
      route(logits_ + token * logits_stride_, layout_->choices() + token * top_k,
            layout_->choice_weights() + token * top_k, thread);
    }
  }

 private:
  void route(const float* logits, int32_t* chosen, float* weights, int thread) const {
    const int64_t num_experts = layout_->num_experts(), top_k = layout_->top_k();
    const RowMaximum maximum = kernels().row_maximum(logits, num_experts);
    if (!maximum.valid) {
      // The token's result is NaN, whichever experts it passes.
      std::iota(chosen, chosen + top_k, 0);
      std::fill_n(weights, top_k, std::numeric_limits<float>::quiet_NaN());
      return;
    }
    choose_largest(logits, num_experts, top_k, chosen);
    float* exponentials = static_cast<float*>(layout_->thread_memory(thread));
    if (normalize_) {
      for (int64_t i = 0; i < top_k; ++i) exponentials[i] = logits[chosen[i]];
      const double total = exponentiate(exponentials, top_k, maximum.value, exponentials);
      for (int64_t i = 0; i < top_k; ++i) weights[i] = static_cast<float>(exponentials[i] / total);
    } else {
      const double total = exponentiate(logits, num_experts, maximum.value, exponentials);
      for (int64_t i = 0; i < top_k; ++i) weights[i] = static_cast<float>(exponentials[chosen[i]] / total);
    }
  }

  // out = exp(x - maximum); returns its sum. A few at a time, which the tables on the stack have room for.
  static double exponentiate(const float* x, int64_t count, float maximum, float* out) {
    double total = 0.0;
    for (int64_t i = 0; i < count; i += kSampleBlock) {
      double sum;
      float largest;
      kernels().softmax_weights(x + i, std::min<int64_t>(kSampleBlock, count - i), maximum, 1.0f, out + i,
                                &sum, &largest);
      total += sum;
    }
    return total;
  }

  const float* const logits_;
  const int64_t logits_stride_;
  const bool normalize_;
  const std::shared_ptr<ExpertsLayout> layout_;
  const int64_t tokens_per_tile_ = light_rows_per_tile(4 * layout_->num_experts());
};

class SortByExpertOp final : public Op {
 public:
  explicit SortByExpertOp(std::shared_ptr<ExpertsLayout> layout) : layout_(std::move(layout)) {}

  int64_t prepare(const RunSizes&, int) override { return layout_->num_rows() > 0 ? 1 : 0; }

  void run_tile(int64_t, int) noexcept override {
    sort();
    cut_into_blocks();
  }

 private:
  void sort() const {
    const int64_t num_experts = layout_->num_experts(), top_k = layout_->top_k();
    const int64_t num_rows = layout_->num_rows();
    const int32_t* choices = layout_->choices();
    int32_t* first_rows = layout_->first_rows();
    std::fill_n(first_rows, num_experts + 1, 0);
    for (int64_t i = 0; i < num_rows; ++i) ++first_rows[choices[i] + 1];
    std::partial_sum(first_rows, first_rows + num_experts + 1, first_rows);
    for (int64_t i = 0; i < num_rows; ++i) {
      const int32_t row = first_rows[choices[i]]++;
      layout_->row_tokens()[row] = static_cast<int32_t>(i / top_k);
      layout_->row_weights()[row] = layout_->choice_weights()[i];
    }
    // Every entry has moved on to where the next expert begins.
    std::copy_backward(first_rows, first_rows + num_experts, first_rows + num_experts + 1);
    first_rows[0] = 0;
  }

  void cut_into_blocks() const {
    const int32_t* first_rows = layout_->first_rows();
    ExpertBlock* block = layout_->blocks();
    for (int32_t expert = 0; expert < layout_->num_experts(); ++expert) {
      const int32_t end = first_rows[expert + 1], count = end - first_rows[expert];
      if (count == 0) continue;
      const int32_t num_blocks = (count + kExpertBlockRows - 1) / kExpertBlockRows;
      const int32_t height = (count + num_blocks - 1) / num_blocks;
      for (int32_t row = first_rows[expert]; row < end; row += height) {
        *block++ = {expert, row, std::min(height, end - row)};
      }
    }
    std::fill(block, layout_->blocks() + layout_->max_blocks(), ExpertBlock{});
  }

  const std::shared_ptr<ExpertsLayout> layout_;
};

}  // namespace

void add_routing(const ExpertsArgs& args, const std::shared_ptr<ExpertsLayout>& layout,
                 std::vector<std::unique_ptr<Op>>& ops) {
  ops.push_back(std::make_unique<RouteOp>(args, layout));
  ops.push_back(std::make_unique<SortByExpertOp>(layout));
}

}  // namespace streamllm::cpu
