// The operations on the KV cache.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <deque>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "checks.hpp"
#include "ops.hpp"

namespace streamllm::cpu {

namespace {

class RotaryOp final : public Op {
 public:
  RotaryOp(const RotaryArgs& args, int64_t width)
      : args_(args), rows_per_tile_(light_rows_per_tile(width)) {}

  int64_t prepare(const RunSizes& sizes, int) override {
    // Positions that lie side by side in the key cache share cache lines, which two threads would wrest from
    // each other: no tile ends between them.
    edges_.assign(1, 0);
    for (int64_t row = 0; row < sizes.tokens; edges_.push_back(row)) {
      row = std::min(row + rows_per_tile_, sizes.tokens);
      while (row < sizes.tokens && key_tile(row) == key_tile(row - 1)) ++row;
    }
    return static_cast<int64_t>(edges_.size()) - 1;
  }

  void run_tile(int64_t tile, int) noexcept override {
    const auto first = static_cast<size_t>(tile);
    kernels().rotary_and_cache(args_, edges_[first], edges_[first + 1]);
  }

 private:
  int64_t key_tile(int64_t row) const { return args_.slot_mapping[row] / kKeyTile; }

  const RotaryArgs args_;
  const int64_t rows_per_tile_;
  std::vector<int64_t> edges_;  // rows where a tile ends and the next one begins
};

class PagedAttentionOp final : public Op {
 public:
  PagedAttentionOp(const AttentionArgs& args, int num_threads)
      : args_(args),
        group_(args.num_heads / args.num_kv_heads),
        scratch_floats_((attention_scratch_floats(group_, args.head_dim) + 15) / 16 * 16) {
    scratch_.reserve(static_cast<size_t>(scratch_floats_) * num_threads * sizeof(float));
  }

  int64_t prepare(const RunSizes& sizes, int num_threads) override {
    check_sequences(sizes);
    if (args_.out.quantized) args_.out.stride = quantized_stride(sizes.tokens);
    cut(sizes, args_.num_kv_heads, false);
    const size_t wanted = num_threads > 1 ? static_cast<size_t>(num_threads) * kTilesPerThread : 0;
    if (tiles_.size() < wanted) cut(sizes, args_.num_kv_heads, true);
    if (tiles_.size() < wanted) cut(sizes, 1, true);
    return static_cast<int64_t>(tiles_.size());
  }

  void run_tile(int64_t index, int thread) noexcept override {
    // From the end: a chunk's last tiles see the most keys.
    const Tile& tile = tiles_[tiles_.size() - 1 - static_cast<size_t>(index)];
    AttentionTile work = tile.work;
    if (tile.split >= 0) work.partial = static_cast<float*>(partials_.data()) + tile.partial_offset;
    kernels().paged_attention(args_, work, static_cast<float*>(scratch_.data()) + thread * scratch_floats_);
    if (tile.split >= 0) finish(splits_[static_cast<size_t>(tile.split)]);
  }

 private:
  static constexpr size_t kTilesPerThread = 4;

  struct Tile {
    AttentionTile work;
    int32_t split;           // -1: none
    int64_t partial_offset;  // in floats
  };

  // Tiles of all partitions of a context, whose results are merged when the last one is there.
  struct Split {
    size_t first_tile;
    int num_tiles;
    std::atomic<int> num_missing;

    Split(size_t first, int count) : first_tile(first), num_tiles(count), num_missing(count) {}
  };

  void check_sequences(const RunSizes& sizes) const {
    const int32_t* start = args_.query_start;
    if (sizes.sequences > 0 && (start[0] != 0 || start[sizes.sequences] > sizes.tokens)) {
      throw std::invalid_argument("query_start must rise from 0 to at most num_tokens");
    }
    for (int64_t s = 0; s < sizes.sequences; ++s) {
      if (start[s + 1] < start[s] || args_.context_lens[s] < start[s + 1] - start[s]) {
        throw std::invalid_argument(
            "sequence " + std::to_string(s) +
            ": query_start must not fall, and context_lens must cover the sequence's rows");
      }
    }
  }

