#include "ops.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "checks.hpp"

namespace streamllm::cpu {

namespace {

void fit_output(OutputRows& out, int64_t rows) {
  if (out.quantized) out.stride = quantized_stride(rows);
}

// An operation on independent rows: `Kernel` is the table's member that does a range of them.
template <typename Args, auto Kernel>
class RowOp : public Op {
 public:
  RowOp(const Args& args, int64_t elements_per_row)
      : args_(args), rows_per_tile_(light_rows_per_tile(elements_per_row)) {}

  int64_t prepare(const RunSizes& sizes, int) override {
    rows_ = sizes.tokens;
    if constexpr (requires { args_.out.quantized; }) fit_output(args_.out, rows_);
    return (rows_ + rows_per_tile_ - 1) / rows_per_tile_;
  }

  void run_tile(int64_t tile, int) noexcept override {
    const int64_t first = tile * rows_per_tile_;
    (kernels().*Kernel)(args_, first, std::min(first + rows_per_tile_, rows_));
  }

 private:
  Args args_;
  const int64_t rows_per_tile_;
  int64_t rows_ = 0;
};

class GatherRowsOp final : public Op {
 public:
  GatherRowsOp(const float* x, int64_t x_stride, const int32_t* indices, int64_t dim, float* out,
               int64_t out_stride)
      : x_(x), x_stride_(x_stride), indices_(indices), dim_(dim), out_(out), out_stride_(out_stride) {}

  int64_t prepare(const RunSizes& sizes, int) override {
    rows_ = sizes.outputs;
    for (int64_t i = 0; i < rows_; ++i) {
      if (indices_[i] < 0 || indices_[i] >= sizes.tokens) {
        throw std::invalid_argument("indices must be below num_tokens = " + std::to_string(sizes.tokens) +
                                    ", not " + std::to_string(indices_[i]));
      }
    }
    return rows_ > 0 ? 1 : 0;
  }

  void run_tile(int64_t, int) noexcept override {
    for (int64_t i = 0; i < rows_; ++i) {
      std::memcpy(out_ + i * out_stride_, x_ + indices_[i] * x_stride_,
                  static_cast<size_t>(dim_) * sizeof(float));
    }
  }

 private:
  const float* const x_;
  const int64_t x_stride_;
  const int32_t* const indices_;
  const int64_t dim_;
  float* const out_;
  const int64_t out_stride_;
  int64_t rows_ = 0;
};

}  // namespace

std::unique_ptr<Op> make_rms_norm(const RmsNormArgs& args) {
  check_at_least("dim", args.dim, 1);
  check_rows("x", args.x, args.x_stride, args.dim);
  if (args.residual != nullptr) check_rows("residual", args.residual, args.residual_stride, args.dim);
  check_address("weight", args.weight);
  check_output(args.out, args.dim);
  return std::make_unique<RowOp<RmsNormArgs, &Kernels::rms_norm>>(args, args.dim);
}

std::unique_ptr<Op> make_silu_and_mul(const SiluArgs& args) {
  check_at_least("dim", args.dim, 1);
  check_rows("x", args.x, args.x_stride, 2 * args.dim);
  check_output(args.out, args.dim);
  return std::make_unique<RowOp<SiluArgs, &Kernels::silu_and_mul>>(args, args.dim);
}

std::unique_ptr<Op> make_gather_rows(const float* x, int64_t x_stride, const int32_t* indices, int64_t dim,
                                     float* out, int64_t out_stride) {
  check_at_least("dim", dim, 1);
  check_rows("x", x, x_stride, dim);
  check_address("indices", indices);
  check_rows("out", out, out_stride, dim);
  return std::make_unique<GatherRowsOp>(x, x_stride, indices, dim, out, out_stride);
}

}  // namespace streamllm::cpu
