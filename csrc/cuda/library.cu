// What the library says about itself.
#include "api.hpp"
#include "launch.hpp"

namespace {

const char* own_error(int code) {
  using namespace streamllm::cuda;
  switch (code) {
    case kSuccess:
      return "no error";
    case kUnsupportedDtype:
      return "no kernel for this dtype";
    case kUnsupportedHeadSize:
      return "no kernel for this head size";
    case kUnsupportedSize:
      return "a size or stride that the kernel does not support";
    case kMisaligned:
      return "an address or stride is not a multiple of 16 bytes";
    case kNullPointer:
      return "an address is missing";
    case kTooMuchSharedMemory:
      return "needs more shared memory than a block may have";
    case kUnsupportedOption:
      return "an option that the kernel does not support";
    default:
      return "unknown error";
  }
}

}  // namespace

// The text of what an operation returned; valid for ever.
STREAMLLM_API const char* streamllm_error_text(int code) {
  return code > 0 ? cudaGetErrorString(static_cast<cudaError_t>(code)) : own_error(code);
}

// The version of CUDA that the library was built with, as 1000 * major + 10 * minor; 0 for the emulation.
STREAMLLM_API int streamllm_cuda_version() {
#ifdef STREAMLLM_EMULATION
  return 0;
#else
  return CUDART_VERSION;
#endif
}

// What it was built for, as CMake names it: "80-real,90-real,100" has machine code for sm_80, sm_90 and
// sm_100, and code for later ones to compile when they load it.
STREAMLLM_API const char* streamllm_cuda_architectures() {
#ifdef STREAMLLM_EMULATION
  return "emulation";
#else
  return STREAMLLM_ARCHITECTURES;
#endif
}