  // Tiles of at most `max_heads` KV heads, each with one partition only if `split`.
  void cut(const RunSizes& sizes, int max_heads, bool split) {
    tiles_.clear();
    splits_.clear();
    int64_t partial_floats = 0;
    const int32_t tile_tokens = attention_tile_tokens(group_);
    for (int32_t s = 0; s < sizes.sequences; ++s) {
      const int32_t end_row = args_.query_start[s + 1];
      for (int32_t row = args_.query_start[s]; row < end_row; row += tile_tokens) {
        const int32_t rows = std::min(tile_tokens, end_row - row);
        const int32_t end_position = args_.context_lens[s] - end_row + row + rows;
        const int32_t first_key = args_.window > 0 ? std::max(0, end_position - rows + 1 - args_.window) : 0;
        AttentionTile work{};
        work.sequence = s, work.first_row = row, work.num_rows = rows;
        work.first_partition = first_key / kPartition;
        work.end_partition = (end_position - 1) / kPartition + 1;
        const int heads = std::min(max_heads, attention_tile_heads(group_, rows));
        for (work.first_head = 0; work.first_head < args_.num_kv_heads; work.first_head += heads) {
          work.num_heads = std::min(heads, args_.num_kv_heads - work.first_head);
          if (split && work.end_partition - work.first_partition > 1) {
            add_partitions(work, partial_floats);
          } else {
            tiles_.push_back({work, -1, 0});
          }
        }
      }
    }
    partials_.reserve(static_cast<size_t>(partial_floats) * sizeof(float));
  }

  void add_partitions(AttentionTile work, int64_t& partial_floats) {
    const int num_partitions = work.end_partition - work.first_partition;
    splits_.emplace_back(tiles_.size(), num_partitions);
    for (int i = 0; i < num_partitions; ++i) {
      work.end_partition = work.first_partition + 1;
      tiles_.push_back({work, static_cast<int32_t>(splits_.size()) - 1, partial_floats});
      partial_floats += attention_result_floats(work.num_rows * group_ * work.num_heads, args_.head_dim);
      ++work.first_partition;
    }
  }

  void finish(Split& split) {
    if (split.num_missing.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    const Tile& first = tiles_[split.first_tile];
    AttentionTile work = first.work;
    work.partial = static_cast<float*>(partials_.data()) + first.partial_offset;
    kernels().merge_attention(args_, work, split.num_tiles);
  }

  AttentionArgs args_;
  const int group_;
  const int64_t scratch_floats_;
  Scratch scratch_, partials_;
  std::vector<Tile> tiles_;
  std::deque<Split> splits_;
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

void check_head_norm(const char* name, const RotaryNorm& norm, int64_t num_heads, int64_t head_dim) {
  if (norm.weight == nullptr || norm.dim == head_dim || norm.dim == num_heads * head_dim) return;
  throw std::invalid_argument(std::string(name) + " must be " + std::to_string(head_dim) +
                              " (each head) or " + std::to_string(num_heads * head_dim) +
                              " (all heads), not " + std::to_string(norm.dim));
}

}  // namespace

std::unique_ptr<Op> make_rotary_and_cache(const RotaryArgs& args) {
  check_cache(args.num_heads, args.num_kv_heads, args.head_dim, args.block_size, args.key_cache,
              args.value_cache);
  if (args.rotary_dim < 0 || args.rotary_dim > args.head_dim || args.rotary_dim % 2 != 0) {
    throw std::invalid_argument("rotary_dim must be even and at most head_dim = " +
                                std::to_string(args.head_dim) + ", not " + std::to_string(args.rotary_dim));
  }
  const int64_t width = int64_t{args.num_heads + 2 * args.num_kv_heads} * args.head_dim;
  check_rows("qkv", args.qkv, args.qkv_stride, width);
  check_head_norm("q_norm_dim", args.q_norm, args.num_heads, args.head_dim);
  check_head_norm("k_norm_dim", args.k_norm, args.num_kv_heads, args.head_dim);
  if (args.rotary_dim > 0) {
    check_address("cos", args.cos);
    check_address("sin", args.sin);
    check_address("rope_rows", args.rope_rows);
  }
  check_address("slot_mapping", args.slot_mapping);
  return std::make_unique<RotaryOp>(args, width);
}

std::unique_ptr<Op> make_paged_attention(const AttentionArgs& args, int num_threads) {
  check_cache(args.num_heads, args.num_kv_heads, args.head_dim, args.block_size, args.key_cache,
              args.value_cache);
  const int64_t width = int64_t{args.num_heads} * args.head_dim;
  check_rows("q", args.q, args.q_stride, width);
  check_output(args.out, args.out.quantized ? args.head_dim : width);
  check_at_least("window", args.window, 0);
  if (!(args.soft_cap >= 0.0f) || !std::isfinite(args.soft_cap) || !std::isfinite(args.scale)) {
    throw std::invalid_argument("scale must be finite, and soft_cap finite and not negative (0: none)");
  }
  check_address("query_start", args.query_start);
  check_address("context_lens", args.context_lens);
  check_address("block_tables", args.block_tables);
  return std::make_unique<PagedAttentionOp>(args, num_threads);
}

KvType kv_type_from_name(const char* name) {
  if (std::strcmp(name, "float32") == 0) return KvType::float32;
  if (std::strcmp(name, "float16") == 0) return KvType::float16;
  if (std::strcmp(name, "int8") == 0) return KvType::int8;
  throw std::invalid_argument("kv_dtype must be float32, float16 or int8, not '" + std::string(name) + "'");
}

}  // namespace streamllm::cpu
