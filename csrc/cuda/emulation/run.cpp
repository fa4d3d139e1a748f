// Launches: blocks one after the other, their shared memory, and what tests ask afterwards.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "block.hpp"
#include "runtime.hpp"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace streamllm::emulation {

uint64_t seed = 0;
const Kernel* kernel = nullptr;
Block* block = nullptr;

namespace {

constexpr unsigned kMaxGridYZ = 65535;
constexpr size_t kMaxSharedBytes = 163 * 1024;  // what a block of sm_80 may ask for
constexpr size_t kGuardBytes = 64;              // behind the shared memory; AddressSanitizer has its own
constexpr unsigned char kGuard = 0xa5;

struct SharedMemory {
  unsigned char* data = nullptr;
  size_t bytes = 0;
};
SharedMemory shared;

uint64_t loaded_bytes = 0, stored_bytes = 0;

struct Largest {
  unsigned threads = 0;
  size_t shared_bytes = 0;
};
std::map<const void*, Largest> launches;  // by the kernel's address

void allocate_shared_memory(size_t bytes) {
  constexpr size_t kAlignment = 128;
#ifdef STREAMLLM_SANITIZED
  constexpr size_t kBehind = 0;
#else
  constexpr size_t kBehind = kGuardBytes;
#endif
  void* memory = nullptr;
  if (posix_memalign(&memory, kAlignment, bytes + kBehind) != 0) fault("no memory for the shared memory");
  shared = {static_cast<unsigned char*>(memory), bytes};
}

// What a block finds in its shared memory: NaN in every floating-point type, as an integer -1 or a large one.
void poison_shared_memory(Random& random) {
  const unsigned char last = random.below(2) == 0 ? 0xff : 0x7f;
  for (size_t i = 0; i < shared.bytes; ++i) shared.data[i] = i % 2 == 1 ? last : 0xff;
#ifndef STREAMLLM_SANITIZED
  std::memset(shared.data + shared.bytes, kGuard, kGuardBytes);
#endif
}

void check_guard() {
#ifndef STREAMLLM_SANITIZED
  for (size_t i = 0; i < kGuardBytes; ++i) {
    if (shared.data[shared.bytes + i] != kGuard) {
      fault("wrote %zu bytes or more past the end of %zu bytes of shared memory", i, shared.bytes);
    }
  }
#endif
}

std::vector<uint64_t> block_order(uint64_t count, Random& random) {
  std::vector<uint64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  if (seed == 1) std::reverse(order.begin(), order.end());
  if (seed > 1) {
    for (uint64_t i = count; i > 1; --i) std::swap(order[i - 1], order[random.next() % i]);
  }
  return order;
}

void check_access(const void* address, size_t bytes, const char* what, uint64_t& counter) {
  const auto number = reinterpret_cast<uintptr_t>(address);
  if (number % bytes != 0)
    fault("%s of %zu bytes at %p, which is not a multiple of them", what, bytes, address);
  const auto* first = static_cast<const unsigned char*>(address);
  if (first < shared.data || first >= shared.data + shared.bytes) counter += bytes;
}

}  // namespace

int run(const Kernel& launched) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  const dim3 grid = launched.grid, size = launched.block;
  const uint64_t num_threads = uint64_t{size.x} * size.y * size.z;
  const uint64_t num_blocks = uint64_t{grid.x} * grid.y * grid.z;
  if (num_threads == 0 || num_threads > kMaxThreads || size.z > 64 || num_blocks == 0 ||
      grid.x > 0x7fffffffu || grid.y > kMaxGridYZ || grid.z > kMaxGridYZ) {
    return cudaErrorInvalidConfiguration;
  }
  if (launched.shared_bytes > kMaxSharedBytes) return cudaErrorInvalidValue;

  Largest& largest = launches[launched.address];
  largest.threads = std::max(largest.threads, static_cast<unsigned>(num_threads));
  largest.shared_bytes = std::max(largest.shared_bytes, launched.shared_bytes);

  static const Stacks stacks;
  kernel = &launched;
  gridDim = grid;
  blockDim = size;
  allocate_shared_memory(launched.shared_bytes);
  Random random(seed);
  for (const uint64_t index : block_order(num_blocks, random)) {
    blockIdx = {static_cast<unsigned>(index % grid.x), static_cast<unsigned>(index / grid.x % grid.y),
                static_cast<unsigned>(index / grid.x / grid.y)};
    poison_shared_memory(random);
    Block running(launched, stacks, random);
    block = &running;
    running.run();
    block = nullptr;
    check_guard();
  }
  std::free(shared.data);
  shared = {};
  kernel = nullptr;
  return cudaSuccess;
}

