// Paged attention: one path for prefill and decode (a decode is a prefill whose rows are the query heads
// that share a KV head).
//
// The order of every row's arithmetic depends on absolute positions alone. The context is cut into
// partitions of kPartition positions; each gives a maximum, a sum and an output (as in FlashAttention),
// merged in order of position, be they computed by one tile or by several (as in FlashDecoding). A score is
// one chain over the head's dimensions; values are added in order of the keys, and only those that the row
// sees: other slots may hold anything, NaN included.
#pragma once

#include "kernels.hpp"
#include "kv_cache.inl"
#include "rows.inl"
#include "simd.hpp"

namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE {

// Rows that a micro-kernel takes at once.
inline constexpr int kBlockRows = kAccumulators >= 6 ? 6 : kAccumulators;
// Whether values of float16 are converted once for all rows of a tile: it pays where sums of few tiles fit in
// the registers, so that each conversion feeds few products.
inline constexpr bool kConvert = kAccumulators < 24;
// Tiles that are gone through together, converted ones fitting in the first-level cache, and rows that go
// through a partition together.
inline constexpr int kGroupTiles = kConvert ? 4 : kPartitionTiles;
inline constexpr int kPassRows = kConvert ? 1 << 30 : kBlockRows;
// Key tiles, or 16-wide slices of values, whose sums go into registers with those of ROWS rows.
template <int ROWS>
inline constexpr int kSlices = ROWS * 4 <= kAccumulators ? 4 : ROWS * 2 <= kAccumulators ? 2 : 1;

inline constexpr float kNegativeInfinity = -__builtin_inff();

// Keys or values of up to kGroupTiles tiles; T is the cache's type, or float if they were converted.
template <typename T>
struct TileGroup {
  int first;  // number of the first one in the partition
  const T* tiles[kGroupTiles];
  const T* ahead[kGroupTiles];  // what is read in their stead next, if it is worth fetching
};

// Fetches BYTES from the cache line at `p` on.
template <int BYTES, typename T>
inline void prefetch_lines(const T* p) {
  for (int byte = 0; byte < BYTES; byte += 64) prefetch(reinterpret_cast<const char*>(p) + byte);
}

// scores[r][16 * t + lane] = q[r] . key, for kSlices<ROWS> tiles. FETCH: as much of the tiles `ahead` is
// fetched meanwhile, one after the other: memory gives most when it is read in order.
template <int ROWS, bool FETCH, typename T>
[[gnu::flatten, gnu::noinline]] void score_tiles(const float* q, int head_dim, const T* const* tiles,
                                                 const T* const* ahead, float* scores) {
  constexpr int kTiles = kSlices<ROWS>, kStep = kTiles * kKeyTile;
  Vec16 sum[ROWS][kTiles];
  unroll<ROWS>([&](int r) { unroll<kTiles>([&](int t) { sum[r][t] = splat(0.0f); }); });
  for (int part = 0, d = 0; part < kTiles; ++part) {
    [[maybe_unused]] const T* fetched = FETCH ? ahead[part] : nullptr;
    for (const int end = (part + 1) * head_dim / kTiles; d < end; ++d) {
      Vec16 key[kTiles];
      unroll<kTiles>([&](int t) { key[t] = load(tiles[t] + d * kKeyTile); });
      if constexpr (FETCH) {
        prefetch_lines<kStep * int{sizeof(T)}>(fetched);
        fetched += kStep;
      }
      unroll<ROWS>([&](int r) {
        const Vec16 value = splat(q[r * head_dim + d]);
        unroll<kTiles>([&](int t) { sum[r][t] = fma(value, key[t], sum[r][t]); });
      });
    }
  }
  unroll<ROWS>([&](int r) {
    unroll<kTiles>([&](int t) { store(scores + r * kPartition + t * kKeyTile, sum[r][t]); });
  });
}

// out[r][0 : 16 * SLICES] += p[r][key] * value[key][dim : dim + 16 * SLICES], for keys of the group in order.
// FETCH: as much of the group's tiles ahead is fetched meanwhile.
template <int ROWS, int SLICES, bool LOW8, bool FETCH, typename T>
[[gnu::flatten, gnu::noinline]] void add_values(const float* p, const TileGroup<T>& group, Range keys,
                                                int head_dim, int dim, float* out, int out_stride) {
  Vec16 sum[ROWS][SLICES];
  unroll<ROWS>(
      [&](int r) { unroll<SLICES>([&](int s) { sum[r][s] = load(out + r * out_stride + s * 16); }); });
  for (int key = keys.begin; key < keys.end;) {
    const int tile_end = (key / kKeyTile + 1) * kKeyTile;
    const int end = tile_end < keys.end ? tile_end : keys.end;
    const int tile = key / kKeyTile - group.first, offset = key % kKeyTile * head_dim + dim;
    const T* row = group.tiles[tile] + offset;
    [[maybe_unused]] const T* fetched = FETCH ? group.ahead[tile] + offset : nullptr;
    for (; key < end; ++key, row += head_dim) {
      if constexpr (FETCH) {
        prefetch_lines<SLICES * 16 * int{sizeof(T)}>(fetched);
        fetched += head_dim;
      }
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

template <int ROWS, bool FETCH, typename T>
inline void add_all_values(const float* p, const TileGroup<T>& group, Range keys, int head_dim, float* out,
                           int out_stride) {
  constexpr int kStep = kSlices<ROWS>;
  if (keys.begin >= keys.end) return;
  int dim = 0;
  for (; dim + 16 * kStep <= head_dim; dim += 16 * kStep) {
    add_values<ROWS, kStep, false, FETCH>(p, group, keys, head_dim, dim, out + dim, out_stride);
  }
  for (; dim + 16 <= head_dim; dim += 16) {
    add_values<ROWS, 1, false, FETCH>(p, group, keys, head_dim, dim, out + dim, out_stride);
  }
  if (dim < head_dim) add_values<ROWS, 1, true, FETCH>(p, group, keys, head_dim, dim, out + dim, out_stride);
}

// Calls function.template operator()<ROWS>(first) for blocks of ROWS <= kBlockRows rows from `first` on.
template <int ROWS = kBlockRows, typename Function>
inline void for_each_block(int rows, Function function, int first = 0) {
  for (; rows - first >= ROWS; first += ROWS) function.template operator()<ROWS>(first);
  if constexpr (ROWS > 1) for_each_block<ROWS - 1>(rows, function, first);
}

// Turns scores into exp(score - maximum), with masked keys at 0. If keys and values have scales, a key's is a
// factor of its score, and its value's one of the weight, once that has been counted.
template <typename KV>
inline SoftmaxState softmax(const AttentionArgs& args, const PartitionTiles<KV>& tiles, float* scores,
                            Range keys) {
  const int first_tile = keys.begin / kKeyTile, last_tile = (keys.end - 1) / kKeyTile;
  const Vec16 scale = splat(args.scale), cap = splat(args.soft_cap);
  Vec16 maximum = splat(kNegativeInfinity);
  for (int tile = first_tile; tile <= last_tile; ++tile) {
    float* lanes = scores + tile * kKeyTile;
    Vec16 score = load(lanes) * scale;
    if constexpr (kScaled<KV>) score = score * load(tile_scales(tiles.keys[tile], args.head_dim));
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
    Vec16 weight = exp(load(lanes) - splat(row_maximum));
    sum = sum + weight;
    if constexpr (kScaled<KV>) weight = weight * load(tile_scales(tiles.values[tile], args.head_dim));
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

inline AttentionResult attention_result(float* memory, int rows, int padded_dim) {
  return {reinterpret_cast<SoftmaxState*>(memory + rows * padded_dim), memory};
}

struct Scratch {
  float* scores;         // [rows of a head][kPartition]
  float* converted;      // [kGroupTiles][kKeyTile * head_dim], if kConvert
  float* partial;        // [rows of a head][padded_dim]
  float* q;              // [rows][head_dim]
  SoftmaxState* states;  // [rows of a head]
  Range* visible;        // [rows of a head]
  AttentionResult result;
};

// Rows of a tile: those of its first KV head (token by token, query head by query head), then the next one's.
struct TileRows {
  int group;     // query heads a KV head
  int per_head;  // rows
  int total;

  int64_t token(const AttentionTile& tile, int row) const { return tile.first_row + row % per_head / group; }
  int64_t query_head(const AttentionTile& tile, int row) const {
    return int64_t{tile.first_head + row / per_head} * group + row % group;
  }
};

inline TileRows tile_rows(const AttentionArgs& args, const AttentionTile& tile) {
  const int group = args.num_heads / args.num_kv_heads;
  return {group, tile.num_rows * group, tile.num_rows * group * tile.num_heads};
}

// Rows of one KV head that go through a partition together.
template <typename KV>
struct RowPass {
  const PartitionTiles<KV>& tiles;
  const Range* visible;  // [rows] keys that each row sees: the later the row, the later first and last
  int rows;
  int first_row;  // in the tile
  // Few rows read these keys, as in a decode, so that memory is what they wait for: while scores are computed
  // the values are fetched, while values are added the keys that come next.
  bool fetch;
  const KV* const* next_keys;  // [kPartitionTiles]

  bool empty() const { return visible[0].begin >= visible[rows - 1].end; }
  int first_tile() const { return visible[0].begin / kKeyTile; }
  int last_tile() const { return (visible[rows - 1].end - 1) / kKeyTile; }

  // Those of the values, and of the keys that come next: whatever else they hold is fetched on the way.
  void prefetch_scales(int head_dim) const {
    for (int tile = first_tile(); tile <= last_tile(); ++tile) {
      prefetch(tile_scales(tiles.values[tile], head_dim));
      prefetch(tile_scales(next_keys[tile], head_dim));
    }
  }
};

// Calls function(group) for all tiles of the partition that some row sees, in order, converted if kConvert
// says so and several blocks of rows read them.
template <typename KV, typename Function>
inline void for_each_group(const RowPass<KV>& pass, const KV* const* tiles, const KV* const* ahead,
                           int head_dim, float* converted, Function function) {
  const int first = pass.first_tile(), last = pass.last_tile(), tile_elements = kKeyTile * head_dim;
  const bool convert = kConvert && sizeof(KV) < sizeof(float) && pass.rows > kBlockRows;
  for (int tile = first / kGroupTiles * kGroupTiles; tile <= last; tile += kGroupTiles) {
    TileGroup<KV> group;
    TileGroup<float> wide;
    group.first = wide.first = tile;
    for (int t = 0; t < kGroupTiles; ++t) {
      // Beyond the visible tiles any other will do: nobody reads those scores.
      const int current = tile + t < first ? first : tile + t < last ? tile + t : last;
      group.tiles[t] = tiles[current];
      group.ahead[t] = ahead[current];
      wide.tiles[t] = wide.ahead[t] = converted + (current - tile) * tile_elements;
      if (convert && current == tile + t) {
        float* target = converted + t * tile_elements;
        for (int i = 0; i < tile_elements; i += 16) store(target + i, load(tiles[current] + i));
      }
    }
    if (convert) {
      function(wide);
    } else {
      function(group);
    }
  }
}

template <typename KV>
inline void score(const RowPass<KV>& pass, int head_dim, const Scratch& scratch) {
  const int last = pass.last_tile();
  const float* q = scratch.q + pass.first_row * head_dim;
  const auto score_group = [&]<typename T>(const TileGroup<T>& group) {
    for_each_block(pass.rows, [&]<int ROWS>(int row) {
      for (int slice = 0; slice < kGroupTiles && group.first + slice <= last; slice += kSlices<ROWS>) {
        if (group.first + slice + kSlices<ROWS> <= pass.first_tile()) continue;
        float* scores = scratch.scores + row * kPartition + (group.first + slice) * kKeyTile;
        const T* const* tiles = group.tiles + slice;
        if (sizeof(T) == sizeof(KV) && pass.fetch && row == 0) {
          score_tiles<ROWS, true>(q, head_dim, tiles, group.ahead + slice, scores);
        } else {
          score_tiles<ROWS, false, T>(q + row * head_dim, head_dim, tiles, nullptr, scores);
        }
      }
    });
  };
  for_each_group(pass, pass.tiles.keys, pass.tiles.values, head_dim, scratch.converted, score_group);
}

template <typename KV>
inline void add_weighted_values(const RowPass<KV>& pass, int head_dim, int padded_dim,
                                const Scratch& scratch) {
  std::memset(scratch.partial, 0, static_cast<size_t>(pass.rows) * padded_dim * sizeof(float));
  const auto add_group = [&]<typename T>(const TileGroup<T>& group) {
    const Range span{group.first * kKeyTile, (group.first + kGroupTiles) * kKeyTile};
    const auto add = [&]<int ROWS>(int row, int begin, int end) {
      const Range keys{begin > span.begin ? begin : span.begin, end < span.end ? end : span.end};
      const float* weights = scratch.scores + row * kPartition;
      float* sums = scratch.partial + row * padded_dim;
      if (sizeof(T) == sizeof(KV) && pass.fetch && row == 0) {
        add_all_values<ROWS, true>(weights, group, keys, head_dim, sums, padded_dim);
      } else {
        add_all_values<ROWS, false>(weights, group, keys, head_dim, sums, padded_dim);
      }
    };
    const auto add_one = [&](int row, int begin, int end) { add.template operator()<1>(row, begin, end); };
    for_each_block(pass.rows, [&]<int ROWS>(int row) {
      // What each row of the block sees; what only some of them see is added row by row.
      const Range* visible = pass.visible + row;
      const Range all{visible[ROWS - 1].begin, visible[0].end};
      if (all.begin < all.end) {
        for (int r = 0; r < ROWS; ++r) add_one(row + r, visible[r].begin, all.begin);
        add.template operator()<ROWS>(row, all.begin, all.end);
        for (int r = 0; r < ROWS; ++r) add_one(row + r, all.end, visible[r].end);
      } else {
        for (int r = 0; r < ROWS; ++r) add_one(row + r, visible[r].begin, visible[r].end);
      }
    });
  };
  for_each_group(pass, pass.tiles.values, pass.next_keys, head_dim, scratch.converted, add_group);
}

template <typename KV>
inline void attend(const AttentionArgs& args, const RowPass<KV>& pass, int padded_dim,
                   const Scratch& scratch) {
  if (pass.empty()) return;
  if constexpr (kScaled<KV>) {
    if (pass.fetch) pass.prefetch_scales(args.head_dim);
  }
  score(pass, args.head_dim, scratch);
  for (int row = 0; row < pass.rows; ++row) {
    const Range keys = pass.visible[row];
    if (keys.begin >= keys.end) continue;
    scratch.states[row] = softmax(args, pass.tiles, scratch.scores + row * kPartition, keys);
  }
  add_weighted_values(pass, args.head_dim, padded_dim, scratch);
  for (int r = 0; r < pass.rows; ++r) {
    const Range keys = pass.visible[r];
    if (keys.begin >= keys.end) continue;
    const int row = pass.first_row + r;
    merge(scratch.result.states[row], scratch.result.out + row * padded_dim, scratch.states[r],
          scratch.partial + r * padded_dim, padded_dim);
  }
}

// What makes a mean of a row's weighted sum. The head's sink, if there is one, joins the softmax here, after
// all partitions, however they were split. A row that sees nothing gives 0, not NaN.
inline float output_factor(const SoftmaxState& state, const float* sink) {
  if (state.sum == 0.0f) return 0.0f;
  if (sink == nullptr) return 1.0f / state.sum;
  const float maximum = state.maximum > *sink ? state.maximum : *sink;
  const float weight = exp_scalar(state.maximum - maximum);
  return weight / (state.sum * weight + exp_scalar(*sink - maximum));
}

// The tile's part of the output, from the sums over all its keys.
inline void write_output(const AttentionArgs& args, const AttentionTile& tile, const AttentionResult& result,
                         int padded_dim) {
  const TileRows rows = tile_rows(args, tile);
  for (int row = 0; row < rows.total; ++row) {
    const int64_t head = rows.query_head(tile, row);
    const float* sink = args.sinks != nullptr ? args.sinks + head : nullptr;
    const Vec16 factor = splat(output_factor(result.states[row], sink));
    const float* from = result.out + row * padded_dim;
    write_row(args.out, rows.token(tile, row), head * args.head_dim, args.head_dim,
              [&](int64_t d, int) { return load(from + d) * factor; });
  }
}

inline Scratch carve(float* memory, const TileRows& rows, int head_dim, float* partial) {
  const int padded_dim = attention_padded_dim(head_dim);
  Scratch scratch;
  scratch.scores = memory;
  scratch.converted = scratch.scores + rows.per_head * kPartition;
  scratch.partial = scratch.converted + (kConvert ? kGroupTiles * kKeyTile * head_dim : 0);
  scratch.q = scratch.partial + rows.per_head * padded_dim;
  scratch.states = reinterpret_cast<SoftmaxState*>(scratch.q + rows.total * head_dim);
  scratch.visible = reinterpret_cast<Range*>(scratch.states + rows.per_head);
  float* rest = reinterpret_cast<float*>(scratch.visible + rows.per_head);
  scratch.result = attention_result(partial != nullptr ? partial : rest, rows.total, padded_dim);
  return scratch;
}

template <typename KV>
inline void attend(const AttentionArgs& args, const AttentionTile& tile, float* memory) {
  const int head_dim = args.head_dim, padded_dim = attention_padded_dim(head_dim);
  const TileRows rows = tile_rows(args, tile);
  const Scratch scratch = carve(memory, rows, head_dim, tile.partial);
  std::memset(scratch.result.out, 0, static_cast<size_t>(rows.total) * padded_dim * sizeof(float));
  for (int row = 0; row < rows.total; ++row) {
    scratch.result.states[row] = {kNegativeInfinity, 0.0f};
    const float* q = args.q + rows.token(tile, row) * args.q_stride + rows.query_head(tile, row) * head_dim;
    std::memcpy(scratch.q + row * head_dim, q, static_cast<size_t>(head_dim) * sizeof(float));
  }

  const int position =
      args.context_lens[tile.sequence] - args.query_start[tile.sequence + 1] + tile.first_row;
  // Of a partition, what a token's row sees.
  const auto visible = [&](int partition, int token) {
    const int last = position + token - partition * kPartition;  // the row's own position
    const int begin = args.window > 0 ? last - args.window + 1 : 0;
    return Range{begin > 0 ? begin : 0, last < kPartition ? last + 1 : kPartition};
  };
  const auto tiles_of = [&](int partition) {
    const Range any{visible(partition, 0).begin, visible(partition, tile.num_rows - 1).end};
    return partition_tiles<KV>(args, tile, partition * kPartition, any);
  };
  const bool fetch = tile.num_rows == 1;
  PartitionTiles<KV> tiles = tiles_of(tile.first_partition);
  if (fetch) tiles.prefetch_keys();
  for (int partition = tile.first_partition; partition < tile.end_partition; ++partition) {
    for (int row = 0; row < rows.per_head; ++row) {
      scratch.visible[row] = visible(partition, row / rows.group);
    }
    const PartitionTiles<KV> following =
        partition + 1 < tile.end_partition ? tiles_of(partition + 1) : tiles;
    for (int head = 0; head < tile.num_heads; ++head, tiles.advance_head()) {
      const bool more_heads = head + 1 < tile.num_heads;
      const KV* next_keys[kPartitionTiles] = {};
      for (int i = 0; i < kPartitionTiles; ++i) {
        if (tiles.keys[i] == nullptr) continue;
        const KV* beyond = following.keys[i] != nullptr ? following.keys[i] : tiles.keys[i];
        next_keys[i] = more_heads ? tiles.keys[i] + tiles.head_stride : beyond;
      }
      for (int row = 0; row < rows.per_head; row += kPassRows) {
        const int left = rows.per_head - row;
        const RowPass<KV> pass{.tiles = tiles,
                               .visible = scratch.visible + row,
                               .rows = left < kPassRows ? left : kPassRows,
                               .first_row = head * rows.per_head + row,
                               .fetch = fetch && row == 0,
                               .next_keys = next_keys};
        attend(args, pass, padded_dim, scratch);
      }
    }
    tiles = following;
  }
  if (tile.partial == nullptr) write_output(args, tile, scratch.result, padded_dim);
}

inline void paged_attention(const AttentionArgs& args, const AttentionTile& tile, float* scratch) {
  switch (args.kv_type) {
    case KvType::float32: return attend<float>(args, tile, scratch);
    case KvType::float16: return attend<Half>(args, tile, scratch);
    case KvType::int8: return attend<int8_t>(args, tile, scratch);
  }
}

inline void merge_attention(const AttentionArgs& args, const AttentionTile& tile, int num_partials) {
  const int padded_dim = attention_padded_dim(args.head_dim), rows = tile_rows(args, tile).total;
  const int64_t floats = attention_result_floats(rows, args.head_dim);
  const AttentionResult result = attention_result(tile.partial, rows, padded_dim);
  for (int i = 1; i < num_partials; ++i) {
    const AttentionResult other = attention_result(tile.partial + i * floats, rows, padded_dim);
    for (int row = 0; row < rows; ++row) {
      if (other.states[row].sum == 0.0f) continue;  // the row sees none of the partition's keys
      merge(result.states[row], result.out + row * padded_dim, other.states[row],
            other.out + row * padded_dim, padded_dim);
    }
  }
  write_output(args, tile, result, padded_dim);
}

}  // namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE
