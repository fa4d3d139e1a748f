// Python functions that plans call.
#pragma once

#include <nanobind/nanobind.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "cpu/plan.hpp"

namespace streamllm {

// Calls from foreign threads against the interpreter's exit: a thread that asks a finalised interpreter for
// its lock is ended in the middle of what it does. So none begins once the exit has begun, which waits for
// those that have, as it does for Python's own threads.
class ExitGuard {
 public:
  // Whether a call may begin; leave() then ends it.
  bool enter() {
    std::lock_guard lock(mutex_);
    if (closed_) return false;
    ++calls_;
    return true;
  }
  void leave() {
    std::lock_guard lock(mutex_);
    if (--calls_ == 0) idle_.notify_all();
  }
  void close() {
    std::unique_lock lock(mutex_);
    closed_ = true;
    idle_.wait(lock, [this] { return calls_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable idle_;
  int64_t calls_ = 0;
  bool closed_ = false;
};

// Never destroyed: threads may outlive the interpreter.
inline ExitGuard& exit_guard() {
  static auto* guard = new ExitGuard;
  return *guard;
}

// What calls `function` with a number, on any thread. To be destroyed with the interpreter lock held.
inline std::function<void(int64_t)> host_call(nanobind::callable function) {
  return [function = std::move(function)](int64_t rows) {
    if (!exit_guard().enter()) throw std::runtime_error("the interpreter is shutting down");
    struct Leave {
      ~Leave() { exit_guard().leave(); }
    } leave;
    nanobind::gil_scoped_acquire lock;
    // The thread's state in the interpreter stays: to make one takes several microseconds. The thread leaves
    // it behind when it ends, for whoever waits for its end may hold the lock.
    [[maybe_unused]] thread_local const PyGILState_STATE kept = PyGILState_Ensure();
    function(rows);
  };
}

// A plan that goes with the interpreter lock held, but waits without it: the run in progress may need it for
// a host call.
inline std::shared_ptr<cpu::Plan> make_plan(std::shared_ptr<cpu::ThreadPool> pool) {
  return {new cpu::Plan(std::move(pool)), [](cpu::Plan* plan) {
            {
              nanobind::gil_scoped_release unlocked;
              plan->wait_noexcept();
            }
            delete plan;
          }};
}

inline void close_at_exit() {
  const auto close = nanobind::cpp_function([] { exit_guard().close(); },
                                            nanobind::call_guard<nanobind::gil_scoped_release>());
  nanobind::module_::import_("atexit").attr("register")(close);
}

}  // namespace streamllm
