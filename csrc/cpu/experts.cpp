// The gated MLPs of a mixture-of-experts layer, each over the tokens that chose it.
//
// A tile gathers a block of one expert's rows, multiplies it by some columns of [gate | up] and joins them:
// neither gathered rows nor products are ever stored for the whole batch. A tile of the down products adds
// some columns of all experts to the output, expert by expert, so that sums have one order.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "checks.hpp"
#include "experts_layout.hpp"

namespace streamllm::cpu {

namespace {

constexpr int64_t kMaxPanelsPerTile = 16;
constexpr int64_t kTilesPerThread = 8;
constexpr int64_t kPadding = 16;  // floats after a row, so that a column's elements do not share a cache set

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Activations as products read them: with plain weights, with quantised weights, or both.
struct Activations {
  const float* plain = nullptr;
  int64_t plain_stride = 0;
  const QuantizedGroup* quantized = nullptr;
  int64_t quantized_stride = 0;
};

// What some rows have to be for the products with a set of matrices.
struct Needs {
  bool plain = false, quantized = false;

  explicit Needs(const std::vector<MatrixPtr>& matrices) {
    for (const MatrixPtr& matrix : matrices) {
      for (const PackedMatrix::Segment& segment : matrix->segments()) {
        (format_info(segment.format).quantized ? quantized : plain) = true;
      }
    }
  }
};

// Memory of one thread, cut into arrays from the front; without memory it only counts what they take.
class Cutter {
 public:
  explicit Cutter(void* memory = nullptr) : start_(reinterpret_cast<uintptr_t>(memory)) {}

  template <typename T>
  T* cut(int64_t count) {
    T* const array = reinterpret_cast<T*>(start_ + used_);
    used_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return array;
  }
  size_t used() const { return used_; }

 private:
  const uintptr_t start_;
  size_t used_ = 0;
};

// out[rows, num_columns] = columns of x @ W^T + bias from `first_column` on, where a panel begins.
void multiply(const PackedMatrix& weight, const float* bias, const Activations& x, int64_t rows,
              int64_t first_column, int64_t num_columns, float* out, int64_t out_stride) {
  for (const PackedMatrix::Segment& segment : weight.segments()) {
    const int64_t first = std::max(first_column, segment.first_row);
    const int64_t end = std::min(first_column + num_columns, segment.first_row + segment.rows);
    if (first >= end) continue;
    const int64_t first_panel = (first - segment.first_row) / kPanelColumns;
    const LinearArgs args{
        .x = x.plain,
        .x_stride = x.plain_stride,
        .quantized = x.quantized,
        .quantized_stride = x.quantized_stride,
        .panels = segment.panels.get() + first_panel * segment.panel_bytes,
        .panel_bytes = segment.panel_bytes,
        .n = end - first,
        .k = weight.k(),
        .bias = bias != nullptr ? bias + first : nullptr,
        .out = out + (first - first_column),
        .out_stride = out_stride,
    };
    weight_kernels(segment.format).linear(args, 0, rows, 0, ceil_div(end - first, kPanelColumns));
  }
}

const float* bias_of(const float* bias, int64_t expert, int64_t n) {
  return bias != nullptr ? bias + expert * n : nullptr;
}

// Whether panels begin at every 32nd row of `count` rows from `first_row` on.
bool has_whole_panels(const std::vector<MatrixPtr>& matrices, int64_t first_row, int64_t count) {
  for (const MatrixPtr& matrix : matrices) {
    for (const PackedMatrix::Segment& segment : matrix->segments()) {
      const bool overlaps =
          segment.first_row < first_row + count && segment.first_row + segment.rows > first_row;
      if (overlaps && (segment.first_row - first_row) % kPanelColumns != 0) return false;
    }
  }
  return true;
}

// activation(x @ gate^T) * (x @ up^T) of every routed row.
class GateUpOp final : public Op {
 public:
  GateUpOp(const ExpertsArgs& args, std::shared_ptr<ExpertsLayout> layout)
      : args_(args),
        needs_(args.gate_up),
        hidden_(args.gate_up[0]->k()),
        width_(args.down[0]->k()),
        split_(has_whole_panels(args.gate_up, 0, width_) && has_whole_panels(args.gate_up, width_, width_)),
        layout_(std::move(layout)) {
    Cutter memory;
    cut_gathered(memory, kExpertBlockRows);
    const int64_t columns = split_ ? kMaxPanelsPerTile * kPanelColumns : width_;
    memory.cut<float>(kExpertBlockRows * (2 * columns + kPadding));
    layout_->require_thread_bytes(memory.used());
  }

