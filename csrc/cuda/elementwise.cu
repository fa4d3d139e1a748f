// RMSNorm with a residual; SiLU or GELU of a gate times up.
#include <algorithm>

#include "api.hpp"
#include "chunk.hpp"
#include "launch.hpp"
#include "reduce.hpp"
#include "types.hpp"

namespace streamllm::cuda {

// out = norm(x + residual) * weight; the sum, rounded to the dtype, replaces the residual and is what is
// normalised. Strides are in elements between rows. `residual` may be null, `out` may be `x`.
struct RmsNormArgs {
  void* out;
  const void* x;
  void* residual;
  const float* weight;
  int64_t out_stride;
  int64_t x_stride;
  int64_t residual_stride;
  int32_t rows;
  int32_t size;
  int32_t dtype;
  float eps;
};

enum Activation : int32_t { kSilu = 0, kGelu = 1, kGeluTanh = 2 };

// out = activation(x[:, :width]) * x[:, width:2 * width]; strides as above.
struct ActAndMulArgs {
  void* out;
  const void* x;
  int64_t out_stride;
  int64_t x_stride;
  int32_t rows;
  int32_t width;
  int32_t dtype;
  int32_t activation;
};

namespace {

constexpr int kMaxThreads = 1024;
constexpr int kMaxSize = 16384;
constexpr int kActThreads = 256;

template <typename T>
constexpr int kMaxChunks = kMaxSize / kMaxThreads / kChunkSize<T>;  // of a thread, kept in registers

// A row belongs to the blockDim.x threads of one threadIdx.y: a warp for short rows, else the whole block.
// Which thread sums what follows from the size alone, so a row's bits do not depend on the batch.
template <typename T>
__global__ void __launch_bounds__(kMaxThreads) rms_norm_kernel(RmsNormArgs args, bool aligned) {
  constexpr int kLanes = kChunkSize<T>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= args.rows) return;  // a whole warp: blocks that synchronise have one row
  const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
  T* residual = static_cast<T*>(args.residual) + row * args.residual_stride;
  T* out = static_cast<T*>(args.out) + row * args.out_stride;

  // All loads come before what waits for one of them, and before stores, which the compiler must take for
  // stores to what is loaded.
  StoredChunk<T> kept[kMaxChunks<T>], old[kMaxChunks<T>];
  float weights[kMaxChunks<T>][kLanes];
  constexpr bool kEnoughRegisters = sizeof(T) < sizeof(float);  // to wait for the weights, too
#pragma unroll
  for (int chunk = 0; chunk < kMaxChunks<T>; ++chunk) {
    const int first = (chunk * blockDim.x + threadIdx.x) * kLanes;
    const int count = min(args.size - first, kLanes);
    if (count <= 0) continue;
    kept[chunk].load(x + first, count, aligned);
    if (args.residual != nullptr) old[chunk].load(residual + first, count, aligned);
    if (kEnoughRegisters) load_chunk(weights[chunk], args.weight + first, count, aligned);
  }
  float sum = 0.0f;
#pragma unroll
  for (int chunk = 0; chunk < kMaxChunks<T>; ++chunk) {
    const int first = (chunk * blockDim.x + threadIdx.x) * kLanes;
    const int count = min(args.size - first, kLanes);
    if (count <= 0) continue;
    float values[kLanes];
    kept[chunk].get(values);
    if (args.residual != nullptr) {
      float summands[kLanes];
      old[chunk].get(summands);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        values[lane] = to_float(from_float<T>(values[lane] + summands[lane]));
      }
      kept[chunk].set(values);
      store_chunk(residual + first, values, count, aligned);
    }
    if (!kEnoughRegisters) load_chunk(weights[chunk], args.weight + first, count, aligned);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) sum = fmaf(values[lane], values[lane], sum);
  }
  sum = blockDim.x == kWarpSize ? warp_sum(sum) : block_sum(sum, shared_memory<float>());
  const float factor = 1.0f / sqrtf(sum / static_cast<float>(args.size) + args.eps);

#pragma unroll
  for (int chunk = 0; chunk < kMaxChunks<T>; ++chunk) {
    const int first = (chunk * blockDim.x + threadIdx.x) * kLanes;
    const int count = min(args.size - first, kLanes);
    if (count <= 0) continue;
    float values[kLanes];
    kept[chunk].get(values);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) values[lane] = weights[chunk][lane] * (values[lane] * factor);
    store_chunk(out + first, values, count, aligned);
  }
}

