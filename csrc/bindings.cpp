// The Python module streamllm._native. Addresses are integers; shapes, dtypes and strides are checked where
// an operation is recorded, so that a run passes three counts and nothing else.

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/kernels.hpp"
#include "cpu/lora.hpp"
#include "cpu/memory_placement.hpp"
#include "cpu/ops.hpp"
#include "cpu/packed_matrix.hpp"
#include "cpu/peaks.hpp"
#include "cpu/philox.hpp"
#include "cpu/plan.hpp"
#include "cpu/thread_pool.hpp"
#include "host_calls.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace streamllm::cpu;

namespace {

using Address = uint64_t;
using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

std::vector<std::string> instruction_sets() {
  const Kernels* tables[kMaxInstructionSets];
  const int count = supported_kernels(tables);
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) names.emplace_back(tables[i]->name);
  return names;
}

std::vector<std::string> weight_formats() {
  std::vector<std::string> names;
  for (int i = 0; i < kNumWeightFormats; ++i) {
    names.emplace_back(format_info(static_cast<WeightFormat>(i)).name);
  }
  return names;
}

int64_t quantized_bytes(int64_t rows, int64_t width) {
  return width / kGroup * quantized_stride(rows) * static_cast<int64_t>(sizeof(QuantizedGroup));
}

QuantizeWeightsArgs quantize_weights_args(Address values, Address importance, int64_t rows, int64_t k,
                                          Address out) {
  if (rows < 0 || k < 0 || k % kGroup != 0) {
    throw std::invalid_argument("weights [" + std::to_string(rows) + ", " + std::to_string(k) +
                                "] have no whole groups of " + std::to_string(kGroup));
  }
  return {pointer<const float>(values), pointer<const float>(importance), rows, k, pointer<uint8_t>(out)};
}

void quantize_q8_0(Address values, int64_t rows, int64_t k, Address out) {
  kernels().quantize_q8_0(quantize_weights_args(values, 0, rows, k, out));
}

void quantize_q4_1(Address values, Address importance, int64_t rows, int64_t k, Address out) {
  kernels().quantize_q4_1(quantize_weights_args(values, importance, rows, k, out));
}

NormArgs norm_args(Address x, int64_t x_stride, Address residual, int64_t residual_stride, Address weight,
                   Address bias, int64_t dim, float eps, Address out, int64_t out_stride, bool quantized) {
  return {
      .x = pointer<const float>(x),
      .x_stride = x_stride,
      .residual = pointer<float>(residual),
      .residual_stride = residual_stride,
      .weight = pointer<const float>(weight),
      .bias = pointer<const float>(bias),
      .dim = dim,
      .eps = eps,
      .out = {pointer<void>(out), out_stride, quantized},
  };
}

void embedding(Plan& plan, Address token_ids, std::shared_ptr<PackedMatrix> weight, Address out,
               int64_t out_stride, int64_t first_row) {
  plan.add(make_embedding(pointer<const int32_t>(token_ids), std::move(weight), first_row,
                          pointer<float>(out), out_stride));
}

void call(Plan& plan, nb::callable function, bool on_outputs) {
  plan.add(make_host_call(streamllm::host_call(std::move(function)), on_outputs, plan.failure()));
}

void rms_norm(Plan& plan, Address x, int64_t x_stride, Address residual, int64_t residual_stride,
              Address weight, int64_t dim, float eps, Address out, int64_t out_stride, bool quantized,
              bool on_outputs) {
  plan.add(make_rms_norm(
      norm_args(x, x_stride, residual, residual_stride, weight, 0, dim, eps, out, out_stride, quantized),
      on_outputs));
}

void layer_norm(Plan& plan, Address x, int64_t x_stride, Address residual, int64_t residual_stride,
                Address weight, Address bias, int64_t dim, float eps, Address out, int64_t out_stride,
                bool quantized, bool on_outputs) {
  plan.add(make_layer_norm(
      norm_args(x, x_stride, residual, residual_stride, weight, bias, dim, eps, out, out_stride, quantized),
      on_outputs));
}