int synchronize_block(const char* name, bool predicate, Site site) {
  return block->synchronize(name, predicate, site);
}

uint64_t synchronize_warp(const Collective& collective, unsigned mask, uint64_t value, int source,
                          Site site) {
  return block->meet(collective, mask, value, source, site);
}

void maybe_switch() { block->yield(); }

void begin_copy(void* destination, const void* source, size_t bytes) {
  check_access(source, bytes, "asynchronous copy from", loaded_bytes);
  uint64_t not_counted = 0;
  check_access(destination, bytes, "asynchronous copy to", not_counted);
  auto& copies = block->current().copies;
  if (copies.empty()) copies.emplace_back();
  copies.back().push_back({destination, source, bytes});
}

void commit_copies() {
  auto& copies = block->current().copies;
  if (copies.empty()) copies.emplace_back();
  copies.emplace_back();
}

void wait_for_copies(int groups_left) {
  auto& copies = block->current().copies;
  while (static_cast<int>(copies.size()) - 1 > groups_left) {
    for (const Copy& copy : copies.front()) std::memcpy(copy.destination, copy.source, copy.bytes);
    copies.erase(copies.begin());
  }
}

void check_load(const void* address, size_t bytes) { check_access(address, bytes, "load", loaded_bytes); }
void check_store(const void* address, size_t bytes) { check_access(address, bytes, "store", stored_bytes); }

void add_product(float* sums, const float* left, const float* right, int rows, int columns, int depth) {
  for (int row = 0; row < rows; ++row) {
    for (int k = 0; k < depth; ++k) {
      for (int column = 0; column < columns; ++column) {
        float& sum = sums[row * columns + column];
        sum = fmaf(left[row * depth + k], right[k * columns + column], sum);
      }
    }
  }
}

unsigned char* shared_memory() { return shared.data; }
size_t shared_memory_bytes() { return shared.bytes; }

}  // namespace streamllm::emulation

// ---- for tests

// The order in which fibers and blocks run: 0 ascending, 1 descending, else shuffled by this seed.
extern "C" void streamllm_emulation_set_seed(uint64_t value) { streamllm::emulation::seed = value; }

// Bytes that load16() and store16() and asynchronous copies have moved from and to global memory since the
// last call.
extern "C" void streamllm_emulation_take_traffic(uint64_t* loaded, uint64_t* stored) {
  using namespace streamllm::emulation;
  *loaded = std::exchange(loaded_bytes, 0);
  *stored = std::exchange(stored_bytes, 0);
}

// Kernels launched since the last call, one a line: the most threads a block had, the most bytes of shared
// memory, the kernel's name.
extern "C" const char* streamllm_emulation_take_launches() {
  using namespace streamllm::emulation;
  static std::string text;
  text.clear();
  for (const auto& [address, largest] : launches) {
    text += std::to_string(largest.threads) + ' ' + std::to_string(largest.shared_bytes) + ' ' +
            function_name(address) + '\n';
  }
  launches.clear();
  return text.c_str();
}

extern "C" const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorInvalidValue:
      return "invalid argument";
    default:
      return "error of CUDA";
  }
}
