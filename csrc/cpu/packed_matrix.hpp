// A weight in the layout that the matrix product reads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "weight_format.hpp"

namespace streamllm::cpu {

// Weight W[n, k] of a product x @ W^T, made of row segments, each in a format of its own and in panels of 32
// output columns (weight_format.hpp has the layout; columns past a segment's rows are zero). The same layout
// serves every instruction set.
class PackedMatrix {
 public:
  struct Segment {
    WeightFormat format;
    int64_t first_row, rows;
    std::shared_ptr<const uint8_t> panels;
    int64_t panel_bytes;

    int64_t num_panels() const { return (rows + kPanelColumns - 1) / kPanelColumns; }
  };

  // Without rows. Throws std::invalid_argument for k below 1 or above 2^31 - 1.
  explicit PackedMatrix(int64_t k);

  // Copies `rows` rows, `row_stride` bytes apart and stored as `format` says, to the matrix's end, on up to
  // `num_threads` threads. Throws std::invalid_argument if k, rows or row_stride do not fit the format,
  // std::bad_alloc without memory.
  void append_rows(WeightFormat format, const uint8_t* source, int64_t rows, int64_t row_stride,
                   int num_threads = 1);

  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  // Whether all rows are, so that a product takes its activations quantised.
  bool is_quantized() const {
    return std::all_of(segments_.begin(), segments_.end(),
                       [](const Segment& segment) { return format_info(segment.format).quantized; });
  }
  size_t num_bytes() const { return num_bytes_; }
  const std::vector<Segment>& segments() const { return segments_; }

 private:
  const int64_t k_;
  int64_t n_ = 0;
  size_t num_bytes_ = 0;
  std::vector<Segment> segments_;
};

}  // namespace streamllm::cpu
