#define STREAMLLM_SIMD_AVX2
#include "kernels.inl"

namespace streamllm::cpu {
const Kernels kAvx2Kernels = avx2::make_kernels("avx2");
}
