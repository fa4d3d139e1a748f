#include "packed_matrix.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>

#include "kernels.hpp"

namespace streamllm::cpu {

PackedMatrix::PackedMatrix(int64_t n, int64_t k) : n_(n), k_(k) {
  constexpr int64_t kLimit = int64_t{1} << 31;
  if (n < 1 || k < 1 || n >= kLimit || k >= kLimit) {
    throw std::invalid_argument("n and k must be between 1 and 2^31 - 1, not " + std::to_string(n) + " and " +
                                std::to_string(k));
  }
  void* memory = mmap(nullptr, num_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  madvise(memory, num_bytes(), MADV_HUGEPAGE);
#endif
  panels_ = static_cast<float*>(memory);
}

PackedMatrix::~PackedMatrix() { munmap(panels_, num_bytes()); }

int64_t PackedMatrix::num_panels() const { return (n_ + kPanelColumns - 1) / kPanelColumns; }

size_t PackedMatrix::num_bytes() const {
  return static_cast<size_t>(num_panels()) * static_cast<size_t>(k_) * kPanelColumns * sizeof(float);
}

void PackedMatrix::pack_rows(int64_t first_row, const float* source, int64_t rows, int64_t row_stride) {
  if (first_row < 0 || rows < 0 || first_row > n_ - rows) {
    throw std::invalid_argument("rows " + std::to_string(first_row) + " to " +
                                std::to_string(first_row + rows) + " do not lie within a matrix of " +
                                std::to_string(n_) + " rows");
  }
  if (row_stride < k_) {
    throw std::invalid_argument("row_stride must be at least k = " + std::to_string(k_) + ", not " +
                                std::to_string(row_stride));
  }
  // One cache line of each source row at a time: its 16 target lines stay in the first-level cache.
  constexpr int64_t kStretch = 16;
  const int64_t last_row = first_row + rows;
  for (int64_t row = first_row; row < last_row;) {
    const int64_t panel = row / kPanelColumns;
    const int64_t end = std::min(last_row, (panel + 1) * kPanelColumns);
    float* target = panels_ + panel * k_ * kPanelColumns;
    for (int64_t begin = 0; begin < k_; begin += kStretch) {
      const int64_t stop = std::min(k_, begin + kStretch);
      for (int64_t r = row; r < end; ++r) {
        const float* from = source + (r - first_row) * row_stride;
        float* to = target + r % kPanelColumns;
        for (int64_t i = begin; i < stop; ++i) to[i * kPanelColumns] = from[i];
      }
    }
    row = end;
  }
}

}  // namespace streamllm::cpu
