#include "packed_matrix.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "checks.hpp"
#include "weight_memory.hpp"

namespace streamllm::cpu {

namespace {

constexpr int64_t kLimit = int64_t{1} << 31;

}  // namespace

PackedMatrix::PackedMatrix(int64_t k) : k_(k) {
  if (k < 1 || k >= kLimit) {
    throw std::invalid_argument("k must be between 1 and 2^31 - 1, not " + std::to_string(k));
  }
}

void PackedMatrix::append_rows(WeightFormat format, const uint8_t* source, int64_t rows, int64_t row_stride) {
  const WeightFormatInfo& info = format_info(format);
  if (k_ % info.group != 0) {
    throw std::invalid_argument("rows of " + std::to_string(k_) + " elements cannot be " + info.name +
                                ": its groups have " + std::to_string(info.group));
  }
  if (rows < 1 || rows >= kLimit - n_) {
    throw std::invalid_argument("rows must be at least 1, and fewer than 2^31 in all, not " +
                                std::to_string(rows) + " after " + std::to_string(n_));
  }
  check_at_least("row_stride", row_stride, info.row_bytes(k_));
  Segment segment{format, n_, rows, nullptr, info.row_bytes(k_) * kPanelColumns};
  const size_t num_bytes = static_cast<size_t>(segment.panel_bytes) * segment.num_panels();
  std::shared_ptr<uint8_t> panels = allocate_weights(num_bytes);
  for (int64_t row = 0; row < rows; row += kPanelColumns) {
    info.pack(source + row * row_stride, row_stride, std::min<int64_t>(kPanelColumns, rows - row), k_,
              panels.get() + row / kPanelColumns * segment.panel_bytes);
  }
  segment.panels = std::move(panels);
  segments_.push_back(std::move(segment));
  n_ += rows;
  num_bytes_ += num_bytes;
}

}  // namespace streamllm::cpu
