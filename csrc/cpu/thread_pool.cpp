#include "thread_pool.hpp"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <stdexcept>
#include <string>

namespace streamllm::cpu {

namespace {

// How long a thread spins for the next task before it sleeps: longer than the gaps within a plan, short
// enough to leave the core to others.
constexpr std::chrono::microseconds kSpinTime{50};
constexpr int kSpinsPerClockRead = 32;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until done() or until kSpinTime is over; returns whether done.
template <typename Done>
bool spin_until(Done done) {
  const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < kSpinsPerClockRead; ++i) {
      if (done()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

constexpr uint32_t next_tile(uint64_t ticket) { return static_cast<uint32_t>(ticket); }
constexpr uint32_t num_tiles_of(uint64_t ticket) { return static_cast<uint32_t>(ticket >> 32); }

int checked_num_threads(int num_threads) {
  if (num_threads < 1 || num_threads > 1024) {
    throw std::invalid_argument("num_threads must be between 1 and 1024, not " + std::to_string(num_threads));
  }
  return num_threads;
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) : num_threads_(checked_num_threads(num_threads)) {
  // Signals belong to the interpreter's threads.
  sigset_t all, previous;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &previous);
  try {
    threads_.reserve(static_cast<size_t>(num_threads));
    threads_.emplace_back([this] { drive(); });
    for (int thread = 1; thread < num_threads; ++thread)
      threads_.emplace_back([this, thread] { work(thread); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &previous, nullptr);
    stop();
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &previous, nullptr);
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !launched_; });
    stopping_.store(true);
  }
  changed_.notify_all();
  published_.fetch_add(1);
  published_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::reserve(Job& job) {
  std::lock_guard lock(mutex_);
  if (job_ != nullptr) throw std::runtime_error("the thread pool is busy: wait for the submitted run to end");
  job_ = &job;
}

void ThreadPool::launch(int event_fd) {
  {
    std::lock_guard lock(mutex_);
    event_fd_ = event_fd;
    launched_ = true;
  }
  changed_.notify_all();
}

void ThreadPool::release() {
  {
    std::lock_guard lock(mutex_);
    job_ = nullptr;
  }
  changed_.notify_all();
}

void ThreadPool::wait(const Job& job) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return job_ != &job; });
}

bool ThreadPool::holds(const Job& job) {
  std::lock_guard lock(mutex_);
  return job_ == &job;
}

void ThreadPool::drive() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return launched_ || stopping_.load(); });
    if (!launched_) return;
    Job* job = job_;
    lock.unlock();
    job->run();
    lock.lock();
    job_ = nullptr;
    launched_ = false;
    // Written under the lock: whom it wakes finds the pool free, and whoever waited for the job may close it.
    if (event_fd_ >= 0) {
      const uint64_t one = 1;
      while (::write(event_fd_, &one, sizeof one) < 0 && errno == EINTR) {
      }
    }
    changed_.notify_all();
  }
}

void ThreadPool::run_claimed_tiles(int thread) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while (next_tile(ticket) < num_tiles_of(ticket)) {
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel,
                                       std::memory_order_acquire)) {
      continue;
    }
    task_->run_tile(next_tile(ticket), thread);
    const auto num_tiles = static_cast<int32_t>(num_tiles_of(ticket));
    // From here on the driver may publish another task.
    if (completed_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_tiles && thread != 0) {
      completed_.notify_one();
    }
    ticket = ticket_.load(std::memory_order_acquire);
  }
}

void ThreadPool::work(int thread) {
  for (;;) {
    // Before stopping_, which stop() sets before it counts up: who has seen its count knows of the end, and who
    // has not does not sleep on it.
    const int32_t seen = published_.load(std::memory_order_acquire);
    if (stopping_.load(std::memory_order_acquire)) return;
    run_claimed_tiles(thread);
    if (spin_until([&] { return published_.load(std::memory_order_acquire) != seen; })) continue;
    // The driver counts up first and looks for sleepers then; here it is the other way round.
    num_sleeping_.fetch_add(1);
    published_.wait(seen);
    num_sleeping_.fetch_sub(1);
  }
}

void ThreadPool::parallel_for(int64_t num_tiles, TileTask& task) {
  if (num_tiles <= 1 || num_threads_ == 1) {
    for (int64_t tile = 0; tile < num_tiles; ++tile) task.run_tile(tile, 0);
    return;
  }
  task_ = &task;
  completed_.store(0, std::memory_order_relaxed);
  ticket_.store(static_cast<uint64_t>(num_tiles) << 32, std::memory_order_release);
  published_.fetch_add(1);
  if (num_sleeping_.load() > 0) published_.notify_all();
  run_claimed_tiles(0);
  wait_for_tiles(static_cast<int32_t>(num_tiles));
}

void ThreadPool::wait_for_tiles(int32_t num_tiles) {
  if (spin_until([&] { return completed_.load(std::memory_order_acquire) == num_tiles; })) return;
  for (;;) {
    const int32_t completed = completed_.load(std::memory_order_acquire);
    if (completed == num_tiles) return;
    completed_.wait(completed);
  }
}

}  // namespace streamllm::cpu
