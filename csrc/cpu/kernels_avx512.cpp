#define STREAMLLM_SIMD_AVX512
#include "kernels.inl"

namespace streamllm::cpu {
const Kernels kAvx512Kernels = avx512::make_kernels("avx512");
}
