#include "lora.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "checks.hpp"

namespace streamllm::cpu {

namespace {

constexpr int64_t kRowsAtOnce = 8;  // whose x is dequantised before it is multiplied
constexpr int64_t kMaxBlockRows = 48;
constexpr int64_t kColumnsPerTile = 256;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t num_panels(int64_t columns) { return ceil_div(columns, kLoraColumns); }

// To the nearest, ties to even; infinity and NaN stay what they are.
BFloat16 to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(bits >> 16 | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
}

void store_element(float value, float* target) { *target = value; }
void store_element(float value, BFloat16* target) { *target = to_bfloat16(value); }

// Panels [columns / 16][depth][16] of row-major source[columns, depth].
template <typename W>
void pack_panels(const float* source, int64_t columns, int64_t depth, uint8_t* memory) {
  W* panels = reinterpret_cast<W*>(memory);
  for (int64_t column = 0; column < columns; ++column) {
    W* target = panels + column / kLoraColumns * depth * kLoraColumns + column % kLoraColumns;
    for (int64_t i = 0; i < depth; ++i) store_element(source[column * depth + i], target + i * kLoraColumns);
  }
}

// a @ x of the rows that have adapters.
class ShrinkOp final : public Op {
 public:
  ShrinkOp(const LoraAddArgs& args, std::shared_ptr<const LoraSlots> slots, std::shared_ptr<LoraRows> rows,
           std::shared_ptr<Scratch> scratch)
      : args_(args), slots_(std::move(slots)), rows_(std::move(rows)), scratch_(std::move(scratch)) {
    if (args.quantized_x != nullptr) rows_->require_thread_floats(kRowsAtOnce * slots_->k());
  }

  int64_t prepare(const RunSizes& sizes, int) override {
    const auto num_blocks = static_cast<int64_t>(rows_->blocks().size());
    if (num_blocks == 0) return 0;
    if (rows_->num_tokens() != sizes.tokens) {
      throw std::invalid_argument("the rows of adapters are for " + std::to_string(rows_->num_tokens()) +
                                  " tokens, not " + std::to_string(sizes.tokens));
    }
    tokens_ = sizes.tokens;
    const int64_t width = slots_->num_parts() * slots_->part_width();
    scratch_->reserve(rows_->order().size() * static_cast<size_t>(width) * sizeof(float));
    // Parts share a tile, and the dequantised x, if there is work for all threads without them.
    parts_per_tile_ = rows_->has_many_blocks() ? slots_->num_parts() : 1;
    return num_blocks * (slots_->num_parts() / parts_per_tile_);
  }

  void run_tile(int64_t tile, int thread) noexcept override {
    const int64_t tiles_per_block = slots_->num_parts() / parts_per_tile_;
    const LoraRows::Block& block = rows_->blocks()[tile / tiles_per_block];
    const int64_t first_part = tile % tiles_per_block * parts_per_tile_;
    const int64_t end_part = first_part + parts_per_tile_;
    bool is_adapted = false;
    for (int64_t part = first_part; part < end_part; ++part) {
      is_adapted |= slots_->update(block.slot, part) != nullptr;
    }
    if (!is_adapted) return;
    for (int64_t row = 0; row < block.rows; row += kRowsAtOnce) {
      shrink(block, row, std::min(kRowsAtOnce, block.rows - row), first_part, end_part, thread);
    }
  }

 private:
  void shrink(const LoraRows::Block& block, int64_t first_row, int64_t count, int64_t first_part,
              int64_t end_part, int thread) const {
    const float* x[kRowsAtOnce];
    for (int64_t i = 0; i < count; ++i) {
      x[i] = x_row(rows_->order()[block.first + first_row + i], i, thread);
    }
    const int64_t width = slots_->num_parts() * slots_->part_width();
    float* out = static_cast<float*>(scratch_->data()) + (block.first + first_row) * width;
    for (int64_t part = first_part; part < end_part; ++part) {
      const LoraUpdate* update = slots_->update(block.slot, part);
      if (update == nullptr) continue;
      update->kernels().shrink({.x = x,
                                .a = update->a(),
                                .rank = update->rank(),
                                .k = update->k(),
                                .out = out + part * slots_->part_width(),
                                .out_stride = width},
                               count);
    }
  }

  const float* x_row(int64_t row, int64_t place, int thread) const {
    if (args_.quantized_x == nullptr) return args_.x + row * args_.x_stride;
    float* const values = rows_->thread_memory(thread) + place * slots_->k();
    kernels().dequantize_row(args_.quantized_x + row, quantized_stride(tokens_), slots_->k(), values);
    return values;
  }

