// Attention of one row of a sequence to its whole context in the paged cache (a decode step).
//
// A context is cut into splits of kSplitSize positions, aligned to absolute positions. A thread block takes a
// split and a KV head and attends to it for all query heads of the group (up to 8, or 16 on matrix units), so
// that keys and values are read once. Where a context has one split the block writes the result; otherwise it
// writes a partial one, and a second kernel merges those of a sequence in order. So a row's bits depend on
// its own context alone. Which splits there are stands in device memory, and the grid does not depend on it:
// a captured graph serves any lengths.
#include <algorithm>
#include <type_traits>

#include "api.hpp"
#include "attention_decode.cuh"
#include "attention_lanes.cuh"
#include "attention_matrix.cuh"
#include "launch.hpp"
#include "softmax_state.hpp"
#include "types.hpp"

namespace streamllm::cuda {

// As in streamllm/ops/gpu/kernels.py (PagedCache, PagedContext, DecodeWork, AttentionShape). Strides are in
// elements; `sinks` may be null.
struct PagedDecodeArgs {
  void* out;
  const void* q;
  const void* keys;
  const void* values;
  const int32_t* query_start;
  const int32_t* context_lens;
  const int32_t* table_rows;
  const int32_t* block_tables;
  const int32_t* items;
  const int32_t* num_items;
  const int32_t* first_item;
  const int32_t* num_splits;
  float* partials;
  const float* sinks;
  int64_t out_stride;
  int64_t q_stride;
  int64_t block_table_stride;
  int32_t num_sequences;
  int32_t max_items;
  int32_t split_size;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t block_size;
  int32_t window;
  float scale;
  float soft_cap;
  float key_scale;
  float value_scale;
  int32_t dtype;
  int32_t cache_dtype;
  int32_t num_multiprocessors;
  int32_t matrix_units_from;  // the smallest group of query heads for which they are used; 0: never
};

namespace {

constexpr int kThreads = kDecodeWarps * kWarpSize;
constexpr int kMaxHeadDim = 256;
constexpr int kMaxLanesHeads = 8;  // query heads that a block takes at most without matrix units
constexpr int kCombineBlocks = 8;  // of a multiprocessor
// Between the states of a block's warps and heads: the values keep their alignment.
__host__ __device__ constexpr int state_stride(int head_dim) { return head_dim + 4; }

// What a block works on: a split and some query heads of one KV head.
struct DecodePart {
  int item;
  int first_head;
  int num_heads;
  int64_t row;    // of q and out
  bool is_whole;  // the split is all of the context
  SplitContext context;
};

// The parts of an item lie side by side: `pieces` of each KV head.
__device__ DecodePart read_part(const PagedDecodeArgs& args, int number, int pieces, int64_t head_bytes) {
  const int group = args.num_heads / args.num_kv_heads;
  const int piece_heads = (group + pieces - 1) / pieces;
  const int piece = number % pieces, kv_head = number / pieces % args.num_kv_heads;
  DecodePart part;
  part.item = number / pieces / args.num_kv_heads;
  part.first_head = kv_head * group + piece * piece_heads;
  part.num_heads = min(piece_heads, group - piece * piece_heads);
  const int sequence = args.items[2 * part.item];
  const int first = args.items[2 * part.item + 1] * kSplitSize;
  const int length = args.context_lens[sequence];
  part.row = args.query_start[sequence + 1] - 1;
  part.is_whole = args.num_splits[sequence] == 1;
  const int first_seen = args.window > 0 ? max(length - args.window, first) : first;
  part.context = {args.block_tables + args.table_rows[sequence] * args.block_table_stride,
                  static_cast<const char*>(args.keys) + kv_head * head_bytes,
                  static_cast<const char*>(args.values) + kv_head * head_bytes,
                  head_bytes * args.num_kv_heads,
                  args.block_size,
                  args.head_dim,
                  first,
                  {first_seen, min(length, first + kSplitSize)}};
  return part;
}

// Copies the queries of a part, [kHeads][query_stride], with zeros where a head or dimension does not exist.
template <typename T, typename Attention>
__device__ void load_queries(typename Attention::Query* queries, const PagedDecodeArgs& args,
                             const DecodePart& part) {
  constexpr int kSize = Vector16<T>::kSize, kMaxDim = Attention::Shape::kMaxDim;
  const int stride = Attention::query_stride(args.head_dim);
  const T* q = static_cast<const T*>(args.q) + part.row * args.q_stride +
               static_cast<int64_t>(part.first_head) * args.head_dim;
  for (int i = threadIdx.x * kSize; i < Attention::kHeads * kMaxDim; i += kThreads * kSize) {
    const int head = i / kMaxDim, dim = i % kMaxDim;
    if (dim >= stride) continue;
    const bool exists = head < part.num_heads && dim < args.head_dim;
    Vector16<T> vector;
    memset(&vector, 0, sizeof vector);
    if (exists) vector = load16(q + head * args.head_dim + dim);
    auto* to = queries + head * stride + dim;
    if constexpr (std::is_same_v<T, typename Attention::Query>) {
      store16(to, vector);
    } else {
#pragma unroll
      for (int j = 0; j < kSize; ++j) to[j] = to_float(vector[j]);
    }
  }
}

template <typename T, int N>
__device__ void write_means(const PagedDecodeArgs& args, int64_t row, int head,
                            const SoftmaxState<N>& state) {
  T* out = static_cast<T*>(args.out) + row * args.out_stride + static_cast<int64_t>(head) * args.head_dim;
  const float factor = state.inverse_sum();
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int dim = threadIdx.x % kWarpSize + i * kWarpSize;
    if (dim < args.head_dim) out[dim] = from_float<T>(state.values[i] * factor * args.value_scale);
  }
}

// A warp writes a head's result, of which it holds every 32nd dimension from its lane on.
template <int N>
__device__ void write_result(const PagedDecodeArgs& args, int64_t row, int head, SoftmaxState<N> state) {
  if (args.sinks != nullptr) state.add_sink(args.sinks[head]);
  if (args.dtype == kFloat32) write_means<float>(args, row, head, state);
  if (args.dtype == kFloat16) write_means<half>(args, row, head, state);
  if (args.dtype == kBFloat16) write_means<bfloat16>(args, row, head, state);
}

// What `count` states in memory, `stride` floats apart, come to.
template <int N>
__device__ SoftmaxState<N> merge_states(const float* states, int64_t stride, int count, int head_dim) {
  const int lane = threadIdx.x % kWarpSize;
  if (count == 0) return SoftmaxState<N>::empty();
  SoftmaxState<N> state = load_state<N>(states, head_dim, lane, kWarpSize);
#pragma unroll 3
  for (int i = 1; i < count; ++i) {
    state.merge(load_state<N>(states + i * stride, head_dim, lane, kWarpSize));
  }
  return state;
}

// Where things lie in shared memory, in bytes.
template <typename Attention>
struct DecodeMemory {
  using Shape = typename Attention::Shape;