void add(Plan& plan, Address x, int64_t x_stride, Address other, int64_t other_stride, int64_t dim,
         bool on_outputs) {
  plan.add(
      make_add({pointer<const float>(x), x_stride, pointer<float>(other), other_stride, dim}, on_outputs));
}

void scale(Plan& plan, Address x, int64_t x_stride, int64_t dim, float factor, bool on_outputs) {
  plan.add(make_scale({pointer<float>(x), x_stride, dim, factor}, on_outputs));
}

void soft_cap(Plan& plan, Address x, int64_t x_stride, int64_t dim, float cap, bool on_outputs) {
  plan.add(make_soft_cap({pointer<float>(x), x_stride, dim, cap}, on_outputs));
}

void sigmoid_scale(Plan& plan, Address x, int64_t x_stride, int64_t dim, Address gate, int64_t gate_stride,
                   bool on_outputs) {
  plan.add(make_sigmoid_scale({pointer<float>(x), x_stride, dim, pointer<const float>(gate), gate_stride},
                              on_outputs));
}

void linear(Plan& plan, Address x, int64_t x_stride, std::shared_ptr<PackedMatrix> weight, Address bias,
            Address out, int64_t out_stride, bool on_outputs, bool quantized) {
  if (quantized) {
    plan.add(make_linear_of_quantized(pointer<const QuantizedGroup>(x), std::move(weight),
                                      pointer<const float>(bias), pointer<float>(out), out_stride,
                                      on_outputs));
    return;
  }
  for (auto& op :
       make_linear(pointer<const float>(x), x_stride, std::move(weight), pointer<const float>(bias),
                   pointer<float>(out), out_stride, on_outputs, plan.scratch())) {
    plan.add(std::move(op));
  }
}

void rotary_and_cache(Plan& plan, Address qkv, int64_t qkv_stride, int num_heads, int num_kv_heads,
                      int head_dim, int rotary_dim, Address q_norm, int64_t q_norm_dim, Address k_norm,
                      int64_t k_norm_dim, float norm_eps, Address cos, Address sin, Address rope_rows,
                      Address slot_mapping, Address key_cache, Address value_cache,
                      const std::string& kv_dtype, int block_size) {
  plan.add(make_rotary_and_cache({
      .qkv = pointer<float>(qkv),
      .qkv_stride = qkv_stride,
      .num_heads = num_heads,
      .num_kv_heads = num_kv_heads,
      .head_dim = head_dim,
      .rotary_dim = rotary_dim,
      .q_norm = {pointer<const float>(q_norm), q_norm_dim},
      .k_norm = {pointer<const float>(k_norm), k_norm_dim},
      .norm_eps = norm_eps,
      .cos = pointer<const float>(cos),
      .sin = pointer<const float>(sin),
      .rope_rows = pointer<const int32_t>(rope_rows),
      .slot_mapping = pointer<const int64_t>(slot_mapping),
      .key_cache = pointer<void>(key_cache),
      .value_cache = pointer<void>(value_cache),
      .kv_type = kv_type_from_name(kv_dtype.c_str()),
      .block_size = block_size,
  }));
}

void paged_attention(Plan& plan, Address q, int64_t q_stride, Address out, int64_t out_stride, int num_heads,
                     int num_kv_heads, int head_dim, float scale, int window, float soft_cap, Address sinks,
                     Address query_start, Address context_lens, Address block_tables, Address key_cache,
                     Address value_cache, const std::string& kv_dtype, int block_size, bool quantized) {
  plan.add(make_paged_attention(
      {
          .q = pointer<const float>(q),
          .q_stride = q_stride,
          .out = {pointer<void>(out), out_stride, quantized},
          .num_heads = num_heads,
          .num_kv_heads = num_kv_heads,
          .head_dim = head_dim,
          .scale = scale,
          .window = window,
          .soft_cap = soft_cap,
          .sinks = pointer<const float>(sinks),
          .query_start = pointer<const int32_t>(query_start),
          .context_lens = pointer<const int32_t>(context_lens),
          .block_tables = pointer<const int64_t>(block_tables),
          .key_cache = pointer<const void>(key_cache),
          .value_cache = pointer<const void>(value_cache),
          .kv_type = kv_type_from_name(kv_dtype.c_str()),
          .block_size = block_size,
      },
      plan.num_threads()));
}

