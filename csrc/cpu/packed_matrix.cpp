#include "packed_matrix.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "checks.hpp"
#include "weight_memory.hpp"

namespace streamllm::cpu {

namespace {

constexpr int64_t kLimit = int64_t{1} << 31;
constexpr size_t kBytesPerThread = size_t{4} << 20;  // what is worth starting a thread for

// Calls function(panel) for panels 0 .. num_panels - 1, each on one of `num_threads` threads.
template <typename Function>
void for_each_panel(int64_t num_panels, int num_threads, Function function) {
  const auto run = [&](int thread) {
    for (int64_t panel = thread; panel < num_panels; panel += num_threads) function(panel);
  };
  std::vector<std::thread> threads;
  for (int thread = 1; thread < num_threads; ++thread) threads.emplace_back(run, thread);
  run(0);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

PackedMatrix::PackedMatrix(int64_t k) : k_(k) {
  if (k < 1 || k >= kLimit) {
    throw std::invalid_argument("k must be between 1 and 2^31 - 1, not " + std::to_string(k));
  }
}

void PackedMatrix::append_rows(WeightFormat format, const uint8_t* source, int64_t rows, int64_t row_stride,
                               int num_threads) {
  const WeightFormatInfo& info = format_info(format);
  if (k_ % info.elements != 0) {
    throw std::invalid_argument("rows of " + std::to_string(k_) + " elements cannot be " + info.name +
                                ": its blocks have " + std::to_string(info.elements));
  }
  if (rows < 1 || rows >= kLimit - n_) {
    throw std::invalid_argument("rows must be at least 1, and fewer than 2^31 in all, not " +
                                std::to_string(rows) + " after " + std::to_string(n_));
  }
  check_at_least("row_stride", row_stride, info.row_bytes(k_));
  check_at_least("num_threads", num_threads, 1);
  Segment segment{format, n_, rows, nullptr, info.panel_row_bytes(k_) * kPanelColumns};
  const size_t num_bytes = static_cast<size_t>(segment.panel_bytes) * segment.num_panels();
  std::shared_ptr<uint8_t> panels = allocate_weights(num_bytes);
  const int useful_threads = static_cast<int>(std::min<size_t>(num_threads, num_bytes / kBytesPerThread + 1));
  for_each_panel(segment.num_panels(), useful_threads, [&](int64_t panel) {
    const int64_t row = panel * kPanelColumns;
    info.pack(source + row * row_stride, row_stride, std::min<int64_t>(kPanelColumns, rows - row), k_,
              panels.get() + panel * segment.panel_bytes);
  });
  segment.panels = std::move(panels);
  segments_.push_back(std::move(segment));
  n_ += rows;
  num_bytes_ += num_bytes;
}

}  // namespace streamllm::cpu
