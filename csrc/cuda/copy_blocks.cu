// Copies of KV blocks in every plane: copy-on-write within a pool, swapping between two.
#include "api.hpp"
#include "launch.hpp"
#include "types.hpp"

namespace streamllm::cuda {

// Blocks lie block_bytes apart in a plane; pairs are (source block, destination block), none of which writes
// what another reads or writes. Either memory may be pinned host memory.
struct CopyBlocksArgs {
  const void* source;
  void* destination;
  const int32_t* pairs;
  int64_t source_plane_bytes;
  int64_t destination_plane_bytes;
  int64_t block_bytes;
  int32_t planes;
  int32_t num_pairs;
};

namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // loads of a thread under way at once: over PCIe latency is what counts
constexpr int64_t kMaxGrid = 65535;

using Word16 = Vector16<unsigned char>;

__device__ __forceinline__ Word16 load(const Word16* address) { return load16(address->values); }
__device__ __forceinline__ unsigned char load(const unsigned char* address) { return *address; }
__device__ __forceinline__ void store(Word16* address, const Word16& word) { store16(address->values, word); }
__device__ __forceinline__ void store(unsigned char* address, unsigned char word) { *address = word; }

template <typename Word>
__global__ void __launch_bounds__(kThreads) copy_blocks_kernel(CopyBlocksArgs args) {
  const int64_t plane = blockIdx.y;
  const int64_t source_block = args.pairs[2 * blockIdx.x];
  const int64_t destination_block = args.pairs[2 * blockIdx.x + 1];
  const Word* source =
      reinterpret_cast<const Word*>(static_cast<const char*>(args.source) + plane * args.source_plane_bytes +
                                    source_block * args.block_bytes);
  Word* destination =
      reinterpret_cast<Word*>(static_cast<char*>(args.destination) + plane * args.destination_plane_bytes +
                              destination_block * args.block_bytes);
  const int64_t count = args.block_bytes / static_cast<int64_t>(sizeof(Word));
  const int64_t first = static_cast<int64_t>(blockIdx.z) * kThreads * kUnroll + threadIdx.x;
  Word words[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    if (first + i * kThreads < count) words[i] = load(source + first + i * kThreads);
  }
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    if (first + i * kThreads < count) store(destination + first + i * kThreads, words[i]);
  }
}

template <typename Word>
int copy_blocks(const CopyBlocksArgs& args, void* stream) {
  const int64_t span = static_cast<int64_t>(sizeof(Word)) * kThreads * kUnroll;
  const int64_t parts = (args.block_bytes + span - 1) / span;
  if (parts > kMaxGrid) return kUnsupportedSize;
  return launch(copy_blocks_kernel<Word>, dim3(args.num_pairs, args.planes, static_cast<unsigned>(parts)),
                dim3(kThreads), 0, stream, args);
}

}  // namespace
}  // namespace streamllm::cuda

STREAMLLM_API int streamllm_copy_blocks(const streamllm::cuda::CopyBlocksArgs* args, void* stream) {
  using namespace streamllm::cuda;
  if (args->num_pairs == 0 || args->planes == 0 || args->block_bytes == 0) return kSuccess;
  if (args->num_pairs < 0 || args->planes < 0 || args->planes > kMaxGrid || args->block_bytes < 0) {
    return kUnsupportedSize;
  }
  const bool aligned =
      is_aligned16(args->source) && is_aligned16(args->destination) &&
      (args->source_plane_bytes | args->destination_plane_bytes | args->block_bytes) % 16 == 0;
  return aligned ? copy_blocks<Word16>(*args, stream) : copy_blocks<unsigned char>(*args, stream);
}