  const LoraAddArgs args_;
  const std::shared_ptr<const LoraSlots> slots_;
  const std::shared_ptr<LoraRows> rows_;
  const std::shared_ptr<Scratch> scratch_;
  int64_t tokens_ = 0, parts_per_tile_ = 1;
};

// out += b @ what the operation before left.
class ExpandOp final : public Op {
 public:
  ExpandOp(const LoraAddArgs& args, std::shared_ptr<const LoraSlots> slots, std::shared_ptr<LoraRows> rows,
           std::shared_ptr<Scratch> scratch)
      : args_(args), slots_(std::move(slots)), rows_(std::move(rows)), scratch_(std::move(scratch)) {}

  int64_t prepare(const RunSizes&, int) override {
    columns_per_tile_ = rows_->has_many_blocks() ? slots_->n() : kColumnsPerTile;
    tiles_per_block_ = ceil_div(slots_->n(), columns_per_tile_);
    return static_cast<int64_t>(rows_->blocks().size()) * tiles_per_block_;
  }

  void run_tile(int64_t tile, int) noexcept override {
    const LoraRows::Block& block = rows_->blocks()[tile / tiles_per_block_];
    const int64_t first_column = tile % tiles_per_block_ * columns_per_tile_;
    float* rows[kMaxBlockRows];
    for (int64_t part = 0; part < slots_->num_parts(); ++part) {
      const LoraUpdate* update = slots_->update(block.slot, part);
      if (update == nullptr) continue;
      // The panels that begin in the tile's columns.
      const int64_t part_column = first_column - slots_->first_row(part);
      const int64_t first_panel = std::max<int64_t>(0, num_panels(part_column));
      const int64_t end_panel =
          std::min(num_panels(part_column + columns_per_tile_), num_panels(update->rows()));
      if (first_panel >= end_panel) continue;
      for (int64_t i = 0; i < block.rows; ++i) {
        rows[i] = args_.out + rows_->order()[block.first + i] * args_.out_stride + slots_->first_row(part);
      }
      const int64_t width = slots_->num_parts() * slots_->part_width();
      update->kernels().expand({.h = static_cast<const float*>(scratch_->data()) + block.first * width +
                                     part * slots_->part_width(),
                                .h_stride = width,
                                .b = update->b(),
                                .rank = update->rank(),
                                .n = update->rows(),
                                .out = rows},
                               block.rows, first_panel, end_panel);
    }
  }

