// A weight in the layout that the matrix product reads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace streamllm::cpu {

// Float32 weight W[n, k] of a product x @ W^T, in panels of 32 output columns: [ceil(n / 32)][k][32], the
// columns past n zero. The same layout serves every instruction set.
class PackedMatrix {
 public:
  // All zeros. Throws std::invalid_argument for sizes below 1, std::bad_alloc without memory.
  PackedMatrix(int64_t n, int64_t k);
  ~PackedMatrix();
  PackedMatrix(const PackedMatrix&) = delete;
  PackedMatrix& operator=(const PackedMatrix&) = delete;

  // Copies W[first_row : first_row + rows, :] from row-major memory; distinct rows may be packed at once
  // by several threads. Throws std::invalid_argument if the rows do not lie within [0, n).
  void pack_rows(int64_t first_row, const float* source, int64_t rows, int64_t row_stride);

  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  int64_t num_panels() const;
  size_t num_bytes() const;
  const float* panels() const { return panels_; }

 private:
  const int64_t n_, k_;
  float* panels_;
};

}  // namespace streamllm::cpu