  int64_t prepare(const RunSizes&, int num_threads) override {
    if (layout_->num_rows() == 0) return 0;
    const int64_t num_panels = ceil_div(width_, kPanelColumns);
    panels_per_tile_ = num_panels;
    if (split_) {
      // As many as leave enough tiles even if the batch keeps to a few experts: every tile gathers anew.
      const int64_t least_tiles = ceil_div(kTilesPerThread * num_threads, layout_->min_blocks());
      panels_per_tile_ = std::clamp<int64_t>(num_panels / least_tiles, 1, kMaxPanelsPerTile);
    }
    tiles_per_block_ = ceil_div(num_panels, panels_per_tile_);
    active_ = args_.active;
    if (active_.quantized) active_.stride = quantized_stride(layout_->num_rows());
    return layout_->max_blocks() * tiles_per_block_;
  }

  void run_tile(int64_t tile, int thread) noexcept override {
    const ExpertBlock& block = layout_->blocks()[tile / tiles_per_block_];
    const int64_t rows = block.num_rows;
    if (rows == 0) return;
    const int64_t column = tile % tiles_per_block_ * panels_per_tile_ * kPanelColumns;
    const int64_t columns = std::min(panels_per_tile_ * kPanelColumns, width_ - column);
    const PackedMatrix& weight = *args_.gate_up[block.expert];
    const float* bias = bias_of(args_.gate_up_bias, block.expert, 2 * width_);
    Cutter memory(layout_->thread_memory(thread));
    const Activations x = gather(memory, block);
    const int64_t stride = 2 * columns + kPadding;
    float* products = memory.cut<float>(rows * stride);
    if (columns == width_) {
      multiply(weight, bias, x, rows, 0, 2 * width_, products, stride);
    } else {
      multiply(weight, bias, x, rows, column, columns, products, stride);
      multiply(weight, bias, x, rows, width_ + column, columns, products + columns, stride);
    }
    const GateArgs gate{
        .x = products,
        .x_stride = stride,
        .dim = columns,
        .activation = args_.activation,
        .limit = args_.limit,
        .out = active_from(block.first_row, column),
    };
    kernels().gate_and_mul(gate, 0, rows);
  }

 private:
  struct Gathered {
    float* plain;
    QuantizedGroup* quantized;
  };

  Gathered cut_gathered(Cutter& memory, int64_t rows) const {
    return {memory.cut<float>(needs_.plain ? rows * (hidden_ + kPadding) : 0),
            memory.cut<QuantizedGroup>(needs_.quantized ? hidden_ / kGroup * quantized_stride(rows) : 0)};
  }

  // The block's rows of x, side by side.
  Activations gather(Cutter& memory, const ExpertBlock& block) const {
    const int64_t rows = block.num_rows;
    const int32_t* tokens = layout_->row_tokens() + block.first_row;
    const Gathered to = cut_gathered(memory, rows);
    const Activations gathered{to.plain, hidden_ + kPadding, to.quantized, quantized_stride(rows)};
    if (needs_.plain) {
      for (int64_t row = 0; row < rows; ++row) {
        std::memcpy(to.plain + row * gathered.plain_stride, args_.x + tokens[row] * args_.x_stride,
                    static_cast<size_t>(hidden_) * sizeof(float));
      }
    }
    if (needs_.quantized) {
      const QuantizedGroup* x =
          args_.quantized_x != nullptr ? args_.quantized_x : layout_->quantized_tokens();
      const int64_t x_stride = quantized_stride(layout_->tokens());
      for (int64_t group = 0; group < hidden_ / kGroup; ++group) {
        for (int64_t row = 0; row < rows; ++row) {
          to.quantized[group * gathered.quantized_stride + row] = x[group * x_stride + tokens[row]];
        }
      }
    }
    return gathered;
  }

  OutputRows active_from(int64_t row, int64_t column) const {
    OutputRows out = active_;
    if (out.quantized) {
      out.data = static_cast<QuantizedGroup*>(out.data) + column / kGroup * out.stride + row;
    } else {
      out.data = static_cast<float*>(out.data) + row * out.stride + column;
    }
    return out;
  }