void activate(Plan& plan, Address x, int64_t x_stride, int64_t dim, const std::string& activation,
              Address out, int64_t out_stride, bool quantized, bool on_outputs) {
  plan.add(make_activate(
      {
          .x = pointer<const float>(x),
          .x_stride = x_stride,
          .dim = dim,
          .activation = activation_from_name(activation.c_str()),
          .out = {pointer<void>(out), out_stride, quantized},
      },
      on_outputs));
}

void gate_and_mul(Plan& plan, Address x, int64_t x_stride, int64_t dim, const std::string& activation,
                  float limit, Address out, int64_t out_stride, bool quantized, bool on_outputs) {
  plan.add(make_gate_and_mul(
      {
          .x = pointer<const float>(x),
          .x_stride = x_stride,
          .dim = dim,
          .activation = activation_from_name(activation.c_str()),
          .limit = limit,
          .out = {pointer<void>(out), out_stride, quantized},
      },
      on_outputs));
}

void experts(Plan& plan, Address x, int64_t x_stride, bool x_quantized, Address router_logits,
             int64_t router_stride, std::vector<std::shared_ptr<PackedMatrix>> gate_up, Address gate_up_bias,
             std::vector<std::shared_ptr<PackedMatrix>> down, Address down_bias, int64_t top_k,
             bool normalize, const std::string& activation, float limit, Address active,
             int64_t active_stride, bool active_quantized, Address out, int64_t out_stride, bool on_outputs) {
  const ExpertsArgs args{
      .x = pointer<const float>(x),
      .x_stride = x_stride,
      .quantized_x = x_quantized ? pointer<const QuantizedGroup>(x) : nullptr,
      .router_logits = pointer<const float>(router_logits),
      .router_stride = router_stride,
      .gate_up = {gate_up.begin(), gate_up.end()},
      .down = {down.begin(), down.end()},
      .gate_up_bias = pointer<const float>(gate_up_bias),
      .down_bias = pointer<const float>(down_bias),
      .top_k = top_k,
      .normalize = normalize,
      .activation = activation_from_name(activation.c_str()),
      .limit = limit,
      .active = {pointer<void>(active), active_stride, active_quantized},
      .out = pointer<float>(out),
      .out_stride = out_stride,
      .on_outputs = on_outputs,
  };
  for (auto& op : make_experts(args, plan.scratch())) plan.add(std::move(op));
}

void lora_add(Plan& plan, Address x, int64_t x_stride, bool quantized, std::shared_ptr<LoraSlots> slots,
              std::shared_ptr<LoraRows> rows, Address out, int64_t out_stride) {
  const LoraAddArgs args{
      .x = pointer<const float>(x),
      .x_stride = x_stride,
      .quantized_x = quantized ? pointer<const QuantizedGroup>(x) : nullptr,
      .out = pointer<float>(out),
      .out_stride = out_stride,
  };
  for (auto& op : make_lora_add(args, slots, rows, plan.scratch())) plan.add(std::move(op));
}

void gather_rows(Plan& plan, Address x, int64_t x_stride, Address indices, int64_t dim, Address out,
                 int64_t out_stride) {
  plan.add(make_gather_rows(pointer<const float>(x), x_stride, pointer<const int32_t>(indices), dim,
                            pointer<float>(out), out_stride));
}

