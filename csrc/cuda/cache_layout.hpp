// How keys and values lie in the paged cache: [blocks, num_kv_heads, block_size, head_dim] each.
//
// In int8 an element is its integer times the scale of its position and head, a float. The scales of a block's
// head, [block_size], lie behind its elements: whoever moves a block moves its scales.
#pragma once

#include <cstdint>
#include <type_traits>

#include "launch.hpp"

namespace streamllm::cuda {

template <typename Cache>
inline constexpr bool kScaled = std::is_same_v<Cache, int8_t>;

// From a head of a block to the next one.
template <typename Cache>
__host__ __device__ constexpr int64_t cache_head_bytes(int block_size, int head_dim) {
  const int position_bytes = head_dim * static_cast<int>(sizeof(Cache)) +
                             (kScaled<Cache> ? static_cast<int>(sizeof(float)) : 0);
  return int64_t{block_size} * position_bytes;
}

}  // namespace streamllm::cuda