  const ExpertsArgs args_;
  const Needs needs_;
  const int64_t hidden_, width_;
  const bool split_;  // tiles may take some columns of either half
  const std::shared_ptr<ExpertsLayout> layout_;
  OutputRows active_{};
  int64_t panels_per_tile_ = 1, tiles_per_block_ = 1;
};

// out[token] = sum over its experts of weight * (active @ down^T + bias).
class DownOp final : public Op {
 public:
  DownOp(const ExpertsArgs& args, std::shared_ptr<ExpertsLayout> layout)
      : args_(args),
        quantize_(Needs(args.down).quantized && !args.active.quantized),
        width_(args.down[0]->k()),
        hidden_(args.down[0]->n()),
        split_(has_whole_panels(args.down, 0, hidden_)),
        layout_(std::move(layout)) {
    Cutter memory;
    cut_quantized(memory, kExpertBlockRows);
    const int64_t columns = split_ ? kMaxPanelsPerTile * kPanelColumns : hidden_;
    memory.cut<float>(kExpertBlockRows * (columns + kPadding));
    layout_->require_thread_bytes(memory.used());
  }

  int64_t prepare(const RunSizes&, int num_threads) override {
    const int64_t tokens = layout_->tokens();
    if (tokens == 0) return 0;
    const int64_t num_panels = ceil_div(hidden_, kPanelColumns), num_tiles = kTilesPerThread * num_threads;
    panels_per_tile_ =
        split_ ? std::clamp<int64_t>(num_panels / num_tiles, 1, kMaxPanelsPerTile) : num_panels;
    num_groups_ = ceil_div(num_panels, panels_per_tile_);
    // Where the columns are too few for the threads, and tokens many.
    const int64_t num_slices =
        std::clamp<int64_t>(num_tiles / num_groups_, 1, ceil_div(tokens, kSliceTokens));
    tokens_per_slice_ = ceil_div(tokens, num_slices);
    return num_groups_ * ceil_div(tokens, tokens_per_slice_);
  }

  void run_tile(int64_t tile, int thread) noexcept override {
    const int64_t first_column = tile % num_groups_ * panels_per_tile_ * kPanelColumns;
    const int64_t columns = std::min(panels_per_tile_ * kPanelColumns, hidden_ - first_column);
    const int64_t first_token = tile / num_groups_ * tokens_per_slice_;
    const int64_t end_token = std::min(first_token + tokens_per_slice_, layout_->tokens());
    for (int64_t token = first_token; token < end_token; ++token) {
      std::fill_n(args_.out + token * args_.out_stride + first_column, columns, 0.0f);
    }
    const int32_t* tokens = layout_->row_tokens();
    const int32_t* first_rows = layout_->first_rows();
    for (int64_t expert = 0; expert < layout_->num_experts(); ++expert) {
      const int32_t* all = tokens + first_rows[expert];
      const int32_t* all_end = tokens + first_rows[expert + 1];
      if (all == all_end) continue;
      const int64_t end = std::lower_bound(all, all_end, end_token) - tokens;
      for (int64_t row = std::lower_bound(all, all_end, first_token) - tokens; row < end;
           row += kExpertBlockRows) {
        add_block(expert, row, std::min(kExpertBlockRows, end - row), first_column, columns, thread);
      }
    }
  }

 private:
  static constexpr int64_t kSliceTokens = 256;

  QuantizedGroup* cut_quantized(Cutter& memory, int64_t rows) const {
    return memory.cut<QuantizedGroup>(quantize_ ? width_ / kGroup * quantized_stride(rows) : 0);
  }

  void add_block(int64_t expert, int64_t first_row, int64_t rows, int64_t first_column, int64_t columns,
                 int thread) const {
    Cutter memory(layout_->thread_memory(thread));
    const Activations x = active_rows(memory, first_row, rows);
    const int64_t stride = columns + kPadding;
    float* products = memory.cut<float>(rows * stride);
    multiply(*args_.down[expert], bias_of(args_.down_bias, expert, hidden_), x, rows, first_column, columns,
             products, stride);
    kernels().add_weighted_rows(
        {products, stride, columns, layout_->row_weights() + first_row, layout_->row_tokens() + first_row,
         args_.out + first_column, args_.out_stride},
        0, rows);
  }