 private:
  const LoraAddArgs args_;
  const std::shared_ptr<const LoraSlots> slots_;
  const std::shared_ptr<LoraRows> rows_;
  const std::shared_ptr<Scratch> scratch_;
  int64_t columns_per_tile_ = 1, tiles_per_block_ = 1;
};

}  // namespace

LoraUpdate::LoraUpdate(const float* a, const float* b, int64_t rows, int64_t rank, int64_t k,
                       WeightFormat format)
    : rows_(rows), rank_(rank), k_(k), format_(format) {
  check_address("a", a);
  check_address("b", b);
  check_at_least("rows", rows, 1);
  check_at_least("rank", rank, 1);
  check_at_least("k", k, 1);
  if (format != WeightFormat::float32 && format != WeightFormat::bfloat16) {
    throw std::invalid_argument("adapters are float32 or bfloat16");
  }
  const size_t panel_row =
      kLoraColumns * (format == WeightFormat::float32 ? sizeof(float) : sizeof(BFloat16));
  a_bytes_ = (static_cast<size_t>(num_panels(rank) * k) * panel_row + 63) / 64 * 64;
  num_bytes_ = (a_bytes_ + static_cast<size_t>(num_panels(rows) * rank) * panel_row + 63) / 64 * 64;
  memory_.reset(static_cast<uint8_t*>(std::aligned_alloc(64, num_bytes_)), &std::free);
  if (memory_ == nullptr) throw std::bad_alloc();
  std::fill_n(memory_.get(), num_bytes_, uint8_t{0});
  const auto pack = format == WeightFormat::float32 ? &pack_panels<float> : &pack_panels<BFloat16>;
  pack(a, rank, k, memory_.get());
  pack(b, rows, rank, memory_.get() + a_bytes_);
}

const LoraKernels& LoraUpdate::kernels() const {
  return cpu::kernels().lora[format_ == WeightFormat::bfloat16 ? 1 : 0];
}

LoraSlots::LoraSlots(std::vector<int64_t> part_rows, int64_t k, int64_t max_loras, int64_t max_rank)
    : first_rows_{0},
      k_(k),
      max_loras_(max_loras),
      max_rank_(max_rank),
      part_width_(num_panels(max_rank) * kLoraColumns) {
  check_at_least("the number of parts", static_cast<int64_t>(part_rows.size()), 1);
  check_at_least("k", k, 1);
  check_at_least("max_loras", max_loras, 1);
  check_at_least("max_rank", max_rank, 1);
  for (const int64_t rows : part_rows) {
    check_at_least("a part's rows", rows, 1);
    first_rows_.push_back(first_rows_.back() + rows);
  }
  updates_.resize(static_cast<size_t>(max_loras * num_parts()));
}

void LoraSlots::check_slot(int64_t slot) const {
  if (slot < 0 || slot >= max_loras_) {
    throw std::invalid_argument("slot must be between 0 and " + std::to_string(max_loras_ - 1) + ", not " +
                                std::to_string(slot));
  }
}

void LoraSlots::set(int64_t slot, int64_t part, LoraUpdatePtr update) {
  check_slot(slot);
  if (part < 0 || part >= num_parts()) {
    throw std::invalid_argument("part must be between 0 and " + std::to_string(num_parts() - 1) + ", not " +
                                std::to_string(part));
  }
  const int64_t rows = first_row(part + 1) - first_row(part);
  if (update == nullptr || update->k() != k_ || update->rows() != rows || update->rank() > max_rank_) {
    throw std::invalid_argument("the update does not fit a part [" + std::to_string(rows) + ", " +
                                std::to_string(k_) + "] and ranks up to " + std::to_string(max_rank_));
  }
  updates_[static_cast<size_t>(slot * num_parts() + part)] = std::move(update);
}

void LoraSlots::clear(int64_t slot) {
  check_slot(slot);
  std::fill_n(updates_.begin() + slot * num_parts(), num_parts(), nullptr);
}

LoraRows::LoraRows(int64_t max_loras, int num_threads) : max_loras_(max_loras), num_threads_(num_threads) {
  check_at_least("max_loras", max_loras, 1);
  check_at_least("num_threads", num_threads, 1);
  thread_memory_.resize(static_cast<size_t>(num_threads));
}

void LoraRows::assign(const int32_t* slots, int64_t count) {
  std::vector<std::vector<int32_t>> rows_of(static_cast<size_t>(max_loras_));
  int64_t num_adapted = 0;
  for (int64_t row = 0; row < count; ++row) {
    if (slots[row] == -1) continue;
    if (slots[row] < 0 || slots[row] >= max_loras_) {
      throw std::invalid_argument("a row's slot must be -1 or below " + std::to_string(max_loras_) +
                                  ", not " + std::to_string(slots[row]));
    }
    rows_of[static_cast<size_t>(slots[row])].push_back(static_cast<int32_t>(row));
    ++num_adapted;
  }
  num_tokens_ = count;
  order_.clear();
  blocks_.clear();
  // Enough blocks for all threads, of whole tiles.
  const int64_t rows_each = ceil_div(num_adapted, int64_t{4} * num_threads_);
  const int64_t block_rows =
      std::clamp(ceil_div(rows_each, kRowsAtOnce) * kRowsAtOnce, kRowsAtOnce, kMaxBlockRows);
  for (int64_t slot = 0; slot < max_loras_; ++slot) {
    const std::vector<int32_t>& rows = rows_of[static_cast<size_t>(slot)];
    const auto num_rows = static_cast<int64_t>(rows.size());
    for (int64_t row = 0; row < num_rows; row += block_rows) {
      blocks_.push_back({static_cast<int32_t>(slot), static_cast<int64_t>(order_.size()) + row,
                         std::min(block_rows, num_rows - row)});
    }
    order_.insert(order_.end(), rows.begin(), rows.end());
  }
}

void LoraRows::require_thread_floats(int64_t count) {
  for (Scratch& memory : thread_memory_) memory.reserve(static_cast<size_t>(count) * sizeof(float));
}

std::vector<std::unique_ptr<Op>> make_lora_add(const LoraAddArgs& args,
                                               const std::shared_ptr<const LoraSlots>& slots,
                                               const std::shared_ptr<LoraRows>& rows,
                                               const std::shared_ptr<Scratch>& scratch) {
  if (args.quantized_x == nullptr) {
    check_rows("x", args.x, args.x_stride, slots->k());
  } else if (slots->k() % kGroup != 0) {
    throw std::invalid_argument("quantised rows have a multiple of " + std::to_string(kGroup) +
                                " elements, not " + std::to_string(slots->k()));
  }
  check_rows("out", args.out, args.out_stride, slots->n());
  if (rows->max_loras() != slots->max_loras()) {
    throw std::invalid_argument("rows and slots must be for equally many adapters");
  }
  std::vector<std::unique_ptr<Op>> ops;
  ops.push_back(std::make_unique<ShrinkOp>(args, slots, rows, scratch));
  ops.push_back(std::make_unique<ExpandOp>(args, slots, rows, scratch));
  return ops;
}

}  // namespace streamllm::cpu
