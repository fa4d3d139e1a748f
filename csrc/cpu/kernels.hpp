// The kernels of one instruction set, as a table of function pointers, and what they take.
//
// Strides are in elements. A kernel works on the range of rows that it is given and writes nothing
// else, so that ranges may run on different threads. A row's result never depends on the range.
#pragma once

#include <cstdint>

#include "half.hpp"
#include "weight_format.hpp"

namespace streamllm::cpu {

inline constexpr int kKeyTile = 16;     // keys that lie side by side in the key cache: one vector
inline constexpr int kPartition = 256;  // positions whose attention is computed before it is merged
inline constexpr int kPartitionTiles = kPartition / kKeyTile;
inline constexpr int kMaxHeadDim = 256;
inline constexpr int kLoraColumns = 16;  // of a panel of an adapter's matrices: one vector
inline constexpr int kSampleBlock = 64;  // logits that share an entry in the tables of block maxima and sums

inline constexpr int kSumThresholds = 8;

enum class KvType { float32, float16, int8 };

// A group of a row's activations for products with quantised weights: values * scale, scale = max|x| / 127.
struct QuantizedGroup {
  // Written as two vectors of four.
  float scale;       // NaN if the group holds NaN or infinity: it then reaches all outputs of the row
  float scaled_sum;  // scale * sum(values): the factor of the weights' minima
  float scaled_half_sums[2];  // of values 0 .. 15 and of 16 .. 31
  // What takes the offset out of a sum over unsigned weights.
  int32_t minus_8_sums, minus_128_sums, minus_4_half_sums[2];
  int8_t values[kGroup];  // -127 .. 127
};

// Quantised rows are QuantizedGroup[elements / kGroup][stride], the same group of all rows side by side. The
// stride is odd, so that the groups of a row do not fall into one cache set.
static constexpr int64_t quantized_stride(int64_t rows) { return rows | 1; }

// Where an operation writes its rows: float32, element i of row r at [r * stride + i], or quantised, group g
// of row r at [g * stride + r].
struct OutputRows {
  void* data;
  int64_t stride = 0;
  bool quantized = false;
};

enum class Activation { silu, gelu, gelu_tanh, relu };

// residual == nullptr: out = norm(x). Otherwise residual += x first, and out comes from residual.
struct NormArgs {
  const float* x;
  int64_t x_stride;
  float* residual;
  int64_t residual_stride;
  const float* weight;
  const float* bias;  // layer norms have one
  int64_t dim;
  float eps;
  OutputRows out;
};

// sum += x
struct AddArgs {
  const float* x;
  int64_t x_stride;
  float* sum;
  int64_t sum_stride;
  int64_t dim;
};

// Rows that are rewritten by means of a constant: a factor, or a cap.
struct InPlaceArgs {
  float* x;
  int64_t x_stride;
  int64_t dim;
  float constant;
};

// x *= sigmoid(gate), one gate a row.
struct SigmoidScaleArgs {
  float* x;
  int64_t x_stride;
  int64_t dim;
  const float* gate;
  int64_t gate_stride;
};

struct QuantizeArgs {
  const float* x;
  int64_t x_stride;
  int64_t k;  // a multiple of kGroup
  OutputRows out;  // quantised
};

// Weights on their way from floats to a quantised format.
struct QuantizeWeightsArgs {
  const float* values;      // [rows, k]
  const float* importance;  // [k], not negative: what the square of a column's error counts; for q4_1
  int64_t rows, k;          // k: a multiple of kGroup
  uint8_t* out;             // rows as a file holds them, one after the other
};

// out[M, n] = x[M, k] @ W[n, k]^T + bias, W being panels of one format.
struct LinearArgs {
  const float* x;  // read by products with plain weights
  int64_t x_stride;
  const QuantizedGroup* quantized;  // x quantised, read by products with quantised weights
  int64_t quantized_stride;
  const uint8_t* panels;
  int64_t panel_bytes;
  int64_t n, k;
  const float* bias;  // float32[n] or nullptr
  float* out;
  int64_t out_stride;
};

// RMSNorm of the heads of q or of k: each alone (dim == head_dim) or all together.
struct RotaryNorm {
  const float* weight;  // float32[dim]; nullptr: none
  int64_t dim;
};

struct RotaryArgs {
  float* qkv;  // rows of [num_heads | num_kv_heads | num_kv_heads] heads
  int64_t qkv_stride;
  int num_heads, num_kv_heads, head_dim, rotary_dim;
  RotaryNorm q_norm, k_norm;
  float norm_eps;
  const float* cos;  // float32[positions, rotary_dim / 2]; not read, like rope_rows, if rotary_dim is 0
  const float* sin;
  const int32_t* rope_rows;
  const int64_t* slot_mapping;  // block * block_size + offset; negative: nothing is written
  void* key_cache;              // [num_blocks][num_kv_heads][block_size / 16] tiles (kv_cache.inl)
  void* value_cache;
  KvType kv_type;
  int block_size;
};

struct AttentionArgs {
  const float* q;
  int64_t q_stride;
  OutputRows out;
  int num_heads, num_kv_heads, head_dim;
  float scale;
  int window;      // 0: none
  float soft_cap;  // 0: none
  const float* sinks;  // float32[num_heads]: scores that join a head's softmax without a value; nullptr: none
  const int32_t* query_start;
  const int32_t* context_lens;
  const int64_t* block_tables;  // addresses of int32 arrays of block ids
  const void* key_cache;
  const void* value_cache;
  KvType kv_type;
  int block_size;
};

// Consecutive query tokens of one sequence, which share each load of K and V, with some of the KV heads, over
// some of the context's partitions.
struct AttentionTile {
  int32_t sequence, first_row, num_rows;
  int32_t first_head, num_heads;
  int32_t first_partition, end_partition;
  float* partial;  // attention_result_floats() to leave the result in; nullptr: it goes to the output
};

// The running softmax of one row: output not yet divided by `sum`, relative to `maximum`.
struct SoftmaxState {
  float maximum;
  float sum;  // 0: nothing seen yet
};

// What attention over some keys gives.
struct AttentionResult {
  SoftmaxState* states;  // [rows]
  float* out;            // [rows][attention_padded_dim]
};

struct ActivationArgs {
  const float* x;
  int64_t x_stride;
  int64_t dim;
  Activation activation;
  OutputRows out;
};

// out = activation(gate) * up. With a limit above 0 (gpt-oss) it is g * sigmoid(1.702 g) * (u + 1) instead,
// with g = min(gate, limit) and u = up within [-limit, limit].
struct GateArgs {
  const float* x;  // rows of [gate(dim) | up(dim)]
  int64_t x_stride;
  int64_t dim;
  Activation activation;
  float limit;
  OutputRows out;
};

// out[targets[row]] += weights[row] * x[row], row after row.
struct WeightedRowsArgs {
  const float* x;
  int64_t x_stride;
  int64_t dim;
  const float* weights;
  const int32_t* targets;
  float* out;
  int64_t out_stride;
};

// out[row, 0 .. rank) = x[row][k] @ a[rank, k]^T, and zeros up to whole panels.
struct LoraShrinkArgs {
  const float* const* x;  // rows
  const uint8_t* a;       // panels [rank / 16][k][16]
  int64_t rank, k;
  float* out;
  int64_t out_stride;
};

// out[row][n] += h[row, rank] @ b[n, rank]^T.
struct LoraExpandArgs {
  const float* h;
  int64_t h_stride;
  const uint8_t* b;  // panels [n / 16][rank][16]
  int64_t rank, n;
  float* const* out;  // rows
};

struct RowMaximum {
  float value;
  int32_t index;  // the lowest index that holds the maximum
  bool valid;     // no NaN among the values, and the maximum is finite
};

// What is there for each format of weights.
struct WeightKernels {
  void (*linear)(const LinearArgs&, int64_t first_row, int64_t last_row, int64_t first_panel,
                 int64_t last_panel);
  // One column of a panel, dequantised: float32[k].
  void (*unpack_column)(const uint8_t* panel, int column, int64_t k, float* out);
};

// Products with an adapter's matrices (lora.inl).
struct LoraKernels {
  void (*shrink)(const LoraShrinkArgs&, int64_t rows);
  void (*expand)(const LoraExpandArgs&, int64_t rows, int64_t first_panel, int64_t last_panel);
};

// By WeightFormat - kNumFloatFormats.
struct QuantizedKernels {
  WeightKernels by_format[kNumQuantizedFormats];
};

// What dot products of bytes change of the instruction set that has none. Everything else is its own, so that
// it is compiled once.
struct DotProducts {
  const char* name;
  QuantizedKernels quantized;
};

struct Kernels {
  const char* name;
  void (*rms_norm)(const NormArgs&, int64_t first_row, int64_t last_row);
  void (*layer_norm)(const NormArgs&, int64_t first_row, int64_t last_row);
  void (*add_rows)(const AddArgs&, int64_t first_row, int64_t last_row);
  void (*scale)(const InPlaceArgs&, int64_t first_row, int64_t last_row);
  void (*soft_cap)(const InPlaceArgs&, int64_t first_row, int64_t last_row);  // cap * tanh(x / cap)
  void (*sigmoid_scale)(const SigmoidScaleArgs&, int64_t first_row, int64_t last_row);
  void (*quantize_rows)(const QuantizeArgs&, int64_t first_row, int64_t last_row);
  void (*quantize_q8_0)(const QuantizeWeightsArgs&);
  void (*quantize_q4_1)(const QuantizeWeightsArgs&);
  WeightKernels floats[kNumFloatFormats];  // by WeightFormat
  QuantizedKernels quantized;
  LoraKernels lora[2];  // of float32, of bfloat16
  // One row: float32[k] from its groups, which are `stride` groups apart.
  void (*dequantize_row)(const QuantizedGroup* x, int64_t stride, int64_t k, float* out);
  void (*rotary_and_cache)(const RotaryArgs&, int64_t first_row, int64_t last_row);
  void (*activate)(const ActivationArgs&, int64_t first_row, int64_t last_row);
  void (*gate_and_mul)(const GateArgs&, int64_t first_row, int64_t last_row);
  void (*add_weighted_rows)(const WeightedRowsArgs&, int64_t first_row, int64_t last_row);
  // scratch: attention_scratch_floats() floats.
  void (*paged_attention)(const AttentionArgs&, const AttentionTile&, float* scratch);
  // Merges `num_partials` results, which follow each other from tile.partial on, into the output.
  void (*merge_attention)(const AttentionArgs&, const AttentionTile&, int num_partials);

