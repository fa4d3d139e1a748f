// A block of threads that takes turns on this CPU.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "fibers.hpp"

namespace streamllm::emulation {

inline constexpr int kMaxThreads = 1024;
inline constexpr size_t kPage = 4096;
#ifdef STREAMLLM_SANITIZED
inline constexpr size_t kStackBytes = 256 * 1024;
#else
inline constexpr size_t kStackBytes = 64 * 1024;
#endif

// Order of switches and of blocks: 0 ascending, 1 descending, else random.
extern uint64_t seed;

enum class State { kRunnable, kAtBarrier, kAtCollective, kReturned };

struct Copy {
  void* destination;
  const void* source;
  size_t bytes;
};

struct Fiber {
  void* stack_pointer = nullptr;
  void* stack = nullptr;  // its lowest address
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;  // AddressSanitizer's
  uint3 index{};
  State state = State::kRunnable;
  const char* waits_in = "";
  Site site;
  unsigned mask = 0;
  std::vector<std::vector<Copy>> copies;  // groups; the last is still open
};

// Lanes of a warp on their way to a collective.
struct Meeting {
  Collective collective;
  unsigned mask = 0;
  unsigned arrived = 0;
  Site site;
};

struct Warp {
  Lane lanes[kWarpSize];
  std::vector<Meeting> meetings;  // their masks have no lane in common
  unsigned returned = 0;
};

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x632be59bd9b4e019u) {}
  uint64_t next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545f4914f6cdd1du >> 16;
  }
  int below(int limit) { return static_cast<int>(next() % static_cast<uint64_t>(limit)); }

 private:
  uint64_t state_;
};

// The stacks of all fibers of a block, each above a page that may not be touched.
class Stacks {
 public:
  Stacks();
  unsigned char* operator[](int i) const { return memory_ + (kStackBytes + kPage) * i + kPage; }

 private:
  unsigned char* memory_;
};

class Block {
 public:
  Block(const Kernel& kernel, const Stacks& stacks, Random& random);
  void run();

  int synchronize(const char* name, bool predicate, Site site);
  uint64_t meet(const Collective& collective, unsigned mask, uint64_t value, int source, Site site);
  void yield();
  Fiber& current() { return *current_; }
  bool is_inside() const { return current_ != &main_; }

 private:
  static void start();
  void returned();
  void release_barrier_if_complete();
  void switch_to_next();
  void switch_to(Fiber& next);
  void arrived_from(Fiber& previous);
  int pick();
  [[noreturn]] void report_deadlock();
  Meeting& meeting_of(Warp& warp, const Collective& collective, unsigned mask, Site site);
  int index_of(const Fiber& fiber) const { return static_cast<int>(&fiber - fibers_.data()); }

  const Kernel& kernel_;
  Random& random_;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  std::bitset<kMaxThreads> runnable_;
  Fiber main_;
  Fiber* current_ = &main_;
  Fiber* previous_ = nullptr;
  int live_ = 0;
  int at_barrier_ = 0, barrier_votes_ = 0, barrier_result_ = 0;
};

// What is running, or null.
extern const Kernel* kernel;
extern Block* block;

}  // namespace streamllm::emulation
