// What low-rank adapters add to products (LoRA, Hu et al. 2021). Adapters lie in slots; a plan reads at run
// time which rows have which slot, and where a slot's matrices are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ops.hpp"

namespace streamllm::cpu {

// b @ a for the rows of one part of a matrix, as float32 or bfloat16 in panels of kLoraColumns columns:
// a[rank, k] as [rank / 16][k][16], b[rows, rank] as [rows / 16][rank][16]; columns past the end are zero.
class LoraUpdate {
 public:
  // Packs row-major float32 a[rank, k] and b[rows, rank]; bfloat16 is rounded to the nearest. Throws
  // std::invalid_argument for a size below 1, std::bad_alloc without memory.
  LoraUpdate(const float* a, const float* b, int64_t rows, int64_t rank, int64_t k, WeightFormat format);

  int64_t rows() const { return rows_; }
  int64_t rank() const { return rank_; }
  int64_t k() const { return k_; }
  size_t num_bytes() const { return num_bytes_; }
  const uint8_t* a() const { return memory_.get(); }
  const uint8_t* b() const { return memory_.get() + a_bytes_; }
  const LoraKernels& kernels() const;

 private:
  const int64_t rows_, rank_, k_;
  const WeightFormat format_;
  size_t a_bytes_ = 0, num_bytes_ = 0;
  std::shared_ptr<uint8_t> memory_;
};

using LoraUpdatePtr = std::shared_ptr<const LoraUpdate>;

// What the adapters in the slots add to one matrix, part by part.
class LoraSlots {
 public:
  // `part_rows`: rows of the parts that the matrix is stacked of. Throws std::invalid_argument for a size
  // below 1.
  LoraSlots(std::vector<int64_t> part_rows, int64_t k, int64_t max_loras, int64_t max_rank);

  // Not while a plan runs that reads the slot. Throws std::invalid_argument for a slot or a part that there
  // is not, or an update that does not fit it.
  void set(int64_t slot, int64_t part, LoraUpdatePtr update);
  void clear(int64_t slot);

  int64_t n() const { return first_rows_.back(); }
  int64_t k() const { return k_; }
  int64_t max_loras() const { return max_loras_; }
  int64_t num_parts() const { return static_cast<int64_t>(first_rows_.size()) - 1; }
  int64_t first_row(int64_t part) const { return first_rows_[part]; }
  // Elements of a @ x that a part has room for: whole panels.
  int64_t part_width() const { return part_width_; }
  const LoraUpdate* update(int64_t slot, int64_t part) const {
    return updates_[slot * num_parts() + part].get();
  }

 private:
  void check_slot(int64_t slot) const;

  std::vector<int64_t> first_rows_;  // [num_parts + 1]
  const int64_t k_, max_loras_, max_rank_, part_width_;
  std::vector<LoraUpdatePtr> updates_;  // [max_loras][num_parts]; nullptr: none
};

// The rows of a run that have adapters, by slot. All operations of a plan share it.
class LoraRows {
 public:
  // Consecutive entries of order() with one slot.
  struct Block {
    int32_t slot;
    int64_t first, rows;
  };

  LoraRows(int64_t max_loras, int num_threads);

  // For the next run: int32 slots[count], -1 for none. Throws std::invalid_argument for other numbers.
  void assign(const int32_t* slots, int64_t count);

  int64_t max_loras() const { return max_loras_; }
  int num_threads() const { return num_threads_; }
  int64_t num_tokens() const { return num_tokens_; }
  // Numbers of rows, those of a slot side by side.
  const std::vector<int32_t>& order() const { return order_; }
  const std::vector<Block>& blocks() const { return blocks_; }
  bool has_many_blocks() const { return static_cast<int>(blocks_.size()) >= 4 * num_threads_; }

  // Working memory of a tile; all of it is made when an operation is recorded.
  void require_thread_floats(int64_t count);
  float* thread_memory(int thread) { return static_cast<float*>(thread_memory_[thread].data()); }

 private:
  const int64_t max_loras_;
  const int num_threads_;
  int64_t num_tokens_ = 0;
  std::vector<int32_t> order_;
  std::vector<Block> blocks_;
  std::vector<Scratch> thread_memory_;
};

// x as LoraAddArgs and products read it: float32 rows, or quantised ones if `quantized_x` is not nullptr.
struct LoraAddArgs {
  const float* x;
  int64_t x_stride;
  const QuantizedGroup* quantized_x;
  float* out;
  int64_t out_stride;
};

// out[row] += b @ (a @ x[row]) for all parts of the adapters that the rows have: two operations, of which the
// first leaves a @ x in `scratch`.
std::vector<std::unique_ptr<Op>> make_lora_add(const LoraAddArgs& args,
                                               const std::shared_ptr<const LoraSlots>& slots,
                                               const std::shared_ptr<LoraRows>& rows,
                                               const std::shared_ptr<Scratch>& scratch);

}  // namespace streamllm::cpu