  Activations active_rows(Cutter& memory, int64_t first_row, int64_t rows) const {
    Activations x;
    if (args_.active.quantized) {
      x.quantized = static_cast<const QuantizedGroup*>(args_.active.data) + first_row;
      x.quantized_stride = quantized_stride(layout_->num_rows());
      return x;
    }
    x.plain_stride = args_.active.stride;
    x.plain = static_cast<const float*>(args_.active.data) + first_row * x.plain_stride;
    if (quantize_) {
      // Weights of both kinds in one layer.
      QuantizedGroup* quantized = cut_quantized(memory, rows);
      x.quantized = quantized, x.quantized_stride = quantized_stride(rows);
      kernels().quantize_rows({x.plain, x.plain_stride, width_, {quantized, x.quantized_stride, true}}, 0,
                              rows);
    }
    return x;
  }

  const ExpertsArgs args_;
  const bool quantize_;  // blocks of plain rows, for products with quantised weights
  const int64_t width_, hidden_;
  const bool split_;  // tiles may take some columns
  const std::shared_ptr<ExpertsLayout> layout_;
  int64_t panels_per_tile_ = 1, num_groups_ = 1, tokens_per_slice_ = 1;
};

void check_matrices(const char* name, const std::vector<MatrixPtr>& matrices, size_t count, int64_t n,
                    int64_t k) {
  if (matrices.size() != count) {
    throw std::invalid_argument(std::string(name) + " must have a matrix for each of " +
                                std::to_string(count) + " experts, not " + std::to_string(matrices.size()));
  }
  for (const MatrixPtr& matrix : matrices) {
    if (matrix->n() != n || matrix->k() != k) {
      throw std::invalid_argument(std::string(name) + " must be [" + std::to_string(n) + ", " +
                                  std::to_string(k) + "] for every expert, not [" +
                                  std::to_string(matrix->n()) + ", " + std::to_string(matrix->k()) + "]");
    }
  }
}

void check_experts(const ExpertsArgs& args) {
  check_at_least("the number of experts", static_cast<int64_t>(args.gate_up.size()), 1);
  const auto num_experts = static_cast<int64_t>(args.gate_up.size());
  const int64_t hidden = args.gate_up[0]->k(), width = args.gate_up[0]->n() / 2;
  check_at_least("gate_up.n / 2", width, 1);
  check_matrices("gate_up", args.gate_up, args.gate_up.size(), 2 * width, hidden);
  check_matrices("down", args.down, args.gate_up.size(), hidden, width);
  if (args.quantized_x == nullptr) {
    check_rows("x", args.x, args.x_stride, hidden);
  } else if (Needs(args.gate_up).plain) {
    throw std::invalid_argument("a product with quantised x takes quantised weights only");
  }
  if (args.active.quantized && Needs(args.down).plain) {
    throw std::invalid_argument("a product with quantised x takes quantised weights only");
  }
  check_rows("router_logits", args.router_logits, args.router_stride, num_experts);
  check_at_least("top_k", args.top_k, 1);
  check_at_least("the number of experts", num_experts, args.top_k);
  if (!(args.limit >= 0.0f)) throw std::invalid_argument("limit must not be negative (0: none)");
  check_output(args.active, width);
  check_rows("out", args.out, args.out_stride, hidden);
}

}  // namespace

std::vector<std::unique_ptr<Op>> make_experts(const ExpertsArgs& args,
                                              const std::shared_ptr<Scratch>& scratch) {
  check_experts(args);
  const bool quantize = args.quantized_x == nullptr && Needs(args.gate_up).quantized;
  const int64_t hidden = args.gate_up[0]->k();
  const auto layout = std::make_shared<ExpertsLayout>(
      static_cast<int64_t>(args.gate_up.size()), args.top_k, args.on_outputs,
      quantize ? static_cast<size_t>(hidden / kGroup) * sizeof(QuantizedGroup) : 0, scratch);
  std::vector<std::unique_ptr<Op>> ops;
  add_routing(args, layout, ops);
  if (quantize) {
    ops.push_back(make_quantize(args.x, args.x_stride, hidden, args.on_outputs, scratch));
  }
  ops.push_back(std::make_unique<GateUpOp>(args, layout));
  ops.push_back(std::make_unique<DownOp>(args, layout));
  return ops;
}

}  // namespace streamllm::cpu