void sample(Plan& plan, Address logits, int64_t logits_stride, int64_t vocab_size, Address temperature,
            Address top_k, Address top_p, Address min_p, Address seed, Address choice, Address position,
            Address num_logprobs, Address logprobs_mode, Address edits, Address allowed_mask,
            Address grammar_mask, Address replacement, Address target, Address token, Address logprob,
            Address rank, Address top_ids, Address top_logprobs, int64_t max_logprobs) {
  plan.add(make_sample(
      {
          .logits = pointer<const float>(logits),
          .logits_stride = logits_stride,
          .vocab_size = vocab_size,
          .temperature = pointer<const float>(temperature),
          .top_k = pointer<const int32_t>(top_k),
          .top_p = pointer<const float>(top_p),
          .min_p = pointer<const float>(min_p),
          .seed = pointer<const uint64_t>(seed),
          .choice = pointer<const int32_t>(choice),
          .position = pointer<const int32_t>(position),
          .num_logprobs = pointer<const int32_t>(num_logprobs),
          .logprobs_mode = pointer<const int32_t>(logprobs_mode),
          .edits = pointer<const int64_t>(edits),
          .allowed_mask = pointer<const int64_t>(allowed_mask),
          .grammar_mask = pointer<const int64_t>(grammar_mask),
          .replacement = pointer<const int64_t>(replacement),
          .target = pointer<const int32_t>(target),
          .token = pointer<int32_t>(token),
          .logprob = pointer<float>(logprob),
          .rank = pointer<int32_t>(rank),
          .top_ids = pointer<int32_t>(top_ids),
          .top_logprobs = pointer<float>(top_logprobs),
          .max_logprobs = max_logprobs,
      },
      plan.num_threads()));
}

}  // namespace