// Each form keeps its relative precision where the result is close to zero: no 1 + erf, no 1 + tanh.
__device__ __forceinline__ float activate(float gate, int32_t activation) {
  if (activation == kGelu) return 0.5f * gate * erfcf(-0.70710678f * gate);
  float exponent = gate;
  if (activation == kGeluTanh) {
    // 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
    exponent = 1.5957691f * gate * fmaf(0.044715f * gate, gate, 1.0f);
  }
  return gate / (1.0f + expf(-exponent));
}

template <typename T>
__global__ void __launch_bounds__(kActThreads) act_and_mul_kernel(ActAndMulArgs args, bool aligned) {
  constexpr int kLanes = kChunkSize<T>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int first = (blockIdx.y * blockDim.x + threadIdx.x) * kLanes;
  const int count = min(args.width - first, kLanes);
  if (row >= args.rows || count <= 0) return;
  const T* x = static_cast<const T*>(args.x) + row * args.x_stride + first;
  StoredChunk<T> stored_gate, stored_up;
  stored_gate.load(x, count, aligned);
  stored_up.load(x + args.width, count, aligned);
  float gate[kLanes], up[kLanes];
  stored_gate.get(gate);
  stored_up.get(up);
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) gate[lane] = activate(gate[lane], args.activation) * up[lane];
  store_chunk(static_cast<T*>(args.out) + row * args.out_stride + first, gate, count, aligned);
}

unsigned round_up(unsigned number, unsigned multiple) {
  return (number + multiple - 1) / multiple * multiple;
}

template <typename T>
int rms_norm(const RmsNormArgs& args, void* stream) {
  constexpr unsigned kRowsOfShortOnes = 4;
  const unsigned chunks = (args.size + kChunkSize<T> - 1) / kChunkSize<T>;
  const bool aligned = rows_are_aligned(args.out, args.out_stride, sizeof(T)) &&
                       rows_are_aligned(args.x, args.x_stride, sizeof(T)) &&
                       rows_are_aligned(args.residual, args.residual_stride, sizeof(T)) &&
                       is_aligned16(args.weight);
  if (chunks <= kWarpSize * kMaxChunks<T>) {
    return launch(rms_norm_kernel<T>, dim3(round_up(args.rows, kRowsOfShortOnes) / kRowsOfShortOnes),
                  dim3(kWarpSize, kRowsOfShortOnes), 0, stream, args, aligned);
  }
  const unsigned threads = std::min<unsigned>(round_up((chunks + 1) / 2, kWarpSize), kMaxThreads);
  return launch(rms_norm_kernel<T>, dim3(args.rows), dim3(threads), kWarpSize * sizeof(float), stream, args,
                aligned);
}

template <typename T>
int act_and_mul(const ActAndMulArgs& args, void* stream) {
  const unsigned chunks = (args.width + kChunkSize<T> - 1) / kChunkSize<T>;
  unsigned columns = 1;
  while (columns < kActThreads && columns < chunks) columns *= 2;
  const unsigned rows = kActThreads / columns;
  const bool aligned = rows_are_aligned(args.out, args.out_stride, sizeof(T)) &&
                       rows_are_aligned(args.x, args.x_stride, sizeof(T)) && args.width % kChunkSize<T> == 0;
  return launch(act_and_mul_kernel<T>,
                dim3(round_up(args.rows, rows) / rows, round_up(chunks, columns) / columns),
                dim3(columns, rows), 0, stream, args, aligned);
}

}  // namespace
}  // namespace streamllm::cuda

STREAMLLM_API int streamllm_rms_norm(const streamllm::cuda::RmsNormArgs* args, void* stream) {
  using namespace streamllm::cuda;
  if (args->rows == 0) return kSuccess;
  if (args->rows < 0 || args->size < 1 || args->size > kMaxSize) return kUnsupportedSize;
  return with_activation_type(args->dtype, [&](auto activation) {
    return rms_norm<typename decltype(activation)::type>(*args, stream);
  });
}

STREAMLLM_API int streamllm_act_and_mul(const streamllm::cuda::ActAndMulArgs* args, void* stream) {
  using namespace streamllm::cuda;
  if (args->rows == 0) return kSuccess;
  if (args->rows < 0 || args->width < 1) return kUnsupportedSize;
  if (args->activation < kSilu || args->activation > kGeluTanh) return kUnsupportedOption;
  return with_activation_type(args->dtype, [&](auto activation) {
    return act_and_mul<typename decltype(activation)::type>(*args, stream);
  });
}
