"""The recorder: what it computes, and how it places buffers."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamllm.ops import Attention, Gate, LayerNorm, RMSNorm
from streamllm.ops.cpu_plan import CpuOps
from streamllm.ops.kv_cache import KVCache
from streamllm.ops.plan_recorder import row_stride
from streamllm.ops.step_inputs import StepInputs
from streamllm.ops.stored_rows import StoredRows
from streamllm.ops.torch_ops import TorchOps

MAX_TOKENS = 12
WIDTH = 32


def make_inputs() -> StepInputs:
    cache = KVCache(
        layers_per_block=1, num_blocks=1, block_size=16, num_kv_heads=1, head_dim=8, kv_cache_dtype="float32"
    )
    table = np.zeros((4, 4), np.float32)
    return StepInputs.allocate(MAX_TOKENS, MAX_TOKENS, (table,), (table,), cache)


GATES = [Gate(), Gate("gelu"), Gate("gelu_tanh"), Gate("relu"), Gate(limit=2.0)]
OPERATIONS = ["mlp", "activate", "norm", "layer norm", "norm of sum", "layer norm of sum", "add", "in place"]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_random_graphs_equal_torch(data):
    """A random graph of operations, its inputs taken from anywhere before, some results kept."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    table = rng.standard_normal((50, WIDTH)).astype(np.float32)
    weight = (rng.standard_normal((2 * WIDTH, WIDTH)) / 6).astype(np.float32)
    bias = rng.standard_normal(2 * WIDTH).astype(np.float32)
    scale = rng.standard_normal(WIDTH).astype(np.float32)
    steps = data.draw(
        st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 99), st.integers(0, 99)))
    )
    kept = data.draw(st.sets(st.integers(0, 99), min_size=1, max_size=4))
    inputs = make_inputs()

    def build(ops):
        embed = ops.matrix(50, WIDTH, [table[:20], table[20:]])
        both = ops.matrix(2 * WIDTH, WIDTH, [weight[:WIDTH], weight[WIDTH:]], bias)
        one = ops.matrix(1, WIDTH, [weight[:1]])
        rms = RMSNorm(ops.vector(scale), WIDTH, 1e-5)
        layer = LayerNorm(ops.vector(scale), ops.vector(bias[:WIDTH]), WIDTH, 1e-5)
        buffers = [ops.add(ops.position_embedding(inputs, embed), ops.embedding(inputs, embed))]

        def mlp(index: int):
            return ops.gate_and_mul(ops.linear(buffers[index % len(buffers)], both), GATES[index % 5])

        for kind, first, second in steps:
            x = buffers[first % len(buffers)]
            # What is overwritten must be a buffer that nothing else reads: mlp(second).
            match kind:
                case "mlp":
                    buffers.append(mlp(first))
                case "activate":
                    buffers.append(ops.activate(x, GATES[second % 4].activation))
                case "norm":
                    buffers.append(ops.rms_norm(x, rms)[0])
                case "layer norm":
                    buffers.append(ops.layer_norm(x, layer)[0])
                case "norm of sum":
                    buffers.extend(ops.rms_norm(x, rms, mlp(second)))
                case "layer norm of sum":
                    buffers.extend(ops.layer_norm(x, layer, mlp(second)))
                case "add":
                    buffers.append(ops.add(x, mlp(second)))
                case "in place":
                    gated = ops.sigmoid_scale(mlp(second), ops.linear(x, one))
                    buffers.append(ops.scale(ops.soft_cap(gated, 3.0), 1.5))
        selected = ops.select_rows(buffers[-1], inputs)
        normed, _ = ops.rms_norm(selected, rms)
        logits = ops.soft_cap(ops.scale(ops.linear(normed, both), 0.5), 2.0)
        on_outputs = [selected, normed, logits, ops.gate_and_mul(logits, GATES[1])]
        return [*(buffers[index % len(buffers)] for index in kept), *on_outputs]

    ops = CpuOps(threads=2, max_tokens=MAX_TOKENS, max_outputs=MAX_TOKENS)
    buffers = build(ops)
    plan = ops.compile(keep=buffers)
    for num_tokens, num_outputs in ((1, 4), (MAX_TOKENS, 2)):
        inputs.token_ids[:num_tokens] = rng.integers(0, 50, num_tokens)
        inputs.rope_rows[:num_tokens] = rng.integers(0, 50, num_tokens)
        inputs.num_tokens, inputs.num_outputs = num_tokens, num_outputs
        inputs.output_rows[:num_outputs] = rng.integers(0, num_tokens, num_outputs)
        plan.native.run(num_tokens, 0, num_outputs)
        for buffer, expected in zip(buffers, build(TorchOps()), strict=True):
            got = plan.read(buffer, num_outputs if buffer.on_outputs else num_tokens)
            # Long graphs amplify rounding; a buffer that was overwritten holds something else altogether.
            magnitude = float(expected.abs().max())
            np.testing.assert_allclose(got, expected.numpy(), atol=1e-3 * magnitude)


HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
ATTENTIONS = {
    "second rotary table": {"rotary_dim": 4, "rope": 1},
    "no rotation": {"rotary_dim": 0},
    "norms of each head": {"rotary_dim": 8, "norms": (1, 1)},
    "norms of all heads": {"rotary_dim": 8, "norms": (HEADS, KV_HEADS)},
    "sinks": {"rotary_dim": 8, "sinks": True},
    "everything": {
        "rotary_dim": 4, "rope": 1, "norms": (HEADS, KV_HEADS), "sinks": True, "window": 5, "soft_cap": 2.0
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_equals_torch(name):
    """Two sequences, one after the other and then a token more of each."""
    options = dict(ATTENTIONS[name])
    norms, has_sinks = options.pop("norms", None), options.pop("sinks", False)
    rng = np.random.default_rng(0)
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    rows = rng.standard_normal((30, width)).astype(np.float32)
    norm_weights = rng.standard_normal((2, HEADS * HEAD_DIM)).astype(np.float32)
    angles = [rng.uniform(0, 6, (30, half)).astype(np.float32) for half in (4, 2)]
    tables = np.array([[2, 0], [3, 1]], np.int32)

    def outputs(ops) -> np.ndarray:
        cache = KVCache(
            layers_per_block=1, num_blocks=4, block_size=16, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
            kv_cache_dtype="float32",
        )  # fmt: skip
        cosines, sines = (tuple(function(table) for table in angles) for function in (np.cos, np.sin))
        batch = StepInputs.allocate(30, 2, cosines, sines, cache)
        batch.block_tables[0] = [table.ctypes.data for table in tables]
        q_norm, k_norm = (
            RMSNorm(ops.vector(norm[: count * HEAD_DIM]), count * HEAD_DIM, 1e-5) if norms else None
            for norm, count in zip(norm_weights, norms or (0, 0), strict=True)
        )
        attention = Attention(
            group=0, place=0, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, scale=0.3,
            q_norm=q_norm, k_norm=k_norm, sinks=ops.vector(norm_weights[0, :HEADS]) if has_sinks else None,
            **options,
        )  # fmt: skip
        matrix = ops.matrix(30, width, [rows])

        def record():
            q = ops.rotary_and_cache(ops.embedding(batch, matrix), batch, attention)
            return ops.paged_attention(q, batch, attention)

        plan, results = None, []
        if isinstance(ops, CpuOps):
            buffer = record()
            plan = ops.compile(keep=[buffer])
        for lengths, contexts in (((18, 3), (18, 3)), ((1, 1), (19, 4))):
            count = sum(lengths)
            positions = [np.arange(end - n, end) for n, end in zip(lengths, contexts, strict=True)]
            batch.num_tokens, batch.num_sequences = count, 2
            batch.token_ids[:count] = np.concatenate(positions) + (contexts[0] == 19)
            batch.rope_rows[:count] = np.concatenate(positions)
            batch.slot_mapping[0, :count] = np.concatenate(
                [table[place // 16] * 16 + place % 16 for table, place in zip(tables, positions, strict=True)]
            )
            batch.query_start[:3], batch.context_lens[:] = [0, lengths[0], count], contexts
            if plan is None:
                results.append(record().numpy())
            else:
                plan.native.run(count, 2, 0)
                results.append(plan.read(buffer, count).copy())
        return np.concatenate(results)

    native = outputs(CpuOps(threads=2, max_tokens=30, max_outputs=2))
    np.testing.assert_allclose(native, outputs(TorchOps()), rtol=1e-5, atol=1e-5)


def test_dead_buffers_are_reused():
    ops = CpuOps(threads=1, max_tokens=MAX_TOKENS, max_outputs=1)
    weight = ops.matrix(WIDTH, WIDTH, [np.eye(WIDTH, dtype=np.float32)])
    inputs = make_inputs()
    x = ops.embedding(inputs, weight)
    for _ in range(50):
        x = ops.linear(x, weight)
    plan = ops.compile(keep=[x])
    assert plan.native.num_ops == 51
    assert plan.arena.nbytes == 2 * MAX_TOKENS * row_stride(WIDTH) * 4
    inputs.token_ids[:3] = [5, 0, 31]
    plan.native.run(3, 0, 0)
    assert plan.read(x, 3).argmax(axis=1).tolist() == [5, 0, 31]


def quantised(rows: int, seed: int) -> StoredRows:
    weight = np.random.default_rng(seed).standard_normal((rows, WIDTH)).astype(np.float32)
    return StoredRows("q4_1", gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q4_1))


def test_what_only_quantised_products_read_is_written_quantised():
    """The same numbers, without the operation that quantises; the second norm has another reader."""
    inputs, results = make_inputs(), []
    rng = np.random.default_rng(0)
    table = rng.standard_normal((50, WIDTH)).astype(np.float32)
    inputs.token_ids[:5] = [3, 1, 4, 1, 5]
    for keep_all in (False, True):
        ops = CpuOps(threads=2, max_tokens=MAX_TOKENS, max_outputs=MAX_TOKENS)
        norm = RMSNorm(ops.vector(np.ones(WIDTH)), WIDTH, 1e-5)
        up = ops.matrix(2 * WIDTH, WIDTH, [quantised(2 * WIDTH, 1)])
        down = ops.matrix(WIDTH, WIDTH, [quantised(WIDTH, 2)])
        plain = ops.matrix(WIDTH, WIDTH, [table[:WIDTH]])
        first, residual = ops.rms_norm(ops.embedding(inputs, ops.matrix(50, WIDTH, [table])), norm)
        active = ops.gate_and_mul(ops.linear(first, up), Gate())
        second, _ = ops.rms_norm(ops.linear(active, down), norm, residual)
        outputs = [ops.linear(second, down), ops.linear(second, plain)]
        plan = ops.compile(keep=[*outputs, *([first, active] if keep_all else [])])
        assert [first.quantized, active.quantized, second.quantized] == [not keep_all, not keep_all, False]
        # Embedding, two norms, SiLU and four products; one quantising operation for each float32 input.
        assert plan.native.num_ops == (8 + 3 if keep_all else 8 + 1)
        plan.native.run(5, 0, 0)
        results.append([plan.read(buffer, 5).copy() for buffer in outputs])
    np.testing.assert_array_equal(*results)


def test_what_is_rewritten_in_place_stays_float32():
    """Norms after a sublayer, as in Gemma: what goes on to be added, or was scaled, is not quantised."""
    inputs, rng = make_inputs(), np.random.default_rng(1)
    table = rng.standard_normal((50, WIDTH)).astype(np.float32)
    inputs.token_ids[:5] = [3, 1, 4, 1, 5]
    inputs.num_tokens = 5

    def build(ops, weight):
        norm = RMSNorm(ops.vector(np.ones(WIDTH)), WIDTH, 1e-5)
        embedded = ops.scale(ops.embedding(inputs, ops.matrix(50, WIDTH, [table])), 3.0)
        first, residual = ops.rms_norm(embedded, norm)
        after, _ = ops.rms_norm(ops.linear(first, weight), norm)
        second, residual = ops.rms_norm(after, norm, residual)
        active = ops.activate(ops.linear(second, weight), "gelu_tanh")
        scaled = ops.scale(ops.activate(ops.linear(active, weight), "relu"), 0.5)
        out = ops.add(ops.linear(scaled, weight), residual)
        return [first, after, second, active, scaled], out

    ops = CpuOps(threads=2, max_tokens=MAX_TOKENS, max_outputs=1)
    stored = quantised(WIDTH, 1)
    buffers, out = build(ops, ops.matrix(WIDTH, WIDTH, [stored]))
    plan = ops.compile(keep=[out])
    assert [buffer.quantized for buffer in buffers] == [True, False, True, True, False]
    plan.native.run(5, 0, 0)
    dense = gguf.quants.dequantize(stored.data, gguf.GGMLQuantizationType.Q4_1)
    torch_ops = TorchOps()
    expected = build(torch_ops, torch_ops.matrix(WIDTH, WIDTH, [dense]))[1].numpy()
    np.testing.assert_allclose(plan.read(out, 5), expected, atol=0.03 * np.abs(expected).max())


def test_a_kept_buffer_serves_the_next_plan():
    ops = CpuOps(threads=1, max_tokens=MAX_TOKENS, max_outputs=2)
    inputs = make_inputs()
    hidden = ops.embedding(inputs, ops.matrix(8, WIDTH, [np.arange(8 * WIDTH).reshape(8, WIDTH)]))
    forward = ops.compile(keep=[hidden])
    selected = ops.select_rows(hidden, inputs)
    head = ops.compile(keep=[selected])
    inputs.token_ids[:3] = [7, 1, 4]
    inputs.output_rows[:2] = [2, 0]
    forward.native.run(3, 1, 2)
    head.native.run(3, 1, 2)
    assert head.read(selected, 2)[:, 0].tolist() == [4 * WIDTH, 7 * WIDTH]


def test_strides_are_whole_lines_off_the_kibibyte():
    for width in range(1, 1200):
        stride = row_stride(width)
        assert width <= stride <= width + 31 and stride % 16 == 0 and stride * 4 % 1024


@pytest.mark.parametrize("ops_class", [TorchOps, lambda: CpuOps(threads=1, max_tokens=1, max_outputs=1)])
def test_parts_that_do_not_fill_a_matrix_are_refused(ops_class):
    with pytest.raises(ValueError, match="have 3 rows"):
        ops_class().matrix(4, 2, [np.ones((1, 2), np.float32), np.ones((2, 2), np.float32)])


def test_parts_of_another_width_are_refused():
    ops = CpuOps(threads=1, max_tokens=1, max_outputs=1)
    for shape in ((4, 3), (5, 2), (8,)):
        with pytest.raises(ValueError, match="does not fit"):
            ops.matrix(4, 2, [np.ones(shape, np.float32)])


def test_weight_bytes_are_counted():
    torch_ops, ops = TorchOps(), CpuOps(threads=1, max_tokens=1, max_outputs=1)
    for each in (torch_ops, ops):
        each.matrix(64, 16, [np.ones((64, 16), np.float32)], np.ones(64, np.float32))
    assert torch_ops.weight_bytes == ops.weight_bytes == 64 * 17 * 4
