// Threads that replay plans: one driver, which walks through a plan's operations, and workers that help it
// with each operation's tiles.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace streamllm::cpu {

// Work that falls into independent tiles.
class TileTask {
 public:
  virtual ~TileTask() = default;
  // `thread` is below the pool's num_threads; no two tiles run with the same `thread` at once.
  virtual void run_tile(int64_t tile, int thread) noexcept = 0;
};

// What the driver runs; it calls ThreadPool::parallel_for.
class Job {
 public:
  virtual ~Job() = default;
  virtual void run() noexcept = 0;
};

class ThreadPool {
 public:
  // Starts the driver and num_threads - 1 workers. Throws std::invalid_argument below 1 or above 1024.
  explicit ThreadPool(int num_threads);
  // Waits for the job in progress, then joins all threads.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  // One job at a time: reserve (throws std::runtime_error while another job holds the pool), then either
  // launch it on the driver, or release. When it is done the driver writes 1 to `event_fd` (-1: none).
  void reserve(Job& job);
  void launch(int event_fd);
  void release();
  // Blocks until `job` is not the one that holds the pool.
  void wait(const Job& job);
  bool holds(const Job& job);

  // Runs all tiles of `task` and returns when they are done. Only from Job::run.
  void parallel_for(int64_t num_tiles, TileTask& task);

 private:
  void stop();
  void drive();
  void work(int thread);
  void run_claimed_tiles(int thread);
  void wait_for_tiles(int32_t num_tiles);

  const int num_threads_;

  // The tiles in progress. A ticket holds (number of tiles << 32 | next tile): whoever advances it owns that
  // tile, and may then read task_, which stays as it is until all tiles are completed. A worker that
  // arrives late therefore needs no barrier: its exchange fails, or it claims a tile of the current task.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int32_t> completed_{0};
  alignas(64) std::atomic<int32_t> published_{0};  // counts tasks; workers sleep on it
  std::atomic<int32_t> num_sleeping_{0};
  std::atomic<bool> stopping_{false};
  TileTask* task_ = nullptr;

  alignas(64) std::mutex mutex_;
  std::condition_variable changed_;
  Job* job_ = nullptr;
  bool launched_ = false;
  int event_fd_ = -1;

  std::vector<std::thread> threads_;
};

}  // namespace streamllm::cpu
