#define STREAMLLM_SIMD_AVX2
#define STREAMLLM_SIMD_VNNI
#include "kernels.inl"

namespace streamllm::cpu {
const Kernels kAvxVnniKernels = avx_vnni::make_kernels("avx_vnni");
}