  static __host__ __device__ constexpr int scores(int head_dim) {
    return Attention::kHeads * Attention::query_stride(head_dim) *
           static_cast<int>(sizeof(typename Attention::Query));
  }
  // The states come when all warps are through with their tiles.
  static __host__ __device__ constexpr int stages_or_states(int head_dim) {
    return scores(head_dim) + kDecodeWarps * Attention::kScoreBytes;
  }
  static int total(int head_dim) {
    const int stages = Shape::kStages * Shape::stage_bytes(head_dim);
    const int states = Shape::kHeads * state_stride(head_dim) * static_cast<int>(sizeof(float));
    return stages_or_states(head_dim) + kDecodeWarps * std::max(stages, states);
  }
};

// Leaves each warp's softmax over its positions in shared memory, as a state of each head.
template <typename Attention>
__device__ void attend(const PagedDecodeArgs& args, const DecodePart& part) {
  using Shape = typename Attention::Shape;
  using Memory = DecodeMemory<Attention>;
  using Query = typename Attention::Query;
  const int warp = threadIdx.x / kWarpSize, head_dim = args.head_dim;
  char* memory = shared_memory<char>();
  Query* queries = reinterpret_cast<Query*>(memory);
  char* stages = memory + Memory::stages_or_states(head_dim);

  TileStream<Shape> tiles(part.context, stages + warp * Shape::kStages * Shape::stage_bytes(head_dim));
  if constexpr (std::is_same_v<Query, typename Shape::Cache> && !std::is_same_v<Query, float>) {
    load_queries<Query, Attention>(queries, args, part);
  } else {
    if (args.dtype == kFloat32) load_queries<float, Attention>(queries, args, part);
    if (args.dtype == kFloat16) load_queries<half, Attention>(queries, args, part);
    if (args.dtype == kBFloat16) load_queries<bfloat16, Attention>(queries, args, part);
  }
  __syncthreads();

  Attention attention(queries, memory + Memory::scores(head_dim) + warp * Attention::kScoreBytes, head_dim,
                      args.scale * args.key_scale, args.soft_cap);
  if constexpr (kScaled<typename Shape::Cache>) attention.load_scales(tiles);
  for (int tile = tiles.first_tile(); tile < tiles.end_tile(); ++tile) {
    attention.score(tile, tiles.front(), tiles.rows(tile));
    tiles.pop();
  }
  attention.weigh(tiles);
  for (int tile = tiles.first_tile(); tile < tiles.end_tile(); ++tile) {
    attention.add(tile, tiles.front());
    tiles.pop();
  }
  __syncthreads();
  const int stride = state_stride(head_dim);
  attention.store(reinterpret_cast<float*>(stages) + warp * Shape::kHeads * stride, stride);
  __syncthreads();
}

// Merges the warps' states and writes the result, or the partial one.
template <typename Shape>
__device__ void finish_part(const PagedDecodeArgs& args, const DecodePart& part, const float* states) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int stride = state_stride(args.head_dim);
  for (int head = warp; head < part.num_heads; head += kDecodeWarps) {
    const auto state = merge_states<Shape::kMaxDim / kWarpSize>(
        states + head * stride, Shape::kHeads * stride, kDecodeWarps, args.head_dim);
    if (part.is_whole) {
      write_result(args, part.row, part.first_head + head, state);
    } else {
      const int64_t place = static_cast<int64_t>(part.item) * args.num_heads + part.first_head + head;
      store_state(args.partials + place * (args.head_dim + 2), state, args.head_dim, lane, kWarpSize);
    }
  }
  __syncthreads();
}