  // Over x[0..count), in blocks of kSampleBlock where tables are named:
  RowMaximum (*row_maximum)(const float* x, int64_t count);
  void (*block_maxima)(const float* x, int64_t count, float* maxima);
  // weights = exp((x - maximum) / temperature), float32[count]; with each block's sum and largest weight.
  void (*softmax_weights)(const float* x, int64_t count, float maximum, float temperature, float* weights,
                          double* block_sums, float* block_maxima);
  // Appends, in index order, the values >= threshold and their indices; returns how many. Both arrays
  // hold `count` elements.
  int64_t (*collect)(const float* x, int64_t count, const float* block_maxima, float threshold, float* values,
                     int32_t* indices);
  int64_t (*count_greater)(const float* x, int64_t count, float threshold);
  // The same for values in [low, high).
  int64_t (*collect_between)(const float* x, int64_t count, float low, float high, float* values,
                             int32_t* indices);
  // Of positive values: each block's sum of those >= threshold; the sums of those >= each of kSumThresholds
  // thresholds, precise to about 1e-5.
  void (*block_sums_at_least)(const float* x, int64_t count, float threshold, double* sums);
  void (*sums_at_least)(const float* x, int64_t count, const float* thresholds, double* sums);
  // out = x where both masks have a 1 (bit i % 32 of word i / 32; second may be nullptr), else -inf.
  void (*masked_copy)(const float* x, int64_t count, const uint32_t* first, const uint32_t* second,
                      float* out);
};

// Rows (tokens times query heads) that one attention tile holds at most, tokens, and KV heads.
static constexpr int attention_tile_rows(int group) { return group > 24 ? group : 24; }
static constexpr int attention_tile_tokens(int group) {
  const int tokens = 24 / group;
  return tokens > 8 ? 8 : tokens < 1 ? 1 : tokens;
}
static constexpr int attention_tile_heads(int group, int tokens) {
  const int heads = 24 / (group * tokens);
  return heads < 1 ? 1 : heads;
}
static constexpr int attention_padded_dim(int head_dim) { return (head_dim + 15) / 16 * 16; }
static constexpr int64_t attention_result_floats(int rows, int head_dim) {
  return (int64_t{rows} * (attention_padded_dim(head_dim) + 2) + 15) / 16 * 16;
}
static constexpr int64_t attention_scratch_floats(int group, int head_dim) {
  const int rows = attention_tile_rows(group);
  return rows * (kPartition + attention_padded_dim(head_dim) + head_dim + 4) + 64 * head_dim +
         attention_result_floats(rows, head_dim);
}

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const DotProducts kAvx512Vnni;
#if defined(STREAMLLM_HAVE_AVX_VNNI)
extern const DotProducts kAvxVnni;
#endif
#endif
inline constexpr int kMaxInstructionSets = 5;

// The table in use: the best that this CPU supports, until select_kernels says otherwise.
const Kernels& kernels();
inline const WeightKernels& weight_kernels(WeightFormat format) {
  const int index = static_cast<int>(format);
  return index < kNumFloatFormats ? kernels().floats[index]
                                  : kernels().quantized.by_format[index - kNumFloatFormats];
}
// Tables that this CPU supports, best first; returns how many.
int supported_kernels(const Kernels* (&tables)[kMaxInstructionSets]);
// Throws std::invalid_argument for a name that is not supported here.
void select_kernels(const char* name);

}  // namespace streamllm::cpu
