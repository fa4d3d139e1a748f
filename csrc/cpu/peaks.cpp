#include "peaks.hpp"

#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels.hpp"
#include "memory_placement.hpp"

namespace streamllm::cpu {

namespace {

// Independent sums: as many as the latency of a multiply-add times its throughput needs.
constexpr int kSums = 12;
constexpr int64_t kRounds = 20'000;  // between two looks at the clock
constexpr size_t kLine = 64;

using Clock = std::chrono::steady_clock;

// The loops. Operands pass through an empty asm statement, so that the compiler takes every round for new; so
// do the sums at the end. All loops over sums are unrolled: only then are they registers.

#if defined(__x86_64__)

#define STREAMLLM_OPAQUE(x) asm volatile("" : "+x"(x))

__attribute__((target("avx2,fma"))) void float32_avx2(int64_t rounds) {
  __m256 sums[kSums] = {}, a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(0.25f);
  for (int64_t round = 0; round < rounds; ++round) {
    STREAMLLM_OPAQUE(a);
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) sums[i] = _mm256_fmadd_ps(a, b, sums[i]);
  }
#pragma GCC unroll 16
  for (auto& sum : sums) STREAMLLM_OPAQUE(sum);
}

__attribute__((target("avx512f"))) void float32_avx512(int64_t rounds) {
  __m512 sums[kSums] = {}, a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(0.25f);
  for (int64_t round = 0; round < rounds; ++round) {
    STREAMLLM_OPAQUE(a);
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) sums[i] = _mm512_fmadd_ps(a, b, sums[i]);
  }
#pragma GCC unroll 16
  for (auto& sum : sums) STREAMLLM_OPAQUE(sum);
}

__attribute__((target("avx2"))) void int8_avx2(int64_t rounds) {
  __m256i sums[kSums] = {}, u = _mm256_set1_epi8(3), s = _mm256_set1_epi8(-5);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) {
      STREAMLLM_OPAQUE(u);
      sums[i] = _mm256_add_epi16(sums[i], _mm256_maddubs_epi16(u, s));
    }
  }
#pragma GCC unroll 16
  for (auto& sum : sums) STREAMLLM_OPAQUE(sum);
}

__attribute__((target("avx512bw"))) void int8_avx512(int64_t rounds) {
  __m512i sums[kSums] = {}, u = _mm512_set1_epi8(3), s = _mm512_set1_epi8(-5);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) {
      STREAMLLM_OPAQUE(u);
      sums[i] = _mm512_add_epi16(sums[i], _mm512_maddubs_epi16(u, s));
    }
  }
#pragma GCC unroll 16
  for (auto& sum : sums) STREAMLLM_OPAQUE(sum);
}

__attribute__((target("avx512f,avx512vnni"))) void int8_avx512_vnni(int64_t rounds) {
  __m512i sums[kSums] = {}, u = _mm512_set1_epi32(0x03030303), s = _mm512_set1_epi32(0x05050505);
  for (int64_t round = 0; round < rounds; ++round) {
    STREAMLLM_OPAQUE(u);
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) sums[i] = _mm512_dpbusd_epi32(sums[i], u, s);
  }
#pragma GCC unroll 16
  for (auto& sum : sums) STREAMLLM_OPAQUE(sum);
}

#if defined(STREAMLLM_HAVE_AVX_VNNI)
__attribute__((target("avx2,avxvnni"))) void int8_avx_vnni(int64_t rounds) {
  __m256i sums[kSums] = {}, u = _mm256_set1_epi8(3), s = _mm256_set1_epi8(-5);
  for (int64_t round = 0; round < rounds; ++round) {
    STREAMLLM_OPAQUE(u);
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) sums[i] = _mm256_dpbusd_avx_epi32(sums[i], u, s);
  }
#pragma GCC unroll 16
  for (auto& sum : sums) STREAMLLM_OPAQUE(sum);
}
#endif

__attribute__((target("avx2"))) void read_avx2(const uint8_t* memory, size_t num_bytes) {
  __m256i sums[8] = {};
  for (size_t at = 0; at < num_bytes; at += sizeof sums) {
#pragma GCC unroll 8
    for (size_t i = 0; i < 8; ++i) {
      const auto* source = reinterpret_cast<const __m256i*>(memory + at) + i;
      sums[i] = _mm256_xor_si256(sums[i], _mm256_load_si256(source));
    }
  }
#pragma GCC unroll 16
  for (auto& sum : sums) STREAMLLM_OPAQUE(sum);
}

__attribute__((target("avx512f"))) void read_avx512(const uint8_t* memory, size_t num_bytes) {
  __m512i sums[4] = {};
  for (size_t at = 0; at < num_bytes; at += sizeof sums) {
#pragma GCC unroll 4
    for (size_t i = 0; i < 4; ++i) {
      sums[i] = _mm512_xor_si512(sums[i], _mm512_load_si512(memory + at + i * kLine));
    }
  }
#pragma GCC unroll 16
  for (auto& sum : sums) STREAMLLM_OPAQUE(sum);
}

#else

#define STREAMLLM_OPAQUE(x) asm volatile("" : "+w"(x))

#endif

// Whatever the compiler makes of vectors of 16 bytes.
using Float4 = float __attribute__((vector_size(16)));
using Short8 = int16_t __attribute__((vector_size(16)));
using Long2 = int64_t __attribute__((vector_size(16)));

void float32_portable(int64_t rounds) {
  Float4 sums[kSums] = {}, a = {0.5f, 0.5f, 0.5f, 0.5f}, b = {0.25f, 0.25f, 0.25f, 0.25f};
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) {
      STREAMLLM_OPAQUE(a);
      sums[i] += a * b;
    }
  }
