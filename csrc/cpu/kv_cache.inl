// The paged KV cache: how it is laid out, written and found.
//
// A block holds, for each KV head, tiles of kKeyTile positions, both of keys and of values. A tile of keys is
// [head_dim][kKeyTile], one of values [kKeyTile][head_dim]. In int8, a tile ends with the float32 scales of
// its positions: an element is its integer times the scale.
#pragma once

#include "kernels.hpp"
#include "rows.inl"
#include "simd.hpp"

namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE {

template <typename KV>
inline constexpr bool kScaled = false;
template <>
inline constexpr bool kScaled<int8_t> = true;

template <typename KV>
inline constexpr int tile_elements(int head_dim) {
  return kKeyTile * head_dim + (kScaled<KV> ? kKeyTile * int{sizeof(float)} : 0);
}

inline float* tile_scales(int8_t* tile, int head_dim) {
  return reinterpret_cast<float*>(tile + kKeyTile * head_dim);
}
inline const float* tile_scales(const int8_t* tile, int head_dim) {
  return reinterpret_cast<const float*>(tile + kKeyTile * head_dim);
}

// The key or value of one position and head: integers, times the scale.
struct QuantizedHead {
  float scale;
  int8_t values[kMaxHeadDim];
};

// x / scale rounded to nearest even, where scale = max|x| / 127. Magnitudes saturate as float16's do. NaN
// makes the scale NaN: it then reaches every row that sees the position.
inline void quantize_head(const float* x, int head_dim, QuantizedHead& out) {
  const auto lanes = [&](int i) {
    const int left = head_dim - i;
    return left > 0 ? saturate(load_lanes(x + i, left < 16 ? left : 16)) : splat(0.0f);
  };
  float largest = 0.0f;
  bool finite = true;
  for (int i = 0; i < head_dim; i += kGroup) {
    const float magnitude = largest_magnitude(lanes(i), lanes(i + 16));
    finite &= magnitude <= kLargestHalf;
    largest = magnitude > largest ? magnitude : largest;
  }
  if (!finite || largest < kSmallestMagnitude) {
    out = {};
    if (!finite) out.scale = __builtin_nanf("");
    return;
  }
  const Vec16 factor = splat(127.0f / largest);
  out.scale = largest / 127.0f;
  for (int i = 0; i < head_dim; i += kGroup) {
    store_rounded(out.values + i, lanes(i) * factor, lanes(i + 16) * factor);
  }
}

// Stores one head's key and value of a slot.
template <typename KV>
inline void write_cache(const RotaryArgs& args, int64_t slot, int head, const float* key,
                        const float* value) {
  const int head_dim = args.head_dim;
  const int64_t block = slot / args.block_size, offset = slot % args.block_size, place = offset % kKeyTile;
  const int64_t tile = ((block * args.num_kv_heads + head) * args.block_size + offset) / kKeyTile;
  KV* key_tile = static_cast<KV*>(args.key_cache) + tile * tile_elements<KV>(head_dim);
  KV* value_tile = static_cast<KV*>(args.value_cache) + tile * tile_elements<KV>(head_dim);
  KV *keys = key_tile + place, *values = value_tile + place * head_dim;
  if constexpr (kScaled<KV>) {
    QuantizedHead quantized;
    quantize_head(key, head_dim, quantized);
    for (int i = 0; i < head_dim; ++i) keys[i * kKeyTile] = quantized.values[i];
    tile_scales(key_tile, head_dim)[place] = quantized.scale;
    quantize_head(value, head_dim, quantized);
    std::memcpy(values, quantized.values, static_cast<size_t>(head_dim));
    tile_scales(value_tile, head_dim)[place] = quantized.scale;
  } else {
    for_each_vector(head_dim, [&](int64_t i, int count) {
      KV converted[16];
      store_saturated(converted, load_lanes(key + i, count));
      for (int lane = 0; lane < count; ++lane) keys[(i + lane) * kKeyTile] = converted[lane];
    });
    for_each_vector(head_dim, [&](int64_t i, int count) {
      store_lanes(values + i, load_lanes(value + i, count), count);
    });
  }
}

inline void write_cache(const RotaryArgs& args, int64_t slot, int head, const float* key,
                        const float* value) {
  switch (args.kv_type) {
    case KvType::float32: return write_cache<float>(args, slot, head, key, value);
    case KvType::float16: return write_cache<Half>(args, slot, head, key, value);
    case KvType::int8: return write_cache<int8_t>(args, slot, head, key, value);
  }
}

struct Range {  // of keys, relative to the partition
  int begin, end;
};

// Where the keys and values of a partition and one KV head lie; the next head's follow `head_stride` elements
// apart. nullptr where no row of the tile sees a key.
template <typename KV>
struct PartitionTiles {
  const KV* keys[kPartitionTiles];
  const KV* values[kPartitionTiles];
  int64_t head_stride;
  int64_t head_tile_bytes;

  void advance_head() {
    for (int i = 0; i < kPartitionTiles; ++i) {
      if (keys[i] == nullptr) continue;
      keys[i] += head_stride;
      values[i] += head_stride;
    }
  }

  void prefetch_keys() const {
    for (int i = 0; i < kPartitionTiles; ++i) {
      if (keys[i] == nullptr) continue;
      for (int64_t byte = 0; byte < head_tile_bytes; byte += 64) {
        prefetch(reinterpret_cast<const char*>(keys[i]) + byte);
      }
    }
  }
};

template <typename KV>
inline PartitionTiles<KV> partition_tiles(const AttentionArgs& args, const AttentionTile& tile, int base,
                                          Range keys) {
  PartitionTiles<KV> tiles = {};
  const int elements = tile_elements<KV>(args.head_dim);
  tiles.head_stride = args.block_size / kKeyTile * elements;
  tiles.head_tile_bytes = elements * int64_t{sizeof(KV)};
  const int32_t* table = reinterpret_cast<const int32_t*>(args.block_tables[tile.sequence]);
  for (int i = keys.begin / kKeyTile; i <= (keys.end - 1) / kKeyTile; ++i) {
    const int position = base + i * kKeyTile;
    const int64_t block = table[position / args.block_size];
    const int64_t offset = (block * args.num_kv_heads + tile.first_head) * tiles.head_stride +
                           position % args.block_size / kKeyTile * elements;
    tiles.keys[i] = static_cast<const KV*>(args.key_cache) + offset;
    tiles.values[i] = static_cast<const KV*>(args.value_cache) + offset;
  }
  return tiles;
}

}  // namespace streamllm::cpu::STREAMLLM_SIMD_NAMESPACE
