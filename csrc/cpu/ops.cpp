#include "ops.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
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
  RowOp(const Args& args, bool on_outputs)
      : args_(args), on_outputs_(on_outputs), rows_per_tile_(light_rows_per_tile(args.dim)) {}

  int64_t prepare(const RunSizes& sizes, int) override {
    rows_ = on_outputs_ ? sizes.outputs : sizes.tokens;
    if constexpr (requires { args_.out.quantized; }) fit_output(args_.out, rows_);
    return (rows_ + rows_per_tile_ - 1) / rows_per_tile_;
  }

  void run_tile(int64_t tile, int) noexcept override {
    const int64_t first = tile * rows_per_tile_;
    (kernels().*Kernel)(args_, first, std::min(first + rows_per_tile_, rows_));
  }

 private:
  Args args_;
  const bool on_outputs_;
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

class HostCallOp final : public Op {
 public:
  HostCallOp(std::function<void(int64_t)> function, bool on_outputs, std::shared_ptr<RunFailure> failure)
      : function_(std::move(function)), on_outputs_(on_outputs), failure_(std::move(failure)) {}

  int64_t prepare(const RunSizes& sizes, int) override {
    rows_ = on_outputs_ ? sizes.outputs : sizes.tokens;
    return rows_ > 0 ? 1 : 0;
  }

  void run_tile(int64_t, int) noexcept override {
    try {
      function_(rows_);
    } catch (...) {
      *failure_ = std::current_exception();
    }
  }

 private:
  const std::function<void(int64_t)> function_;
  const bool on_outputs_;
  const std::shared_ptr<RunFailure> failure_;
  int64_t rows_ = 0;
};

void check_norm(const NormArgs& args) {
  check_at_least("dim", args.dim, 1);
  check_rows("x", args.x, args.x_stride, args.dim);
  if (args.residual != nullptr) check_rows("residual", args.residual, args.residual_stride, args.dim);
  check_address("weight", args.weight);
  check_output(args.out, args.dim);
}

}  // namespace

std::unique_ptr<Op> make_rms_norm(const NormArgs& args, bool on_outputs) {
  check_norm(args);
  return std::make_unique<RowOp<NormArgs, &Kernels::rms_norm>>(args, on_outputs);
}

std::unique_ptr<Op> make_layer_norm(const NormArgs& args, bool on_outputs) {
  check_norm(args);
  check_address("bias", args.bias);
  return std::make_unique<RowOp<NormArgs, &Kernels::layer_norm>>(args, on_outputs);
}

std::unique_ptr<Op> make_add(const AddArgs& args, bool on_outputs) {
  check_at_least("dim", args.dim, 1);
  check_rows("x", args.x, args.x_stride, args.dim);
  check_rows("other", args.sum, args.sum_stride, args.dim);
  return std::make_unique<RowOp<AddArgs, &Kernels::add_rows>>(args, on_outputs);
}

std::unique_ptr<Op> make_scale(const InPlaceArgs& args, bool on_outputs) {
  check_at_least("dim", args.dim, 1);
  check_rows("x", args.x, args.x_stride, args.dim);
  if (!std::isfinite(args.constant)) throw std::invalid_argument("factor must be finite");
  return std::make_unique<RowOp<InPlaceArgs, &Kernels::scale>>(args, on_outputs);
}

std::unique_ptr<Op> make_soft_cap(const InPlaceArgs& args, bool on_outputs) {
  check_at_least("dim", args.dim, 1);
  check_rows("x", args.x, args.x_stride, args.dim);
  if (!(args.constant > 0.0f) || !std::isfinite(args.constant)) {
    throw std::invalid_argument("cap must be finite and above 0");
  }
  return std::make_unique<RowOp<InPlaceArgs, &Kernels::soft_cap>>(args, on_outputs);
}

std::unique_ptr<Op> make_sigmoid_scale(const SigmoidScaleArgs& args, bool on_outputs) {
  check_at_least("dim", args.dim, 1);
  check_rows("x", args.x, args.x_stride, args.dim);
  check_rows("gate", args.gate, args.gate_stride, 1);
  return std::make_unique<RowOp<SigmoidScaleArgs, &Kernels::sigmoid_scale>>(args, on_outputs);
}

std::unique_ptr<Op> make_activate(const ActivationArgs& args, bool on_outputs) {
  check_at_least("dim", args.dim, 1);
  check_rows("x", args.x, args.x_stride, args.dim);
  check_output(args.out, args.dim);
  return std::make_unique<RowOp<ActivationArgs, &Kernels::activate>>(args, on_outputs);
}

std::unique_ptr<Op> make_gate_and_mul(const GateArgs& args, bool on_outputs) {
  check_at_least("dim", args.dim, 1);
  check_rows("x", args.x, args.x_stride, 2 * args.dim);
  if (!(args.limit >= 0.0f)) throw std::invalid_argument("limit must not be negative (0: none)");
  check_output(args.out, args.dim);
  return std::make_unique<RowOp<GateArgs, &Kernels::gate_and_mul>>(args, on_outputs);
}

std::unique_ptr<Op> make_gather_rows(const float* x, int64_t x_stride, const int32_t* indices, int64_t dim,
                                     float* out, int64_t out_stride) {
  check_at_least("dim", dim, 1);
  check_rows("x", x, x_stride, dim);
  check_address("indices", indices);
  check_rows("out", out, out_stride, dim);
  return std::make_unique<GatherRowsOp>(x, x_stride, indices, dim, out, out_stride);
}

std::unique_ptr<Op> make_host_call(std::function<void(int64_t)> function, bool on_outputs,
                                   std::shared_ptr<RunFailure> failure) {
  return std::make_unique<HostCallOp>(std::move(function), on_outputs, std::move(failure));
}

Activation activation_from_name(const char* name) {
  if (std::strcmp(name, "silu") == 0) return Activation::silu;
  if (std::strcmp(name, "gelu") == 0) return Activation::gelu;
  if (std::strcmp(name, "gelu_tanh") == 0) return Activation::gelu_tanh;
  if (std::strcmp(name, "relu") == 0) return Activation::relu;
  throw std::invalid_argument("activation must be silu, gelu, gelu_tanh or relu, not '" + std::string(name) +
                              "'");
}

}  // namespace streamllm::cpu
