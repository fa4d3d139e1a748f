// Checks of the arguments of recorded operations; each throws std::invalid_argument naming the argument.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "kernels.hpp"

namespace streamllm::cpu {

inline void check_address(const char* name, const void* address) {
  if (address == nullptr) throw std::invalid_argument(std::string(name) + " must be an address, not 0");
}

inline void check_at_least(const char* name, int64_t value, int64_t least) {
  if (value < least) {
    throw std::invalid_argument(std::string(name) + " must be at least " + std::to_string(least) + ", not " +
                                std::to_string(value));
  }
}

inline void check_rows(const char* name, const void* address, int64_t stride, int64_t width) {
  check_address(name, address);
  check_at_least((std::string(name) + "_stride").c_str(), stride, width);
}

inline void check_output(const OutputRows& out, int64_t width) {
  if (!out.quantized) return check_rows("out", out.data, out.stride, width);
  check_address("out", out.data);
  if (width % kGroup != 0) {
    throw std::invalid_argument("quantised rows have a multiple of " + std::to_string(kGroup) +
                                " elements, not " + std::to_string(width));
  }
}

}  // namespace streamllm::cpu