#pragma GCC unroll 16
  for (auto& sum : sums) STREAMLLM_OPAQUE(sum);
}

void int8_portable(int64_t rounds) {
  Short8 sums[kSums] = {}, a = {3, 3, 3, 3, 3, 3, 3, 3}, b = {5, 5, 5, 5, 5, 5, 5, 5};
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) {
      STREAMLLM_OPAQUE(a);
      sums[i] += a * b;
    }
  }
#pragma GCC unroll 16
  for (auto& sum : sums) STREAMLLM_OPAQUE(sum);
}

void read_portable(const uint8_t* memory, size_t num_bytes) {
  Long2 sums[16] = {};
  for (size_t at = 0; at < num_bytes; at += sizeof sums) {
#pragma GCC unroll 16
    for (size_t i = 0; i < 16; ++i) sums[i] ^= reinterpret_cast<const Long2*>(memory + at)[i];
  }
#pragma GCC unroll 16
  for (auto& sum : sums) STREAMLLM_OPAQUE(sum);
}

// The loops of an instruction set, and how many multiply-adds one instruction of theirs does.
struct Loops {
  const char* name;
  void (*float32)(int64_t);
  int float32_lanes;
  void (*int8)(int64_t);
  int int8_lanes;
  void (*read)(const uint8_t*, size_t);  // whole pieces of 256 bytes
};

constexpr Loops kLoops[] = {
#if defined(__x86_64__)
    {"avx512_vnni", float32_avx512, 16, int8_avx512_vnni, 64, read_avx512},
    {"avx512", float32_avx512, 16, int8_avx512, 64, read_avx512},
#if defined(STREAMLLM_HAVE_AVX_VNNI)
    {"avx_vnni", float32_avx2, 8, int8_avx_vnni, 32, read_avx2},
#endif
    {"avx2", float32_avx2, 8, int8_avx2, 32, read_avx2},
#endif
    {"portable", float32_portable, 4, int8_portable, 8, read_portable},
};

const Loops& loops() {
  const char* name = kernels().name;
  for (const Loops& entry : kLoops) {
    if (std::strcmp(entry.name, name) == 0) return entry;
  }
  throw std::logic_error("no peak is known for the instruction set " + std::string(name));
}

// Runs `piece` again and again on every thread, all at once; returns pieces a second, all threads together.
// `piece(thread)`'s first call is not timed.
double pieces_per_second(int num_threads, double seconds, const std::function<void(int)>& piece) {
  if (num_threads < 1 || num_threads > 1024) throw std::invalid_argument("num_threads must be 1 to 1024");
  if (!(seconds > 0)) throw std::invalid_argument("seconds must be positive");
  std::atomic<int> num_ready{0};
  std::vector<double> rates(static_cast<size_t>(num_threads));
  const auto measure = [&](int thread) {
    piece(thread);
    num_ready.fetch_add(1);
    while (num_ready.load() < num_threads) std::this_thread::yield();
    const auto start = Clock::now();
    double elapsed = 0;
    int64_t count = 0;
    do {
      piece(thread);
      ++count;
      elapsed = std::chrono::duration<double>(Clock::now() - start).count();
    } while (elapsed < seconds);
    rates[static_cast<size_t>(thread)] = static_cast<double>(count) / elapsed;
  };
  std::vector<std::thread> threads;
  for (int thread = 0; thread < num_threads; ++thread) threads.emplace_back(measure, thread);
  for (std::thread& thread : threads) thread.join();
  double total = 0;
  for (const double rate : rates) total += rate;
  return total;
}

}  // namespace

double measure_read_bandwidth(int num_threads, size_t bytes_per_thread, double seconds) {
  constexpr size_t kPiece = 256;
  if (bytes_per_thread < 1 || bytes_per_thread > SIZE_MAX / 2048) {
    throw std::invalid_argument("bytes_per_thread must be positive and fit into memory");
  }
  const auto read = loops().read;
  const size_t share = (bytes_per_thread + kPiece - 1) / kPiece * kPiece;
  const size_t num_bytes = share * static_cast<size_t>(num_threads < 1 ? 1 : num_threads);
  void* memory = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  place_memory(memory, num_bytes);
  // Pages that nobody has written are all one page of zeros, which fits every cache.
  std::memset(memory, 1, num_bytes);
  // A look at the clock costs as much as a few hundred lines.
  const size_t repeats = share < (size_t{1} << 20) ? (size_t{1} << 20) / share : 1;
  double rate = 0;
  try {
    rate = pieces_per_second(num_threads, seconds, [&](int thread) {
      const auto* start = static_cast<const uint8_t*>(memory) + share * static_cast<size_t>(thread);
      for (size_t repeat = 0; repeat < repeats; ++repeat) read(start, share);
    });
  } catch (...) {
    munmap(memory, num_bytes);
    throw;
  }
  munmap(memory, num_bytes);
  return rate * static_cast<double>(repeats * share);
}

double measure_float32_peak(int num_threads, double seconds) {
  const Loops& best = loops();
  const double rate = pieces_per_second(num_threads, seconds, [&](int) { best.float32(kRounds); });
  return rate * 2.0 * kRounds * kSums * best.float32_lanes;
}

double measure_int8_peak(int num_threads, double seconds) {
  const Loops& best = loops();
  const double rate = pieces_per_second(num_threads, seconds, [&](int) { best.int8(kRounds); });
  return rate * 2.0 * kRounds * kSums * best.int8_lanes;
}

}  // namespace streamllm::cpu