NB_MODULE(_native, m) {
  // Plans and weights live as long as the process; the interpreter's exit is no leak.
  nb::set_leak_warnings(false);
  streamllm::close_at_exit();

  m.def("instruction_sets", &instruction_sets);
  m.def("weight_formats", &weight_formats);
  m.attr("GROUP") = kGroup;
  m.def("quantized_bytes", &quantized_bytes, "rows"_a, "width"_a);
  m.def("quantize_q8_0", &quantize_q8_0, "values"_a, "rows"_a, "k"_a, "out"_a, ReleaseGil());
  m.def("quantize_q4_1", &quantize_q4_1, "values"_a, "importance"_a, "rows"_a, "k"_a, "out"_a, ReleaseGil());
  m.def("instruction_set", [] { return std::string(kernels().name); });
  m.def("set_instruction_set", [](const std::string& name) { select_kernels(name.c_str()); }, "name"_a);
  m.def("interleave_memory_over", &interleave_memory_over, "nodes"_a);
  m.def(
      "place_memory",
      [](Address start, size_t num_bytes) { place_memory(pointer<void>(start), num_bytes); }, "start"_a,
      "num_bytes"_a);
  m.def("measure_read_bandwidth", &measure_read_bandwidth, "num_threads"_a, "bytes_per_thread"_a, "seconds"_a,
        ReleaseGil());
  m.def("measure_float32_peak", &measure_float32_peak, "num_threads"_a, "seconds"_a, ReleaseGil());
  m.def("measure_int8_peak", &measure_int8_peak, "num_threads"_a, "seconds"_a, ReleaseGil());
  m.def(
      "philox4x32",
      [](uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
        const auto words = philox4x32({c0, c1, c2, c3}, {k0, k1});
        return nb::make_tuple(words[0], words[1], words[2], words[3]);
      },
      "c0"_a, "c1"_a, "c2"_a, "c3"_a, "k0"_a, "k1"_a);

  nb::class_<ThreadPool>(m, "ThreadPool")
      .def(nb::init<int>(), "num_threads"_a)
      .def_prop_ro("num_threads", &ThreadPool::num_threads);

  nb::class_<PackedMatrix>(m, "PackedMatrix")
      .def(nb::init<int64_t>(), "k"_a)
      .def(
          "append_rows",
          [](PackedMatrix& matrix, const std::string& format, Address address, int64_t rows,
             int64_t row_stride, int num_threads) {
            matrix.append_rows(weight_format_from_name(format.c_str()), pointer<const uint8_t>(address), rows,
                               row_stride, num_threads);
          },
          "format"_a, "address"_a, "rows"_a, "row_stride"_a, "num_threads"_a = 1, ReleaseGil())
      .def_prop_ro("n", &PackedMatrix::n)
      .def_prop_ro("k", &PackedMatrix::k)
      .def_prop_ro("num_bytes", &PackedMatrix::num_bytes)
      .def_prop_ro("is_quantized", &PackedMatrix::is_quantized)
      .def_prop_ro("formats", [](const PackedMatrix& matrix) {
        std::vector<std::string> names;
        for (const auto& segment : matrix.segments()) names.emplace_back(format_info(segment.format).name);
        return names;
      });

  nb::class_<LoraUpdate>(m, "LoraUpdate")
      .def(
          "__init__",
          [](LoraUpdate* self, Address a, Address b, int64_t rows, int64_t rank, int64_t k,
             const std::string& format) {
            new (self) LoraUpdate(pointer<const float>(a), pointer<const float>(b), rows, rank, k,
                                  weight_format_from_name(format.c_str()));
          },
          "a"_a, "b"_a, "rows"_a, "rank"_a, "k"_a, "format"_a, ReleaseGil())
      .def_prop_ro("num_bytes", &LoraUpdate::num_bytes);

  nb::class_<LoraSlots>(m, "LoraSlots")
      .def(nb::init<std::vector<int64_t>, int64_t, int64_t, int64_t>(), "part_rows"_a, "k"_a, "max_loras"_a,
           "max_rank"_a)
      .def(
          "set",
          [](LoraSlots& slots, int64_t slot, int64_t part, std::shared_ptr<LoraUpdate> update) {
            slots.set(slot, part, std::move(update));
          },
          "slot"_a, "part"_a, "update"_a)
      .def("clear", &LoraSlots::clear, "slot"_a);

  nb::class_<LoraRows>(m, "LoraRows")
      .def(nb::init<int64_t, int>(), "max_loras"_a, "num_threads"_a)
      .def(
          "assign",
          [](LoraRows& rows, Address slots, int64_t count) {
            rows.assign(pointer<const int32_t>(slots), count);
          },
          "slots"_a, "count"_a);

  nb::class_<Plan>(m, "Plan")
      .def(nb::new_(&streamllm::make_plan), "pool"_a)
      .def("embedding", &embedding, "token_ids"_a, "weight"_a, "out"_a, "out_stride"_a, "first_row"_a = 0)
      .def("call", &call, "function"_a, "on_outputs"_a = false)
      .def("rms_norm", &rms_norm, "x"_a, "x_stride"_a, "residual"_a, "residual_stride"_a, "weight"_a, "dim"_a,
           "eps"_a, "out"_a, "out_stride"_a, "quantized"_a = false, "on_outputs"_a = false)
      .def("layer_norm", &layer_norm, "x"_a, "x_stride"_a, "residual"_a, "residual_stride"_a, "weight"_a,
           "bias"_a, "dim"_a, "eps"_a, "out"_a, "out_stride"_a, "quantized"_a = false, "on_outputs"_a = false)
      .def("add", &add, "x"_a, "x_stride"_a, "other"_a, "other_stride"_a, "dim"_a, "on_outputs"_a = false)
      .def("scale", &scale, "x"_a, "x_stride"_a, "dim"_a, "factor"_a, "on_outputs"_a = false)
      .def("soft_cap", &soft_cap, "x"_a, "x_stride"_a, "dim"_a, "cap"_a, "on_outputs"_a = false)
      .def("sigmoid_scale", &sigmoid_scale, "x"_a, "x_stride"_a, "dim"_a, "gate"_a, "gate_stride"_a,
           "on_outputs"_a = false)
      .def("linear", &linear, "x"_a, "x_stride"_a, "weight"_a, "bias"_a, "out"_a, "out_stride"_a,
           "on_outputs"_a, "quantized"_a = false)
      .def("rotary_and_cache", &rotary_and_cache, "qkv"_a, "qkv_stride"_a, "num_heads"_a, "num_kv_heads"_a,
           "head_dim"_a, "rotary_dim"_a, "q_norm"_a, "q_norm_dim"_a, "k_norm"_a, "k_norm_dim"_a, "norm_eps"_a,
           "cos"_a, "sin"_a, "rope_rows"_a, "slot_mapping"_a, "key_cache"_a, "value_cache"_a, "kv_dtype"_a,
           "block_size"_a)
      .def("paged_attention", &paged_attention, "q"_a, "q_stride"_a, "out"_a, "out_stride"_a, "num_heads"_a,
           "num_kv_heads"_a, "head_dim"_a, "scale"_a, "window"_a, "soft_cap"_a, "sinks"_a, "query_start"_a,
           "context_lens"_a, "block_tables"_a, "key_cache"_a, "value_cache"_a, "kv_dtype"_a, "block_size"_a,
           "quantized"_a = false)
      .def("activate", &activate, "x"_a, "x_stride"_a, "dim"_a, "activation"_a, "out"_a, "out_stride"_a,
           "quantized"_a = false, "on_outputs"_a = false)
      .def("gate_and_mul", &gate_and_mul, "x"_a, "x_stride"_a, "dim"_a, "activation"_a, "limit"_a, "out"_a,
           "out_stride"_a, "quantized"_a = false, "on_outputs"_a = false)
      .def("experts", &experts, "x"_a, "x_stride"_a, "x_quantized"_a, "router_logits"_a, "router_stride"_a,
           "gate_up"_a, "gate_up_bias"_a, "down"_a, "down_bias"_a, "top_k"_a, "normalize"_a, "activation"_a,
           "limit"_a, "active"_a, "active_stride"_a, "active_quantized"_a, "out"_a, "out_stride"_a,
           "on_outputs"_a = false)
      .def("lora_add", &lora_add, "x"_a, "x_stride"_a, "quantized"_a, "slots"_a, "rows"_a, "out"_a,
           "out_stride"_a)
      .def("gather_rows", &gather_rows, "x"_a, "x_stride"_a, "indices"_a, "dim"_a, "out"_a, "out_stride"_a)
      .def("sample", &sample, "logits"_a, "logits_stride"_a, "vocab_size"_a, "temperature"_a, "top_k"_a,
           "top_p"_a, "min_p"_a, "seed"_a, "choice"_a, "position"_a, "num_logprobs"_a, "logprobs_mode"_a,
           "edits"_a, "allowed_mask"_a, "grammar_mask"_a, "replacement"_a, "target"_a, "token"_a, "logprob"_a,
           "rank"_a, "top_ids"_a, "top_logprobs"_a, "max_logprobs"_a)
      .def_prop_ro("num_ops", &Plan::num_ops)
      .def(
          "run",
          [](Plan& plan, int64_t num_tokens, int64_t num_sequences, int64_t num_outputs) {
            plan.submit({num_tokens, num_sequences, num_outputs}, -1);
            plan.wait();
          },
          "num_tokens"_a, "num_sequences"_a, "num_outputs"_a, ReleaseGil())
      .def(
          "submit",
          [](Plan& plan, int64_t num_tokens, int64_t num_sequences, int64_t num_outputs, int event_fd) {
            plan.submit({num_tokens, num_sequences, num_outputs}, event_fd);
          },
          "num_tokens"_a, "num_sequences"_a, "num_outputs"_a, "event_fd"_a)
      .def("wait", &Plan::wait, ReleaseGil());
}
