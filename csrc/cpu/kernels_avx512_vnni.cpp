#define STREAMLLM_SIMD_AVX512
#define STREAMLLM_SIMD_VNNI
#include "kernels.inl"

namespace streamllm::cpu {
const Kernels kAvx512VnniKernels = avx512_vnni::make_kernels("avx512_vnni");
}
