#include "kernels.inl"

namespace streamllm::cpu {
const Kernels kPortableKernels = portable::make_kernels("portable");
}
