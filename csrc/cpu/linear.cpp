// The operations that read packed weights.
#include <algorithm>
#include <stdexcept>
#include <utility>
#include <vector>

#include "checks.hpp"
#include "ops.hpp"

namespace streamllm::cpu {

namespace {

class EmbeddingOp final : public Op {
 public:
  EmbeddingOp(const int32_t* token_ids, MatrixPtr weight, int64_t first_row, float* out, int64_t out_stride)
      : token_ids_(token_ids),
        weight_(std::move(weight)),
        first_row_(first_row),
        out_(out),
        out_stride_(out_stride) {}

  int64_t prepare(const RunSizes& sizes, int) override {
    rows_ = sizes.tokens;
    return (rows_ + rows_per_tile_ - 1) / rows_per_tile_;
  }

  void run_tile(int64_t tile, int) noexcept override {
    const int64_t first = tile * rows_per_tile_;
    for (int64_t row = first; row < std::min(first + rows_per_tile_, rows_); ++row) {
      write_row(token_ids_[row] - first_row_, out_ + row * out_stride_);
    }
  }

 private:
  void write_row(int64_t weight_row, float* out) const {
    for (const PackedMatrix::Segment& segment : weight_->segments()) {
      const int64_t column = weight_row - segment.first_row;
      if (column < 0 || column >= segment.rows) continue;
      weight_kernels(segment.format)
          .unpack_column(segment.panels.get() + column / kPanelColumns * segment.panel_bytes,
                         static_cast<int>(column % kPanelColumns), weight_->k(), out);
      return;
    }
    std::fill_n(out, weight_->k(), 0.0f);
  }

  const int32_t* const token_ids_;
  const MatrixPtr weight_;
  const int64_t first_row_;
  float* const out_;
  const int64_t out_stride_;
  const int64_t rows_per_tile_ = light_rows_per_tile(weight_->k());
  int64_t rows_ = 0;
};

class QuantizeOp final : public Op {
 public:
  QuantizeOp(const QuantizeArgs& args, bool on_outputs, std::shared_ptr<Scratch> scratch)
      : args_(args), on_outputs_(on_outputs), scratch_(std::move(scratch)) {}

  int64_t prepare(const RunSizes& sizes, int) override {
    rows_ = on_outputs_ ? sizes.outputs : sizes.tokens;
    args_.out.stride = quantized_stride(rows_);
    scratch_->reserve(static_cast<size_t>(args_.k / kGroup * args_.out.stride) * sizeof(QuantizedGroup));
    return (rows_ + rows_per_tile_ - 1) / rows_per_tile_;
  }

  void run_tile(int64_t tile, int) noexcept override {
    QuantizeArgs args = args_;
    args.out.data = scratch_->data();
    const int64_t first = tile * rows_per_tile_;
    kernels().quantize_rows(args, first, std::min(first + rows_per_tile_, rows_));
  }

 private:
  QuantizeArgs args_;
  const bool on_outputs_;
  const std::shared_ptr<Scratch> scratch_;
  const int64_t rows_per_tile_ = light_rows_per_tile(args_.k);
  int64_t rows_ = 0;
};

class LinearOp final : public Op {
 public:
  LinearOp(const LinearArgs& args, const MatrixPtr& weight, bool on_outputs, std::shared_ptr<Scratch> scratch)
      : weight_(weight), on_outputs_(on_outputs), scratch_(std::move(scratch)) {
    for (const PackedMatrix::Segment& segment : weight->segments()) {
      LinearArgs own = args;
      own.panels = segment.panels.get();
      own.panel_bytes = segment.panel_bytes;
      own.n = segment.rows;
      own.bias = args.bias != nullptr ? args.bias + segment.first_row : nullptr;
      own.out = args.out + segment.first_row;
      parts_.push_back({own, segment.format, segment.num_panels()});
      num_panels_ += segment.num_panels();
      panel_bytes_ = std::max(panel_bytes_, segment.panel_bytes);
    }
  }

  int64_t prepare(const RunSizes& sizes, int num_threads) override {
    rows_ = on_outputs_ ? sizes.outputs : sizes.tokens;
    if (rows_ == 0) return 0;
    // Rows in blocks whose x stays in the second-level cache; panels in groups of some 256 KiB, but enough
    // groups to keep all threads busy to the end. Row blocks of one group follow each other, so that its
    // weights are still in a cache.
    const int64_t num_blocks = (rows_ + kBlockRows - 1) / kBlockRows;
    rows_per_block_ = (rows_ + num_blocks - 1) / num_blocks;
    num_row_blocks_ = (rows_ + rows_per_block_ - 1) / rows_per_block_;
    const int64_t by_bytes = (256 << 10) / panel_bytes_;
    const int64_t by_threads = num_panels_ * num_row_blocks_ / (num_threads * 6);
    const int64_t least =
        num_panels_ * num_row_blocks_ >= num_threads * 8 ? 2 : 1;  // few rows take two at once
    panels_per_group_ = std::max(least, std::min(by_bytes, by_threads) & ~int64_t{1});
    int64_t num_groups = 0;
    for (const Part& part : parts_) num_groups += num_groups_of(part);
    return num_groups * num_row_blocks_;
  }

