// Copies of 16 bytes from global into shared memory that pass no registers and take place in the background.
//
// A thread begins copies, closes them into a group, and later waits until at most some of its last groups are
// on their way; other threads see the data after the barrier that follows the wait.
#pragma once

#include "launch.hpp"

#ifndef STREAMLLM_EMULATION
#include <cuda_pipeline_primitives.h>
#endif

namespace streamllm::cuda {

// Both addresses must be multiples of 16.
__device__ __forceinline__ void async_copy16(void* shared, const void* global) {
#ifdef STREAMLLM_EMULATION
  emulation::begin_copy(shared, global, 16);
#else
  __pipeline_memcpy_async(shared, global, 16);
#endif
}

__device__ __forceinline__ void async_commit() {
#ifdef STREAMLLM_EMULATION
  emulation::commit_copies();
#else
  __pipeline_commit();
#endif
}

template <int kGroupsLeft>
__device__ __forceinline__ void async_wait() {
#ifdef STREAMLLM_EMULATION
  emulation::wait_for_copies(kGroupsLeft);
#else
  __pipeline_wait_prior(kGroupsLeft);
#endif
}

}  // namespace streamllm::cuda
