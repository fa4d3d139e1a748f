// Compiled without sanitizers, even where kernels are not: a function that a fiber never returns to would
// leave the marks of its frame on the stack, to be found by the next fiber there.
#include "block.hpp"

#include <sys/mman.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "runtime.hpp"
#include "switch_stack.hpp"

#ifdef STREAMLLM_SANITIZED
#include <sanitizer/common_interface_defs.h>
#endif

namespace streamllm::emulation {
namespace {

constexpr int kLaneMask = kWarpSize - 1;

bool same(const char* a, const char* b) { return a == b || std::strcmp(a, b) == 0; }

bool same(Site a, Site b) { return a.line == b.line && same(a.file, b.file); }

}  // namespace

Stacks::Stacks() {
  constexpr size_t kAll = (kStackBytes + kPage) * kMaxThreads;
  void* memory =
      mmap(nullptr, kAll, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) fault("no memory for the fibers' stacks");
  memory_ = static_cast<unsigned char*>(memory);
  for (int i = 0; i < kMaxThreads; ++i) mprotect(memory_ + (kStackBytes + kPage) * i, kPage, PROT_NONE);
}

Block::Block(const Kernel& kernel, const Stacks& stacks, Random& random) : kernel_(kernel), random_(random) {
  const dim3 size = kernel.block;
  fibers_.resize(static_cast<size_t>(size.x) * size.y * size.z);
  warps_.resize((fibers_.size() + kWarpSize - 1) / kWarpSize);
  live_ = static_cast<int>(fibers_.size());
  for (int i = 0; i < live_; ++i) {
    Fiber& fiber = fibers_[i];
    fiber.stack = stacks[i];
    fiber.stack_bytes = kStackBytes;
    fiber.stack_pointer = prepare_stack(stacks[i] + kStackBytes, start);
    const unsigned linear = static_cast<unsigned>(i);
    fiber.index = {linear % size.x, linear / size.x % size.y, linear / size.x / size.y};
    runnable_.set(i);
  }
  // Lanes that the last warp lacks never come.
  const int lanes = live_ % kWarpSize;
  if (lanes != 0) warps_.back().returned = ~0u << lanes;
}

void Block::run() { switch_to_next(); }

void Block::start() {
  block->arrived_from(*block->previous_);
  block->kernel_.run(block->kernel_.arguments);
  block->returned();
  __builtin_unreachable();
}

void Block::returned() {
  Fiber& self = *current_;
  const int index = index_of(self);
  Warp& warp = warps_[index / kWarpSize];
  warp.returned |= 1u << index % kWarpSize;
  for (const Meeting& meeting : warp.meetings) {
    if (meeting.mask & warp.returned) {
      fault("a thread returned for which its warp waits in %s with mask 0x%08x at %s:%d",
            meeting.collective.name, meeting.mask, meeting.site.file, meeting.site.line);
    }
  }
  self.state = State::kReturned;
  runnable_.reset(index);
  --live_;
  release_barrier_if_complete();  // of CUDA's barrier only threads that have not returned are part
  switch_to_next();
}

int Block::synchronize(const char* name, bool predicate, Site site) {
  Fiber& self = *current_;
  self.waits_in = name;
  self.site = site;
  self.mask = 0;
  self.state = State::kAtBarrier;
  runnable_.reset(index_of(self));
  barrier_votes_ += predicate;
  ++at_barrier_;
  release_barrier_if_complete();
  switch_to_next();
  return barrier_result_;
}

void Block::release_barrier_if_complete() {
  if (at_barrier_ == 0 || at_barrier_ < live_) return;
  const Fiber* first = nullptr;
  for (Fiber& fiber : fibers_) {
    if (fiber.state != State::kAtBarrier) continue;
    if (first == nullptr) first = &fiber;
    if (!same(fiber.site, first->site)) {
      fault("divergent barrier: thread (%u, %u, %u) is in %s at %s:%d, thread (%u, %u, %u) in %s at %s:%d",
            first->index.x, first->index.y, first->index.z, first->waits_in, first->site.file,
            first->site.line, fiber.index.x, fiber.index.y, fiber.index.z, fiber.waits_in, fiber.site.file,
            fiber.site.line);
    }
    fiber.state = State::kRunnable;
    runnable_.set(index_of(fiber));
  }
  barrier_result_ = barrier_votes_;
  at_barrier_ = barrier_votes_ = 0;
}

uint64_t Block::meet(const Collective& collective, unsigned mask, uint64_t value, int source, Site site) {
  Fiber& self = *current_;
  const int index = index_of(self), lane = index & kLaneMask;
  Warp& warp = warps_[index / kWarpSize];
  self.waits_in = collective.name;
  self.site = site;
  self.mask = mask;
  if (!(mask >> lane & 1u))
    fault("%s with mask 0x%08x, which leaves out its own lane %d", collective.name, mask, lane);
  Meeting& meeting = meeting_of(warp, collective, mask, site);
  warp.lanes[lane] = {value, source, 0};
  meeting.arrived |= 1u << lane;
  self.state = State::kAtCollective;
  runnable_.reset(index);
  if (meeting.arrived == mask) {
    if (collective.complete != nullptr) collective.complete(warp.lanes, mask);
    for_each_lane(mask, [&](int other) {
      const int arrived = index / kWarpSize * kWarpSize + other;
      fibers_[arrived].state = State::kRunnable;
      runnable_.set(arrived);
    });
    meeting = warp.meetings.back();
    warp.meetings.pop_back();
  }
  switch_to_next();
  return warp.lanes[lane].result;
}

Meeting& Block::meeting_of(Warp& warp, const Collective& collective, unsigned mask, Site site) {
  if (mask & warp.returned) {
    fault("%s with mask 0x%08x, but of its lanes 0x%08x have returned or do not exist", collective.name, mask,
          mask & warp.returned);
  }
  for (Meeting& meeting : warp.meetings) {
    if (!(meeting.mask & mask)) continue;
    const bool same_name = same(meeting.collective.name, collective.name);
    if (meeting.mask == mask && same_name && same(meeting.site, site)) return meeting;
    fault("%s with mask 0x%08x, while lanes 0x%08x of its warp wait in %s with mask 0x%08x at %s:%d",
          collective.name, mask, meeting.arrived, meeting.collective.name, meeting.mask, meeting.site.file,
          meeting.site.line);
  }
  warp.meetings.push_back({collective, mask, 0, site});
  return warp.meetings.back();
}

void Block::yield() { switch_to_next(); }

int Block::pick() {
  const int count = static_cast<int>(fibers_.size());
  if (runnable_.none()) return -1;
  if (seed == 0) return static_cast<int>(runnable_._Find_first());
  int last = count - 1;
  if (seed == 1) {
    while (!runnable_[last]) --last;
    return last;
  }
  const size_t found = runnable_._Find_next(random_.below(count));
  return static_cast<int>(found < kMaxThreads ? found : runnable_._Find_first());
}

void Block::switch_to_next() {
  const int next = pick();
  if (next >= 0) {
    if (&fibers_[next] != current_) switch_to(fibers_[next]);
  } else if (live_ == 0) {
    switch_to(main_);
  } else {
    report_deadlock();
  }
}

void Block::switch_to(Fiber& next) {
  Fiber& previous = *current_;
  previous_ = &previous;
  current_ = &next;
  threadIdx = next.index;
#ifdef STREAMLLM_SANITIZED
  const bool gone = previous.state == State::kReturned;
  __sanitizer_start_switch_fiber(gone ? nullptr : &previous.fake_stack, next.stack, next.stack_bytes);
#endif
  streamllm_switch_stack(&previous.stack_pointer, next.stack_pointer);
  arrived_from(*previous_);
}

void Block::arrived_from([[maybe_unused]] Fiber& previous) {
#ifdef STREAMLLM_SANITIZED
  const void* stack = nullptr;
  size_t stack_bytes = 0;
  __sanitizer_finish_switch_fiber(current_->fake_stack, &stack, &stack_bytes);
  previous.stack = const_cast<void*>(stack);  // the only way to learn of the process's own
  previous.stack_bytes = stack_bytes;
#endif
}

void Block::report_deadlock() {
  std::string text;
  std::vector<bool> told(fibers_.size());
  for (size_t i = 0; i < fibers_.size(); ++i) {
    const Fiber& fiber = fibers_[i];
    if (told[i] || fiber.state == State::kReturned) continue;
    int others = -1;
    for (size_t j = i; j < fibers_.size(); ++j) {
      const Fiber& other = fibers_[j];
      const bool waits = other.state != State::kReturned && !told[j];
      if (!waits || other.mask != fiber.mask || !same(other.site, fiber.site)) continue;
      told[j] = true;
      ++others;
    }
    char line[512];
    std::snprintf(line, sizeof line, "\n  thread (%u, %u, %u) and %d others in %s at %s:%d", fiber.index.x,
                  fiber.index.y, fiber.index.z, others, fiber.waits_in, fiber.site.file, fiber.site.line);
    text += line;
    if (fiber.mask == 0) continue;
    std::snprintf(line, sizeof line, " with mask 0x%08x", fiber.mask);
    text += line;
  }
  fault("threads wait for threads that do not come:%s", text.c_str());
}

}  // namespace streamllm::emulation
