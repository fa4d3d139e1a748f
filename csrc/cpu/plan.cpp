#include "plan.hpp"

#include <stdexcept>
#include <utility>

namespace streamllm::cpu {

Plan::Plan(std::shared_ptr<ThreadPool> pool) : pool_(std::move(pool)) {}

Plan::~Plan() { wait_noexcept(); }

void Plan::add(std::unique_ptr<Op> op) {
  if (pool_->holds(*this)) throw std::runtime_error("the plan is running: record operations before or after");
  steps_.push_back({std::move(op), 0});
}

void Plan::submit(const RunSizes& sizes, int event_fd) {
  if (sizes.tokens < 0 || sizes.sequences < 0 || sizes.outputs < 0) {
    throw std::invalid_argument("num_tokens, num_sequences and num_outputs must not be negative");
  }
  pool_->reserve(*this);
  *failure_ = nullptr;
  try {
    for (Step& step : steps_) {
      step.num_tiles = step.op->prepare(sizes, pool_->num_threads());
      if (step.num_tiles > INT32_MAX) throw std::invalid_argument("the batch is too large");
    }
  } catch (...) {
    pool_->release();
    throw;
  }
  pool_->launch(event_fd);
}

void Plan::wait() {
  pool_->wait(*this);
  if (*failure_) std::rethrow_exception(std::exchange(*failure_, nullptr));
}

void Plan::run() noexcept {
  for (Step& step : steps_) {
    pool_->parallel_for(step.num_tiles, *step.op);
    if (*failure_) return;
  }
}

}  // namespace streamllm::cpu
