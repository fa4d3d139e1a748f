#include "ops.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "checks.hpp"

namespace streamllm::cpu {

namespace {

// An operation on independent rows: `Kernel` is the table's member that does a range of them.
template <typename Args, auto Kernel>
class RowOp : public Op {
 public:
  RowOp(const Args& args, int64_t elements_per_row)
      : args_(args), rows_per_tile_(light_rows_per_tile(elements_per_row)) {}

  int64_t prepare(const RunSizes& sizes, int) override {
    rows_ = sizes.tokens;
    return (rows_ + rows_per_tile_ - 1) / rows_per_tile_;
  }

  void run_tile(int64_t tile, int) noexcept override {
    const int64_t first = tile * rows_per_tile_;
    (kernels().*Kernel)(args_, first, std::min(first + rows_per_tile_, rows_));
  }

 private:
  const Args args_;
  const int64_t rows_per_tile_;
  int64_t rows_ = 0;
};

class PagedAttentionOp final : public Op {
 public:
  PagedAttentionOp(const AttentionArgs& args, int num_threads)
      : args_(args),
        scratch_floats_((attention_scratch_floats(group(), args.head_dim) + 15) / 16 * 16),
        scratch_(static_cast<size_t>(scratch_floats_) * num_threads) {}

  int64_t prepare(const RunSizes& sizes, int) override {
    tiles_.clear();
    const int32_t* start = args_.query_start;
    if (sizes.sequences > 0 && (start[0] != 0 || start[sizes.sequences] > sizes.tokens)) {
      throw std::invalid_argument("query_start must rise from 0 to at most num_tokens");
    }
    const int32_t tile_tokens = attention_tile_tokens(group());
    for (int32_t s = 0; s < sizes.sequences; ++s) {
      if (start[s + 1] < start[s] || args_.context_lens[s] < start[s + 1] - start[s]) {
        throw std::invalid_argument(
            "sequence " + std::to_string(s) +
            ": query_start must not fall, and context_lens must cover the sequence's rows");
      }
      for (int32_t row = start[s]; row < start[s + 1]; row += tile_tokens) {
        tiles_.push_back({s, row, std::min(tile_tokens, start[s + 1] - row)});
      }
    }
    return static_cast<int64_t>(tiles_.size()) * args_.num_kv_heads;
  }

  void run_tile(int64_t tile, int thread) noexcept override {
    kernels().paged_attention(args_, tiles_[static_cast<size_t>(tile / args_.num_kv_heads)],
                              static_cast<int>(tile % args_.num_kv_heads),
                              &scratch_[thread * scratch_floats_]);
  }

 private:
  int group() const { return args_.num_heads / args_.num_kv_heads; }

  const AttentionArgs args_;
  const int64_t scratch_floats_;
  std::vector<float> scratch_;
  std::vector<QueryTile> tiles_;
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

void check_cache(int num_heads, int num_kv_heads, int head_dim, int block_size, const void* key_cache,
                 const void* value_cache) {
  check_at_least("num_kv_heads", num_kv_heads, 1);
  if (num_heads < num_kv_heads || num_heads % num_kv_heads != 0) {
    throw std::invalid_argument("num_heads must be a multiple of num_kv_heads, not " +
                                std::to_string(num_heads) + " for " + std::to_string(num_kv_heads));
  }
  if (head_dim < 8 || head_dim > kMaxHeadDim || head_dim % 8 != 0) {
    throw std::invalid_argument("head_dim must be a multiple of 8 up to " + std::to_string(kMaxHeadDim) +
                                ", not " + std::to_string(head_dim));
  }
  if (block_size < kKeyTile || block_size % kKeyTile != 0) {
    throw std::invalid_argument("block_size must be a multiple of " + std::to_string(kKeyTile) + ", not " +
                                std::to_string(block_size));
  }
  check_address("key_cache", key_cache);
  check_address("value_cache", value_cache);
}

}  // namespace

std::unique_ptr<Op> make_rms_norm(const RmsNormArgs& args) {
  check_at_least("dim", args.dim, 1);
  check_rows("x", args.x, args.x_stride, args.dim);
  if (args.residual != nullptr) check_rows("residual", args.residual, args.residual_stride, args.dim);
  check_address("weight", args.weight);
  check_rows("out", args.out, args.out_stride, args.dim);
  return std::make_unique<RowOp<RmsNormArgs, &Kernels::rms_norm>>(args, args.dim);
}

std::unique_ptr<Op> make_rotary_and_cache(const RotaryArgs& args) {
  check_cache(args.num_heads, args.num_kv_heads, args.head_dim, args.block_size, args.key_cache,
              args.value_cache);
  if (args.rotary_dim < 0 || args.rotary_dim > args.head_dim || args.rotary_dim % 2 != 0) {
    throw std::invalid_argument("rotary_dim must be even and at most head_dim = " +
                                std::to_string(args.head_dim) + ", not " + std::to_string(args.rotary_dim));
  }
  const int64_t width = int64_t{args.num_heads + 2 * args.num_kv_heads} * args.head_dim;
  check_rows("qkv", args.qkv, args.qkv_stride, width);
  check_address("cos", args.cos);
  check_address("sin", args.sin);
  check_address("rope_rows", args.rope_rows);
  check_address("slot_mapping", args.slot_mapping);
  return std::make_unique<RowOp<RotaryArgs, &Kernels::rotary_and_cache>>(args, width);
}

std::unique_ptr<Op> make_paged_attention(const AttentionArgs& args, int num_threads) {
  check_cache(args.num_heads, args.num_kv_heads, args.head_dim, args.block_size, args.key_cache,
              args.value_cache);
  const int64_t width = int64_t{args.num_heads} * args.head_dim;
  check_rows("q", args.q, args.q_stride, width);
  check_rows("out", args.out, args.out_stride, width);
  check_at_least("window", args.window, 0);
  if (!(args.soft_cap >= 0.0f) || !std::isfinite(args.soft_cap) || !std::isfinite(args.scale)) {
    throw std::invalid_argument("scale must be finite, and soft_cap finite and not negative (0: none)");
  }
  check_address("query_start", args.query_start);
  check_address("context_lens", args.context_lens);
  check_address("block_tables", args.block_tables);
  return std::make_unique<PagedAttentionOp>(args, num_threads);
}

std::unique_ptr<Op> make_silu_and_mul(const SiluArgs& args) {
  check_at_least("dim", args.dim, 1);
  check_rows("x", args.x, args.x_stride, 2 * args.dim);
  check_rows("out", args.out, args.out_stride, args.dim);
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

KvType kv_type_from_name(const char* name) {
  if (std::strcmp(name, "float32") == 0) return KvType::float32;
  if (std::strcmp(name, "float16") == 0) return KvType::float16;
  throw std::invalid_argument("kv_dtype must be float32 or float16, not '" + std::string(name) + "'");
}

}  // namespace streamllm::cpu
