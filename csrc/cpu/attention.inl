// Paged attention: one path for prefill and decode (a decode is a prefill whose rows are the query heads
// that share a KV head).
//
// The order of every row's arithmetic depends on absolute positions alone. The context is cut into
// partitions of kPartition positions; each gives a maximum, a sum and an output (as in FlashAttention),
// merged in order of position. A score is one chain over the head's dimensions; values are added in order
// of the keys, and only those that the row sees: other slots may hold anything, NaN included.
#pragma once

#include "elementwise.inl"
#include "kernels.hpp"
#include "simd.hpp"

namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE {

// Rows whose scores are computed together, key tiles and 16-wide value slices that go with them in registers.
inline constexpr int kBlockRows = kAccumulators >= 24 ? kAttentionBlockRows : 3;
inline constexpr int kScoreTiles = kAccumulators >= 24 ? 4 : kAccumulators >= 6 ? 2 : 1;
inline constexpr int kValueSlices = kScoreTiles;
static_assert(kBlockRows <= kAttentionBlockRows);

inline constexpr float kNegativeInfinity = -__builtin_inff();

// The running softmax of one row: output not yet divided by `sum`, relative to `maximum`.
struct SoftmaxState {
  float maximum;
  float sum;  // 0: nothing seen yet
};

struct Range {  // of keys, relative to the partition
  int begin, end;
};

// Key tiles that are scored together, and what is read after them.
template <typename KV>
struct TileGroup {
  const KV* keys[kScoreTiles];
  const KV* values[kScoreTiles];
  const KV* next_keys[kScoreTiles];
};

// scores[r][16 * t + lane] = q[r] . key, for kScoreTiles key tiles. FETCH: their
// values and the next keys are fetched along the way.
template <int ROWS, bool FETCH, typename KV>
[[gnu::flatten, gnu::noinline]] void score_tiles(const float* q, int head_dim, const TileGroup<KV>& group,
                                                 float* scores) {
  Vec16 sum[ROWS][kScoreTiles];
  unroll<ROWS>([&](int r) { unroll<kScoreTiles>([&](int t) { sum[r][t] = splat(0.0f); }); });
  for (int d = 0; d < head_dim; ++d) {
    Vec16 key[kScoreTiles];
    unroll<kScoreTiles>([&](int t) {
      key[t] = load(group.keys[t] + d * kKeyTile);
      if constexpr (FETCH) {
        prefetch(group.values[t] + d * kKeyTile);
        prefetch(group.next_keys[t] + d * kKeyTile);
      }
    });
    unroll<ROWS>([&](int r) {
      const Vec16 value = splat(q[r * head_dim + d]);
      unroll<kScoreTiles>([&](int t) { sum[r][t] = fma(value, key[t], sum[r][t]); });
    });
  }
  unroll<ROWS>([&](int r) {
    unroll<kScoreTiles>([&](int t) { store(scores + r * kPartition + t * kKeyTile, sum[r][t]); });
  });
}

// out[r][0 : 16 * SLICES] += p[r][key] * value[key], keys in order.
template <int ROWS, int SLICES, bool LOW8, typename KV>
[[gnu::flatten, gnu::noinline]] void add_values(const float* p, const KV* const* tiles, Range keys,
                                                int head_dim, int dim, float* out, int out_stride) {
  Vec16 sum[ROWS][SLICES];
  unroll<ROWS>(
      [&](int r) { unroll<SLICES>([&](int s) { sum[r][s] = load(out + r * out_stride + s * 16); }); });
  for (int key = keys.begin; key < keys.end;) {
    const int tile_end = (key / kKeyTile + 1) * kKeyTile;
    const int end = tile_end < keys.end ? tile_end : keys.end;
    const KV* row = tiles[key / kKeyTile] + key % kKeyTile * head_dim + dim;
    for (; key < end; ++key, row += head_dim) {
      Vec16 value[SLICES];
      unroll<SLICES>([&](int s) {
        if constexpr (LOW8) {
          value[s] = load_low8(row);
        } else {
          value[s] = load(row + s * 16);
        }
      });
      unroll<ROWS>([&](int r) {
        const Vec16 weight = splat(p[r * kPartition + key]);
        unroll<SLICES>([&](int s) { sum[r][s] = fma(weight, value[s], sum[r][s]); });
      });
    }
  }
  unroll<ROWS>(
      [&](int r) { unroll<SLICES>([&](int s) { store(out + r * out_stride + s * 16, sum[r][s]); }); });
}

template <int ROWS, typename KV>
inline void add_all_values(const float* p, const KV* const* tiles, Range keys, int head_dim, float* out,
                           int out_stride) {
  int dim = 0;
  for (; dim + 16 * kValueSlices <= head_dim; dim += 16 * kValueSlices) {
    add_values<ROWS, kValueSlices, false>(p, tiles, keys, head_dim, dim, out + dim, out_stride);
  }
  for (; dim + 16 <= head_dim; dim += 16) {
    add_values<ROWS, 1, false>(p, tiles, keys, head_dim, dim, out + dim, out_stride);
  }
  if (dim < head_dim) add_values<ROWS, 1, true>(p, tiles, keys, head_dim, dim, out + dim, out_stride);
}

// Calls function.template operator()<ROWS>() for rows in 1 .. kBlockRows.
template <int ROWS = 1, typename Function>
inline void with_rows(int rows, Function function) {
  if constexpr (ROWS < kBlockRows) {
    if (rows > ROWS) return with_rows<ROWS + 1>(rows, function);
  }
  function.template operator()<ROWS>();
}

// Turns scores into exp(score - maximum), with masked keys at 0.
inline SoftmaxState softmax(const AttentionArgs& args, float* scores, Range keys) {
  const int first_tile = keys.begin / kKeyTile, last_tile = (keys.end - 1) / kKeyTile;
  const Vec16 scale = splat(args.scale), cap = splat(args.soft_cap);
  Vec16 maximum = splat(kNegativeInfinity);
  for (int tile = first_tile; tile <= last_tile; ++tile) {
    float* lanes = scores + tile * kKeyTile;
    Vec16 score = load(lanes) * scale;
    if (args.soft_cap != 0.0f) score = cap * tanh(score / cap);
    const int begin = keys.begin - tile * kKeyTile, end = keys.end - tile * kKeyTile;
    if (begin > 0 || end < kKeyTile) {
      const Mask16 visible = lanes_between(begin > 0 ? begin : 0, end < kKeyTile ? end : kKeyTile);
      score = select(visible, score, splat(kNegativeInfinity));
    }
    maximum = max(maximum, score);
    store(lanes, score);
  }
  const float row_maximum = max_lanes(maximum);
  Vec16 sum = splat(0.0f);
  for (int tile = first_tile; tile <= last_tile; ++tile) {
    float* lanes = scores + tile * kKeyTile;
    const Vec16 weight = exp(load(lanes) - splat(row_maximum));
    sum = sum + weight;
    store(lanes, weight);
  }
  return {row_maximum, sum_lanes(sum)};
}

inline void merge(SoftmaxState& state, float* out, const SoftmaxState& other, const float* other_out,
                  int dim) {
  if (state.sum == 0.0f) {
    state = other;
    std::memcpy(out, other_out, static_cast<size_t>(dim) * sizeof(float));
    return;
  }
  const float maximum = state.maximum > other.maximum ? state.maximum : other.maximum;
  const float a = exp_scalar(state.maximum - maximum), b = exp_scalar(other.maximum - maximum);
  state = {maximum, state.sum * a + other.sum * b};
  for (int d = 0; d < dim; d += 16) {
    store(out + d, fma(load(out + d), splat(a), load(other_out + d) * splat(b)));
  }
}

template <typename KV>
struct PartitionTiles {
  const KV* keys[kPartitionTiles];  // nullptr where no row of the query tile sees a key
  const KV* values[kPartitionTiles];
};

template <typename KV>
inline PartitionTiles<KV> partition_tiles(const AttentionArgs& args, int sequence, int kv_head, int base,
                                          Range keys) {
  PartitionTiles<KV> tiles = {};
  const int32_t* table = reinterpret_cast<const int32_t*>(args.block_tables[sequence]);
  for (int tile = keys.begin / kKeyTile; tile <= (keys.end - 1) / kKeyTile; ++tile) {
    const int position = base + tile * kKeyTile;
    const int64_t block = table[position / args.block_size];
    // Both caches hold block_size * head_dim elements a block and head, 16 * head_dim a key tile.
    const int64_t offset =
        ((block * args.num_kv_heads + kv_head) * args.block_size + position % args.block_size) *
        args.head_dim;
    tiles.keys[tile] = static_cast<const KV*>(args.key_cache) + offset;
    tiles.values[tile] = static_cast<const KV*>(args.value_cache) + offset;
  }
  return tiles;
}

struct Scratch {
  float* scores;   // [kAttentionBlockRows][kPartition]
  float* partial;  // [kAttentionBlockRows][padded_dim]
  float* out;      // [rows][padded_dim]
  float* q;        // [rows][head_dim]
  SoftmaxState* states;
};

// One partition for `rows` <= kBlockRows consecutive rows of a query tile, the first of which is `row`.
// fetch: nobody has read the partition yet, and few will, as in a decode: memory is what they wait for.
template <typename KV>
inline void attend_block(const AttentionArgs& args, const PartitionTiles<KV>& tiles, const Range* visible,
                         int row, int rows, bool fetch, const Scratch& scratch, int padded_dim) {
  Range any{kPartition, 0}, all{0, kPartition};  // keys that some row sees, that each row sees
  for (int r = 0; r < rows; ++r) {
    const Range keys = visible[r];
    if (keys.begin < keys.end) {
      any = {keys.begin < any.begin ? keys.begin : any.begin, keys.end > any.end ? keys.end : any.end};
    }
    all = {keys.begin > all.begin ? keys.begin : all.begin, keys.end < all.end ? keys.end : all.end};
  }
  if (any.begin >= any.end) return;

  const int last_tile = (any.end - 1) / kKeyTile;
  for (int tile = any.begin / kKeyTile; tile <= last_tile; tile += kScoreTiles) {
    TileGroup<KV> group;
    for (int t = 0; t < kScoreTiles; ++t) {
      // Past the last visible tile any other will do: nobody reads those scores.
      const int current = tile + t < last_tile ? tile + t : last_tile;
      const int next = current + kScoreTiles < last_tile ? current + kScoreTiles : last_tile;
      group.keys[t] = tiles.keys[current];
      group.values[t] = tiles.values[current];
      group.next_keys[t] = tiles.keys[next];
    }
    const float* q = scratch.q + row * args.head_dim;
    float* scores = scratch.scores + tile * kKeyTile;
    with_rows(rows, [&]<int ROWS>() {
      if (fetch) {
        score_tiles<ROWS, true>(q, args.head_dim, group, scores);
      } else {
        score_tiles<ROWS, false>(q, args.head_dim, group, scores);
      }
    });
  }

  SoftmaxState states[kBlockRows];
  for (int r = 0; r < rows; ++r) {
    if (visible[r].begin < visible[r].end)
      states[r] = softmax(args, scratch.scores + r * kPartition, visible[r]);
  }

  std::memset(scratch.partial, 0, static_cast<size_t>(rows) * padded_dim * sizeof(float));
  const auto add_row = [&](int r, Range keys) {
    if (keys.begin >= keys.end) return;
    add_all_values<1>(scratch.scores + r * kPartition, tiles.values, keys, args.head_dim,
                      scratch.partial + r * padded_dim, padded_dim);
  };
  if (all.begin < all.end) {
    for (int r = 0; r < rows; ++r) add_row(r, {visible[r].begin, all.begin});
    with_rows(rows, [&]<int ROWS>() {
      add_all_values<ROWS>(scratch.scores, tiles.values, all, args.head_dim, scratch.partial, padded_dim);
    });
    for (int r = 0; r < rows; ++r) add_row(r, {all.end, visible[r].end});
  } else {
    for (int r = 0; r < rows; ++r) add_row(r, visible[r]);
  }

  for (int r = 0; r < rows; ++r) {
    if (visible[r].begin >= visible[r].end) continue;
    merge(scratch.states[row + r], scratch.out + (row + r) * padded_dim, states[r],
          scratch.partial + r * padded_dim, padded_dim);
  }
}

template <typename KV>
inline void attend(const AttentionArgs& args, const QueryTile& query, int kv_head, float* memory) {
  const int head_dim = args.head_dim, padded_dim = (head_dim + 15) / 16 * 16;
  const int group = args.num_heads / args.num_kv_heads, rows = query.num_rows * group;
  Scratch scratch;
  scratch.scores = memory;
  scratch.partial = scratch.scores + kAttentionBlockRows * kPartition;
  scratch.out = scratch.partial + kAttentionBlockRows * padded_dim;
  scratch.q = scratch.out + rows * padded_dim;
  scratch.states = reinterpret_cast<SoftmaxState*>(scratch.q + rows * head_dim);
  std::memset(scratch.out, 0, static_cast<size_t>(rows) * padded_dim * sizeof(float));
  for (int row = 0; row < rows; ++row) {
    scratch.states[row] = {kNegativeInfinity, 0.0f};
    const float* q = args.q + (query.first_row + row / group) * args.q_stride +
                     (static_cast<int64_t>(kv_head) * group + row % group) * head_dim;
    std::memcpy(scratch.q + row * head_dim, q, static_cast<size_t>(head_dim) * sizeof(float));
  }

  // Token i of the tile sits at first_position + i, and sees the keys of [first_key(i), first_position + i].
  const int first_position =
      args.context_lens[query.sequence] - args.query_start[query.sequence + 1] + query.first_row;
  const auto first_key = [&](int token) {
    const int begin = args.window > 0 ? first_position + token - args.window + 1 : 0;
    return begin > 0 ? begin : 0;
  };
  const int end_key = first_position + query.num_rows;
  for (int base = first_key(0) / kPartition * kPartition; base < end_key; base += kPartition) {
    const auto within = [&](int begin, int end) {
      begin -= base, end -= base;
      return Range{begin > 0 ? begin : 0, end < kPartition ? end : kPartition};
    };
    const PartitionTiles<KV> tiles =
        partition_tiles<KV>(args, query.sequence, kv_head, base, within(first_key(0), end_key));
    for (int row = 0; row < rows; row += kBlockRows) {
      const int block_rows = rows - row < kBlockRows ? rows - row : kBlockRows;
      Range visible[kBlockRows];
      for (int r = 0; r < block_rows; ++r) {
        const int token = (row + r) / group;
        visible[r] = within(first_key(token), first_position + token + 1);
      }
      const bool fetch = row == 0 && query.num_rows == 1;
      attend_block(args, tiles, visible, row, block_rows, fetch, scratch, padded_dim);
    }
  }

  for (int row = 0; row < rows; ++row) {
    const float sum = scratch.states[row].sum;
    const Vec16 factor = splat(sum == 0.0f ? 0.0f : 1.0f / sum);  // a row that sees nothing gives 0, not NaN
    float* out = args.out + (query.first_row + row / group) * args.out_stride +
                 (static_cast<int64_t>(kv_head) * group + row % group) * head_dim;
    for_each_vector(head_dim, [&](int64_t d, int count) {
      store_lanes(out + d, load(scratch.out + row * padded_dim + d) * factor, count);
    });
  }
}

inline void paged_attention(const AttentionArgs& args, const QueryTile& query, int kv_head, float* scratch) {
  if (args.kv_type == KvType::float16) {
    attend<Half>(args, query, kv_head, scratch);
  } else {
    attend<float>(args, query, kv_head, scratch);
  }
}

}  // namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE
