// A forward pass recorded as a list of operations over preallocated buffers, and replayed by one call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include "thread_pool.hpp"

namespace streamllm::cpu {

struct RunSizes {
  int64_t tokens = 0;  // rows of most operations
  int64_t sequences = 0;
  int64_t outputs = 0;  // rows of operations recorded on outputs
};

// One recorded operation. prepare() is called for every run, before any operation of it starts, and may read
// index arrays that the caller filled; run_tile() then does the tiles that it returned.
class Op : public TileTask {
 public:
  virtual int64_t prepare(const RunSizes& sizes, int num_threads) = 0;
};

// Memory in which an operation leaves something for the next one; all operations of a plan share it.
class Scratch {
 public:
  // At least `num_bytes`, aligned to 64; what was there before is lost if it has to grow.
  void* reserve(size_t num_bytes) {
    const size_t needed = (num_bytes + sizeof(Line) - 1) / sizeof(Line);
    if (needed > lines_.size()) lines_.resize(needed);
    return lines_.data();
  }
  void* data() { return lines_.data(); }

 private:
  struct alignas(64) Line {
    unsigned char bytes[64];
  };
  std::vector<Line> lines_;
};

// What an operation of the run in progress threw, if one did: the run ends there. An operation that may fail
// has one tile, so that the driver alone reads and writes it.
using RunFailure = std::exception_ptr;

class Plan : private Job {
 public:
  explicit Plan(std::shared_ptr<ThreadPool> pool);
  // Waits for the run in progress.
  ~Plan() override;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  // Throws std::runtime_error while the plan runs.
  void add(std::unique_ptr<Op> op);
  size_t num_ops() const { return steps_.size(); }
  int num_threads() const { return pool_->num_threads(); }
  const std::shared_ptr<Scratch>& scratch() const { return scratch_; }
  const std::shared_ptr<RunFailure>& failure() const { return failure_; }

  // Replays all operations in order, on the pool's threads; the driver then writes 1 to `event_fd` (-1:
  // none). Throws std::runtime_error if the pool is busy, std::invalid_argument for negative sizes or index
  // arrays that contradict them.
  void submit(const RunSizes& sizes, int event_fd);
  // Blocks until the run is done; throws, once, what ended it before its end.
  void wait();
  void wait_noexcept() noexcept { pool_->wait(*this); }

 private:
  struct Step {
    std::unique_ptr<Op> op;
    int64_t num_tiles;
  };

  void run() noexcept override;

  std::shared_ptr<ThreadPool> pool_;
  std::shared_ptr<Scratch> scratch_ = std::make_shared<Scratch>();
  std::shared_ptr<RunFailure> failure_ = std::make_shared<RunFailure>();
  std::vector<Step> steps_;
};

}  // namespace streamllm::cpu
