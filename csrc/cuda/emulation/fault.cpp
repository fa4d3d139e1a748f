// The end of a process whose kernel has made a mistake.
#include <cxxabi.h>
#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "block.hpp"
#include "runtime.hpp"

namespace streamllm::emulation {

std::string function_name(const void* address) {
  Dl_info info{};
  if (dladdr(address, &info) == 0) return "?";
  if (info.dli_sname == nullptr || info.dli_saddr != address) {  // not exported: the debugger's tool knows it
    char command[1024];
    const size_t offset = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(info.dli_fbase);
    std::snprintf(command, sizeof command, "LD_PRELOAD= addr2line -f -C -e '%s' 0x%zx 2>/dev/null",
                  info.dli_fname, offset);
    char name[512] = "?";
    if (FILE* tool = popen(command, "r")) {
      if (std::fgets(name, sizeof name, tool) != nullptr) name[std::strcspn(name, "\n")] = 0;
      pclose(tool);
    }
    return name;
  }
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> name(
      abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status), std::free);
  return status == 0 ? name.get() : info.dli_sname;
}

void fault(const char* format, ...) {
  std::fprintf(stderr, "\nCUDA emulation: ");
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  if (kernel != nullptr) {
    std::fprintf(stderr, "\n  kernel %s\n  block (%u, %u, %u)", function_name(kernel->address).c_str(),
                 blockIdx.x, blockIdx.y, blockIdx.z);
  }
  if (block != nullptr && block->is_inside()) {
    const Fiber& fiber = block->current();
    std::fprintf(stderr, ", thread (%u, %u, %u)", fiber.index.x, fiber.index.y, fiber.index.z);
    if (fiber.site.file != nullptr) {
      std::fprintf(stderr, ", last seen at %s:%d", fiber.site.file, fiber.site.line);
    }
  }
  std::fprintf(stderr, "\n");
  std::abort();
}

}  // namespace streamllm::emulation
