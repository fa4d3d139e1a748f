// What this CPU can do at most with the instruction set in use, measured: what kernels are compared with.
#pragma once

#include <cstddef>

namespace streamllm::cpu {

// Each runs for about `seconds` on `num_threads` threads at once and returns what they did together, a
// second. They throw std::invalid_argument for sizes below 1 and for a duration that is not positive.

// Bytes read. A thread reads its own `bytes_per_thread` bytes over and over: their size picks the cache, or
// memory.
double measure_read_bandwidth(int num_threads, size_t bytes_per_thread, double seconds);

// Float32 operations (a multiply-add is two), on registers.
double measure_float32_peak(int num_threads, double seconds);

// Operations on 8-bit integers (a multiply-add is two), on registers: VNNI's dot products where the
// instruction set in use has them; else products of pairs, summed in 16 bits.
double measure_int8_peak(int num_threads, double seconds);

}  // namespace streamllm::cpu
