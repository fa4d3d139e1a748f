#define STREAMLLM_SIMD_AVX512
#define STREAMLLM_SIMD_VNNI
#include "quantized.inl"

namespace streamllm::cpu {
const DotProducts kAvx512Vnni{"avx512_vnni", avx512_vnni::make_quantized_kernels()};
}
