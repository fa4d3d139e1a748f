#include "kernels.hpp"

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

namespace streamllm::cpu {

int supported_kernels(const Kernels* (&tables)[3]) {
  int count = 0;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    tables[count++] = &kAvx512Kernels;
  }
  if (avx2) tables[count++] = &kAvx2Kernels;
#endif
  tables[count++] = &kPortableKernels;
  return count;
}

namespace {

std::atomic<const Kernels*>& current() {
  static std::atomic<const Kernels*> table = [] {
    const Kernels* tables[3];
    supported_kernels(tables);
    return tables[0];
  }();
  return table;
}

}  // namespace

const Kernels& kernels() { return *current().load(std::memory_order_relaxed); }

void select_kernels(const char* name) {
  const Kernels* tables[3];
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
