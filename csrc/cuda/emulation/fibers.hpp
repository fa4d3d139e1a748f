// Runs a kernel's blocks on a CPU: one block after the other, each thread of a block a fiber.
//
// Fibers take turns at barriers, warp collectives and atomics, in an order shuffled by a seed: what depends
// on the order without a barrier to fix it changes from seed to seed. A kernel's mistake that can be told
// here (fault()) ends the process with a message that names the kernel, block and thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <vector_types.h>

namespace streamllm::emulation {

inline constexpr int kWarpSize = 32;

// Where in a kernel's source a fiber is.
struct Site {
  const char* file = nullptr;
  int line = 0;

  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// What a lane brings to a collective of its warp and takes away from it.
struct Lane {
  uint64_t value;
  int source;  // of a shuffle: the lane whose value it wants
  uint64_t result;
};

// A collective: once all lanes of the mask have come, `complete` fills the results of these lanes.
struct Collective {
  const char* name;
  void (*complete)(Lane* lanes, unsigned mask);
};

struct Kernel {
  const void* address;  // the function's, for its name
  dim3 grid;
  dim3 block;
  size_t shared_bytes;
  void (*run)(const void* arguments);  // what each thread runs
  const void* arguments;
};

// Returns 0 or, for shapes that CUDA refuses, CUDA's error code.
int run(const Kernel& kernel);

// Waits for all threads of the block that have not returned, and returns how many brought a true `predicate`.
int synchronize_block(const char* name, bool predicate, Site site);

// Waits for the lanes in `mask`, which must all come to this place with this mask.
uint64_t synchronize_warp(const Collective& collective, unsigned mask, uint64_t value, int source, Site site);

// Lets other fibers run, or not.
void maybe_switch();

// A copy into shared memory that takes place when its thread waits for it.
void begin_copy(void* destination, const void* source, size_t bytes);
void commit_copies();
void wait_for_copies(int groups_left);

// Faults unless `address` is a multiple of `bytes`, and counts the bytes if it is not of shared memory.
void check_load(const void* address, size_t bytes);
void check_store(const void* address, size_t bytes);

unsigned char* shared_memory();
size_t shared_memory_bytes();

// sums [rows, columns] += left [rows, depth] * right [depth, columns], each sum over depth in ascending
// order.
void add_product(float* sums, const float* left, const float* right, int rows, int columns, int depth);

// A function's name in C++.
std::string function_name(const void* address);

[[noreturn]] void fault(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace streamllm::emulation