template <typename Attention>
__global__ void __launch_bounds__(kThreads, Attention::kHeads == kMaxLanesHeads ? 2 : 3)
    paged_decode_kernel(PagedDecodeArgs args, int pieces) {
  using Shape = typename Attention::Shape;
  const int parts = *args.num_items * args.num_kv_heads * pieces;
  for (int number = blockIdx.x; number < parts; number += gridDim.x) {
    const int64_t head_bytes = cache_head_bytes<typename Shape::Cache>(args.block_size, args.head_dim);
    const DecodePart part = read_part(args, number, pieces, head_bytes);
    attend<Attention>(args, part);
    const int states = DecodeMemory<Attention>::stages_or_states(args.head_dim);
    finish_part<Shape>(args, part, reinterpret_cast<const float*>(shared_memory<char>() + states));
  }
}

// Merges the partial results of every sequence that does not have exactly one; of none there come zeros. Each
// warp of a block merges a run of them, then one warp the runs.
template <int MAX_DIM>
__global__ void __launch_bounds__(kThreads) combine_splits_kernel(PagedDecodeArgs args) {
  constexpr int kLaneValues = MAX_DIM / kWarpSize;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  float* runs = shared_memory<float>();
  const int size = args.head_dim + 2;
  const int64_t item_size = static_cast<int64_t>(args.num_heads) * size;
  for (int number = blockIdx.x; number < args.num_sequences * args.num_heads; number += gridDim.x) {
    const int sequence = number / args.num_heads, head = number % args.num_heads;
    const int first_item = args.first_item[sequence], splits = args.num_splits[sequence];
    if (first_item < 0 || splits == 1) continue;
    const int begin = splits * warp / kDecodeWarps, end = splits * (warp + 1) / kDecodeWarps;
    const auto run = merge_states<kLaneValues>(args.partials + (first_item + begin) * item_size + head * size,
                                               item_size, end - begin, args.head_dim);
    store_state(runs + warp * size, run, args.head_dim, lane, kWarpSize);
    __syncthreads();
    if (warp == 0) {
      write_result(args, args.query_start[sequence + 1] - 1, head,
                   merge_states<kLaneValues>(runs, size, kDecodeWarps, args.head_dim));
    }
    __syncthreads();
  }
}

// Blocks of a kernel that a multiprocessor runs at once; 0 or less: CUDA's error code, negated.
int resident_blocks(const void* kernel, int shared_bytes) {
#ifdef STREAMLLM_EMULATION
  return kernel != nullptr && shared_bytes > 0 ? 1 : 0;
#else
  int blocks = 0;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error == cudaSuccess) {  // copies into shared memory pass by the cache that it takes its room from
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);
  }
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, shared_bytes);
  }
  return error == cudaSuccess ? blocks : -error;
#endif
}

