#define STREAMLLM_SIMD_AVX2
#define STREAMLLM_SIMD_VNNI
#include "quantized.inl"

namespace streamllm::cpu {
const DotProducts kAvxVnni{"avx_vnni", avx_vnni::make_quantized_kernels()};
}
