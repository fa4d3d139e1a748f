#include "kernels.hpp"

#if defined(STREAMLLM_HAVE_AVX_VNNI)
#include <cpuid.h>
#endif

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

namespace streamllm::cpu {

namespace {

#if defined(STREAMLLM_HAVE_AVX_VNNI)
// Not every compiler's __builtin_cpu_supports knows the name.
bool has_avx_vnni() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & (1u << 4)) != 0;
}
#endif

#if defined(__x86_64__)
Kernels extended(Kernels kernels, const DotProducts& dots) {
  kernels.name = dots.name;
  kernels.quantized = dots.quantized;
  return kernels;
}
#endif

}  // namespace

int supported_kernels(const Kernels* (&tables)[kMaxInstructionSets]) {
  int count = 0;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    static const Kernels vnni = extended(kAvx512Kernels, kAvx512Vnni);
    if (__builtin_cpu_supports("avx512vnni")) tables[count++] = &vnni;
    tables[count++] = &kAvx512Kernels;
  }
#if defined(STREAMLLM_HAVE_AVX_VNNI)
  static const Kernels avx_vnni = extended(kAvx2Kernels, kAvxVnni);
  if (avx2 && has_avx_vnni()) tables[count++] = &avx_vnni;
#endif
  if (avx2) tables[count++] = &kAvx2Kernels;
#endif
  tables[count++] = &kPortableKernels;
  return count;
}

namespace {

std::atomic<const Kernels*>& current() {
  static std::atomic<const Kernels*> table = [] {
    const Kernels* tables[kMaxInstructionSets];
    supported_kernels(tables);
    return tables[0];
  }();
  return table;
}

}  // namespace

const Kernels& kernels() { return *current().load(std::memory_order_relaxed); }

void select_kernels(const char* name) {
  const Kernels* tables[kMaxInstructionSets];
  const int count = supported_kernels(tables);
  std::string names;
  for (int i = 0; i < count; ++i) {
    if (std::strcmp(tables[i]->name, name) == 0) {
      current().store(tables[i], std::memory_order_relaxed);
      return;
    }
    names += (i == 0 ? "" : ", ") + std::string(tables[i]->name);
  }
  throw std::invalid_argument("instruction set '" + std::string(name) +
                              "' is not supported here; choose one of " + names);
}

}  // namespace streamllm::cpu
