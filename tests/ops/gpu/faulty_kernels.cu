// Kernels with a fault each, and the same ones without it: what test_cuda_emulation.py finds or does not
// find.
#include "api.hpp"
#include "async_copy.hpp"
#include "launch.hpp"
#include "reduce.hpp"
#include "types.hpp"

namespace streamllm::cuda {

enum Fault : int32_t {
  kNone = 0,
  kGlobalOverrun = 1,
  kSharedOverrun = 2,
  kMissingBarrier = 3,
  kMissingLane = 4,
  kDivergentBarrier = 5,
  kMisaligned16 = 6,
  kReadBeforeWait = 7,
  kReturnedLane = 8,
  kMissingWarpBarrier = 9,
  kForeignMask = 10,
};

struct FaultArgs {
  float* out;      // [blocks * threads]
  const float* x;  // [blocks * threads]
  int32_t blocks;
  int32_t threads;
  int32_t fault;
};

namespace {

// out = x of the block's threads in reverse order.
__global__ void reverse_kernel(float* out, const float* x, int fault) {
  float* values = shared_memory<float>();
  const int thread = threadIdx.x, threads = blockDim.x;
  const int first = blockIdx.x * threads;
  const bool last_block = blockIdx.x + 1 == gridDim.x;
  values[thread + (fault == kSharedOverrun)] = x[first + thread + (fault == kGlobalOverrun && last_block)];
  if (fault == kDivergentBarrier) {
    if (thread % 2 == 0) {
      __syncthreads();
    } else {
      __syncthreads();
    }
  } else if (fault != kMissingBarrier) {
    __syncthreads();
  }
  out[first + thread] = values[threads - 1 - thread];
}

// out = the sum over a warp's lanes, in the lanes of the upper half only.
__global__ void upper_sum_kernel(float* out, const float* x, int fault) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const int lane = threadIdx.x % kWarpSize;
  const unsigned mask = fault == kForeignMask ? 0x0000ffffu : 0xffff0000u;
  float sum = x[i];
  out[i] = 0.0f;
  if (fault == kReturnedLane && lane == 20) return;
  if (lane >= (fault == kMissingLane ? 17 : 16)) {
    for (int distance = 8; distance > 0; distance /= 2) sum += __shfl_xor_sync(mask, sum, distance);
    out[i] = sum;
  }
  __syncthreads();
}

// out = x, through a background copy into shared memory; each lane reads what its neighbour has copied.
__global__ void copy_kernel(float* out, const float* x, int fault) {
  float* values = shared_memory<float>();
  const int first = blockIdx.x * blockDim.x;
  if (threadIdx.x % 4 == 0) {
    const int misplaced = fault == kMisaligned16;
    async_copy16(values + threadIdx.x, x + first + threadIdx.x + misplaced);
  }
  async_commit();
  if (fault != kReadBeforeWait) async_wait<0>();
  if (fault != kMissingWarpBarrier) __syncwarp();
  out[first + threadIdx.x] = values[threadIdx.x];
}

}  // namespace
}  // namespace streamllm::cuda

using streamllm::cuda::FaultArgs;

STREAMLLM_API int streamllm_reverse(const FaultArgs* args, void* stream) {
  using namespace streamllm::cuda;
  return launch(reverse_kernel, args->blocks, args->threads, args->threads * sizeof(float), stream, args->out,
                args->x, args->fault);
}

STREAMLLM_API int streamllm_upper_sum(const FaultArgs* args, void* stream) {
  using namespace streamllm::cuda;
  return launch(upper_sum_kernel, args->blocks, args->threads, 0, stream, args->out, args->x, args->fault);
}

STREAMLLM_API int streamllm_copy(const FaultArgs* args, void* stream) {
  using namespace streamllm::cuda;
  return launch(copy_kernel, args->blocks, args->threads, args->threads * sizeof(float), stream, args->out,
                args->x, args->fault);
}