template <typename Attention>
int launch_decode(const PagedDecodeArgs& args, void* stream) {
  const int pieces = (args.num_heads / args.num_kv_heads + Attention::kHeads - 1) / Attention::kHeads;
  const int bytes = DecodeMemory<Attention>::total(args.head_dim);
  const auto kernel = paged_decode_kernel<Attention>;
  const int resident = resident_blocks(reinterpret_cast<const void*>(kernel), bytes);
  if (resident <= 0) return resident < 0 ? -resident : kTooMuchSharedMemory;
  const int64_t parts = static_cast<int64_t>(args.max_items) * args.num_kv_heads * pieces;
  const int64_t blocks = std::min<int64_t>(parts, static_cast<int64_t>(args.num_multiprocessors) * resident);
  return launch(kernel, dim3(blocks), dim3(kThreads), bytes, stream, args, pieces);
}

template <typename Cache, int MAX_DIM, int HEADS>
int launch_lanes(const PagedDecodeArgs& args, void* stream) {
  return launch_decode<LanesAttention<DecodeShape<Cache, MAX_DIM, HEADS, false>>>(args, stream);
}

template <typename Cache, int MAX_DIM>
int launch_splits(const PagedDecodeArgs& args, void* stream) {
  const int group = args.num_heads / args.num_kv_heads;
  if constexpr (sizeof(Cache) == 2 && MAX_DIM <= 128) {
    if (args.matrix_units_from > 0 && group >= args.matrix_units_from && args.head_dim == MAX_DIM) {
      return launch_decode<MatrixAttention<DecodeShape<Cache, MAX_DIM, kMatrixHeads, true>>>(args, stream);
    }
  }
  if (group == 1) return launch_lanes<Cache, MAX_DIM, 1>(args, stream);
  if (group <= 4) return launch_lanes<Cache, MAX_DIM, 4>(args, stream);
  return launch_lanes<Cache, MAX_DIM, kMaxLanesHeads>(args, stream);
}

template <typename Cache, int MAX_DIM>
int launch_both(const PagedDecodeArgs& args, void* stream) {
  const int error = launch_splits<Cache, MAX_DIM>(args, stream);
  if (error != kSuccess) return error;
  const int64_t rows = static_cast<int64_t>(args.num_sequences) * args.num_heads;
  const int64_t blocks = std::min<int64_t>(rows, int64_t{kCombineBlocks} * args.num_multiprocessors);
  const size_t bytes = kDecodeWarps * (args.head_dim + 2) * sizeof(float);
  return launch(combine_splits_kernel<MAX_DIM>, dim3(blocks), dim3(kThreads), bytes, stream, args);
}

template <typename Cache>
int paged_decode(const PagedDecodeArgs& args, void* stream) {
  if (args.head_dim <= 64) return launch_both<Cache, 64>(args, stream);
  if (args.head_dim <= 128) return launch_both<Cache, 128>(args, stream);
  return launch_both<Cache, kMaxHeadDim>(args, stream);
}

int check(const PagedDecodeArgs& args) {
  if (args.dtype < kFloat32 || args.dtype > kBFloat16) return kUnsupportedDtype;
  const bool is_byte = args.cache_dtype == kFloat8E4M3 || args.cache_dtype == kInt8;
  if (args.cache_dtype != args.dtype && !is_byte) return kUnsupportedDtype;
  const int multiple = is_byte ? 16 : kLaneDims;
  if (args.head_dim < multiple || args.head_dim > kMaxHeadDim || args.head_dim % multiple != 0) {
    return kUnsupportedHeadSize;
  }
  if (args.block_size < 16 || args.block_size % 16 != 0 || args.split_size != kSplitSize ||
      args.num_kv_heads < 1 || args.num_heads < 1 || args.num_heads % args.num_kv_heads != 0 ||
      args.max_items < 1 || args.num_sequences < 1 || args.num_multiprocessors < 1) {
    return kUnsupportedSize;
  }
  const int64_t q_stride_bytes = args.q_stride * (args.dtype == kFloat32 ? 4 : 2);
  if (!is_aligned16(args.q) || q_stride_bytes % 16 != 0 || !is_aligned16(args.keys) ||
      !is_aligned16(args.values)) {
    return kMisaligned;
  }
  return kSuccess;
}

}  // namespace
}  // namespace streamllm::cuda

STREAMLLM_API int streamllm_paged_decode(const streamllm::cuda::PagedDecodeArgs* args, void* stream) {
  using namespace streamllm::cuda;
  const int error = check(*args);
  if (error != kSuccess) return error;
  switch (args->cache_dtype) {
    case kFloat32:
      return paged_decode<float>(*args, stream);
    case kFloat16:
      return paged_decode<half>(*args, stream);
    case kBFloat16:
      return paged_decode<bfloat16>(*args, stream);
    case kInt8:
      return paged_decode<int8_t>(*args, stream);
    default:
      return paged_decode<float8_e4m3>(*args, stream);
  }
}
