// What kernels are written against: CUDA's runtime, or in tests its emulation on a CPU (emulation/), under
// the same names. Kernels use dynamic shared memory alone, and are launched by launch() alone.
#pragma once

#ifdef STREAMLLM_EMULATION
#include "emulation/runtime.hpp"
#else
#include <cuda_runtime.h>

namespace streamllm::cuda {

// The block's dynamic shared memory, aligned to 128 bytes.
template <typename T>
__device__ __forceinline__ T* shared_memory() {
  extern __shared__ __align__(128) unsigned char dynamic_shared_memory[];
  return reinterpret_cast<T*>(dynamic_shared_memory);
}

// Puts a kernel on a stream (0: the default one). Returns 0 or CUDA's error code; a grid without blocks is an
// error (cudaErrorInvalidConfiguration).
template <typename... Parameters, typename... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, void* stream,
           const Arguments&... arguments) {
  constexpr size_t kSharedWithoutAsking = 48 * 1024;
  if (shared_bytes > kSharedWithoutAsking) {
    const cudaError_t refused =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (refused != cudaSuccess) return refused;
  }
  // Not <<<>>>, whose error has to be fetched from a place where others' errors lie too.
  return [&](Parameters... values) {
    void* addresses[] = {const_cast<void*>(static_cast<const volatile void*>(&values))...};
    return static_cast<int>(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, addresses,
                                             shared_bytes, static_cast<cudaStream_t>(stream)));
  }(static_cast<Parameters>(arguments)...);
}

}  // namespace streamllm::cuda
#endif
