// One kernel for everything that a warp does together, whose results test_cuda_collectives.py works out
// itself.
#include "api.hpp"
#include "launch.hpp"
#include "matrix_unit.hpp"
#include "reduce.hpp"
#include "types.hpp"

namespace streamllm::cuda {

inline constexpr int kNumCollectives = 16;

struct CollectivesArgs {
  int32_t* out;         // [kNumCollectives, threads]
  const int32_t* x;     // [threads]
  const float* floats;  // [threads]
  float* sums;          // [2, threads]
  int32_t threads;
  int32_t lane_mask;  // even lanes and odd lanes by themselves, if it is not -1
};

// out [rows, columns] = left [rows, depth] * right [depth, columns]^T, left and right row by row
struct ProductArgs {
  float* out;
  const void* left;
  const void* right;
  int32_t rows;
  int32_t columns;
  int32_t depth;
  int32_t dtype;
};

namespace {

__global__ void collectives_kernel(CollectivesArgs args) {
  float* scratch = shared_memory<float>();
  const int thread = threadIdx.x, lane = thread % kWarpSize;
  const int x = args.x[thread];
  const unsigned mask = args.lane_mask < 0 ? kAllLanes : lane % 2 == 0 ? 0x55555555u : 0xaaaaaaaau;
  int32_t* out = args.out + thread;
  const auto put = [&](int value) {
    *out = value;
    out += args.threads;
  };
  // The lanes that these name are in the same mask.
  put(__shfl_sync(mask, x, lane / 2 * 2 % 8 + lane % 2));
  put(__shfl_sync(mask, x, 2 + lane % 2, 8));
  put(__shfl_up_sync(mask, x, 2));
  put(__shfl_up_sync(mask, x, 4, 8));
  put(__shfl_down_sync(mask, x, 2));
  put(__shfl_down_sync(mask, x, 4, 8));
  put(__shfl_xor_sync(mask, x, 6));
  put(__shfl_xor_sync(mask, x, 4, 8));
  put(static_cast<int>(__ballot_sync(mask, x % 3 == 0)));
  put(__any_sync(mask, x > 90));
  put(__all_sync(mask, x > 5));
  put(static_cast<int>(__match_any_sync(mask, x)));
  put(__reduce_add_sync(mask, x));
  put(__reduce_min_sync(mask, x));
  put(__syncthreads_count(x % 2 == 0));
  put(__syncthreads_or(x > 98) * 2 + __syncthreads_and(x > 1));

  args.sums[thread] = block_sum(args.floats[thread], scratch);
  args.sums[args.threads + thread] = block_max(args.floats[thread], scratch);
}

template <typename T, int kRows, int kColumns>
__global__ void product_kernel(ProductArgs args) {
  float* tile = shared_memory<float>();
  const int row = blockIdx.x * kRows, column = blockIdx.y * kColumns;
  Accumulator<kRows, kColumns> sums;
  sums.fill(0.0f);
  for (int k = 0; k < args.depth; k += kMatrixDepth) {
    LeftMatrix<T, kRows, kColumns> left;
    RightMatrix<T, kRows, kColumns, Layout::kColumns> right;
    left.load(static_cast<const T*>(args.left) + row * args.depth + k, args.depth);
    right.load(static_cast<const T*>(args.right) + column * args.depth + k, args.depth);
    sums.add_product(left, right);
  }
  sums.store(tile, kColumns);
  __syncwarp();
  for (int i = threadIdx.x; i < kRows * kColumns; i += kWarpSize) {
    args.out[(row + i / kColumns) * args.columns + column + i % kColumns] = tile[i];
  }
}

template <typename T, int kRows, int kColumns>
int launch_product(const ProductArgs& args, void* stream) {
  return launch(product_kernel<T, kRows, kColumns>, dim3(args.rows / kRows, args.columns / kColumns),
                kWarpSize, kRows * kColumns * sizeof(float), stream, args);
}

template <typename T>
int product(const ProductArgs& args, void* stream) {
  if (args.rows % 16 == 0 && args.columns % 16 == 0) return launch_product<T, 16, 16>(args, stream);
  if (args.rows % 8 == 0 && args.columns % 32 == 0) return launch_product<T, 8, 32>(args, stream);
  if (args.rows % 32 == 0 && args.columns % 8 == 0) return launch_product<T, 32, 8>(args, stream);
  return kUnsupportedSize;
}

}  // namespace
}  // namespace streamllm::cuda

STREAMLLM_API int streamllm_collectives(const streamllm::cuda::CollectivesArgs* args, void* stream) {
  using namespace streamllm::cuda;
  return launch(collectives_kernel, 1, args->threads, kWarpSize * sizeof(float), stream, *args);
}

STREAMLLM_API int streamllm_product(const streamllm::cuda::ProductArgs* args, void* stream) {
  using namespace streamllm::cuda;
  switch (args->dtype) {
    case kFloat16:
      return product<half>(*args, stream);
    case kBFloat16:
      return product<bfloat16>(*args, stream);
    default:
      return kUnsupportedDtype;
  }
}