  void run_tile(int64_t tile, int) noexcept override {
    int64_t group = tile / num_row_blocks_;
    const Part* part = parts_.data();
    for (; group >= num_groups_of(*part); ++part) group -= num_groups_of(*part);
    LinearArgs args = part->args;
    if (scratch_ != nullptr) args.quantized = static_cast<const QuantizedGroup*>(scratch_->data());
    args.quantized_stride = quantized_stride(rows_);
    const int64_t first_row = tile % num_row_blocks_ * rows_per_block_;
    const int64_t first_panel = group * panels_per_group_;
    weight_kernels(part->format)
        .linear(args, first_row, std::min(first_row + rows_per_block_, rows_), first_panel,
                std::min(first_panel + panels_per_group_, part->num_panels));
  }

 private:
  static constexpr int64_t kBlockRows = 48;

  struct Part {
    LinearArgs args;
    WeightFormat format;
    int64_t num_panels;
  };

  int64_t num_groups_of(const Part& part) const {
    return (part.num_panels + panels_per_group_ - 1) / panels_per_group_;
  }

  const MatrixPtr weight_;  // keeps the panels
  const bool on_outputs_;
  const std::shared_ptr<Scratch> scratch_;  // of x quantised; nullptr: x was given so
  std::vector<Part> parts_;
  int64_t num_panels_ = 0, panel_bytes_ = 1;
  int64_t rows_ = 0, rows_per_block_ = 1, num_row_blocks_ = 1, panels_per_group_ = 1;
};

}  // namespace

std::unique_ptr<Op> make_embedding(const int32_t* token_ids, MatrixPtr weight, int64_t first_row, float* out,
                                   int64_t out_stride) {
  check_address("token_ids", token_ids);
  check_rows("out", out, out_stride, weight->k());
  return std::make_unique<EmbeddingOp>(token_ids, std::move(weight), first_row, out, out_stride);
}

std::unique_ptr<Op> make_quantize(const float* x, int64_t x_stride, int64_t k, bool on_outputs,
                                  const std::shared_ptr<Scratch>& scratch) {
  QuantizeArgs args{};
  args.x = x, args.x_stride = x_stride, args.k = k;
  args.out.quantized = true;
  return std::make_unique<QuantizeOp>(args, on_outputs, scratch);
}

std::vector<std::unique_ptr<Op>> make_linear(const float* x, int64_t x_stride, const MatrixPtr& weight,
                                             const float* bias, float* out, int64_t out_stride,
                                             bool on_outputs, const std::shared_ptr<Scratch>& scratch) {
  check_at_least("weight.n", weight->n(), 1);
  check_rows("x", x, x_stride, weight->k());
  check_rows("out", out, out_stride, weight->n());
  std::vector<std::unique_ptr<Op>> ops;
  const auto& segments = weight->segments();
  if (std::any_of(segments.begin(), segments.end(),
                  [](const auto& segment) { return format_info(segment.format).quantized; })) {
    ops.push_back(make_quantize(x, x_stride, weight->k(), on_outputs, scratch));
  }
  LinearArgs args{};
  args.x = x, args.x_stride = x_stride, args.k = weight->k();
  args.bias = bias, args.out = out, args.out_stride = out_stride;
  ops.push_back(std::make_unique<LinearOp>(args, weight, on_outputs, scratch));
  return ops;
}

std::unique_ptr<Op> make_linear_of_quantized(const QuantizedGroup* x, const MatrixPtr& weight,
                                             const float* bias, float* out, int64_t out_stride,
                                             bool on_outputs) {
  check_at_least("weight.n", weight->n(), 1);
  check_address("x", x);
  check_rows("out", out, out_stride, weight->n());
  if (!weight->is_quantized()) {
    throw std::invalid_argument("a product with quantised x takes quantised weights only");
  }
  LinearArgs args{};
  args.quantized = x, args.k = weight->k();
  args.bias = bias, args.out = out, args.out_stride = out_stride;
  return std::make_unique<LinearOp>(args, weight, on_outputs, nullptr);
}

}  // namespace streamllm::cpu
