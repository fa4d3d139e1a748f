#include "memory_placement.hpp"

#include <sys/mman.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif

#include <climits>
#include <mutex>
#include <stdexcept>
#include <string>

namespace streamllm::cpu {

namespace {

using NodeMask = std::vector<unsigned long>;  // a bit a node, as the system call takes it
constexpr size_t kMaskBits = sizeof(unsigned long) * CHAR_BIT;

std::mutex mask_mutex;
NodeMask interleave_mask;

NodeMask mask_of(const std::vector<int>& nodes) {
  NodeMask mask;
  for (const int node : nodes) {
    if (node < 0) throw std::invalid_argument("a NUMA node cannot be " + std::to_string(node));
    const size_t word = static_cast<size_t>(node) / kMaskBits;
    if (word >= mask.size()) mask.resize(word + 1);
    mask[word] |= 1ul << (static_cast<size_t>(node) % kMaskBits);
  }
  return mask;
}

// The system call itself: libnuma is one more library to find, for one call.
bool interleave(void* start, size_t num_bytes, const NodeMask& mask) {
#if defined(SYS_mbind)
  constexpr int kInterleave = 3;  // MPOL_INTERLEAVE of linux/mempolicy.h
  // The kernel reads one bit less than it is told.
  return syscall(SYS_mbind, start, num_bytes, kInterleave, mask.data(), mask.size() * kMaskBits + 1, 0) == 0;
#else
  (void)start, (void)num_bytes, (void)mask;
  return false;
#endif
}

bool interleaving_works(const NodeMask& mask) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* probe = mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (probe == MAP_FAILED) return false;
  const bool works = interleave(probe, page, mask);
  munmap(probe, page);
  return works;
}

}  // namespace

bool interleave_memory_over(const std::vector<int>& nodes) {
  NodeMask mask = mask_of(nodes);
  const bool works = mask.empty() || interleaving_works(mask);
  const std::lock_guard lock(mask_mutex);
  interleave_mask = works ? std::move(mask) : NodeMask{};
  return works;
}

void place_memory(void* start, size_t num_bytes) {
#if defined(MADV_HUGEPAGE)
  madvise(start, num_bytes, MADV_HUGEPAGE);
#endif
  const std::lock_guard lock(mask_mutex);
  if (!interleave_mask.empty()) interleave(start, num_bytes, interleave_mask);
}

}  // namespace streamllm::cpu
