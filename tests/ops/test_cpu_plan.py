"""The recorder: what it computes, and how it places buffers."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamllm.ops import RMSNorm
from streamllm.ops.cpu_plan import CpuOps, row_stride
from streamllm.ops.kv_cache import KVCache
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
    return StepInputs.allocate(MAX_TOKENS, MAX_TOKENS, table, table, cache)


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
        st.lists(st.tuples(st.sampled_from(["mlp", "norm", "add"]), st.integers(0, 99), st.integers(0, 99)))
    )
    kept = data.draw(st.sets(st.integers(0, 99), min_size=1, max_size=4))
    inputs = make_inputs()

    def build(ops):
        embed = ops.matrix(50, WIDTH, [table[:20], table[20:]])
        both = ops.matrix(2 * WIDTH, WIDTH, [weight[:WIDTH], weight[WIDTH:]], bias)
        norm = RMSNorm(ops.vector(scale), WIDTH, 1e-5)
        buffers = [ops.embedding(inputs, embed)]
        for kind, first, second in steps:
            x = buffers[first % len(buffers)]
            if kind == "mlp":
                buffers.append(ops.silu_and_mul(ops.linear(x, both)))
            elif kind == "norm":
                buffers.append(ops.rms_norm(x, norm)[0])
            else:
                # The residual is overwritten, so it must be a buffer that nothing else reads.
                residual = ops.silu_and_mul(ops.linear(buffers[second % len(buffers)], both))
                buffers.extend(ops.rms_norm(x, norm, residual))
        selected = ops.select_rows(buffers[-1], inputs)
        return [*(buffers[index % len(buffers)] for index in kept), selected, ops.linear(selected, both)]

    ops = CpuOps(threads=2, max_tokens=MAX_TOKENS, max_outputs=MAX_TOKENS)
    buffers = build(ops)
    plan = ops.compile(keep=buffers)
    for num_tokens in (1, MAX_TOKENS):
        inputs.token_ids[:num_tokens] = rng.integers(0, 50, num_tokens)
        inputs.num_tokens, inputs.num_outputs = num_tokens, 2
        inputs.output_rows[:2] = rng.integers(0, num_tokens, 2)
        plan.native.run(num_tokens, 0, 2)
        for buffer, expected in zip(buffers, build(TorchOps()), strict=True):
            got = plan.read(buffer, 2 if buffer.on_outputs else num_tokens)
            # Long graphs amplify rounding; a buffer that was overwritten holds something else altogether.
            magnitude = float(expected.abs().max())
            np.testing.assert_allclose(got, expected.numpy(), atol=1e-3 * magnitude)


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
        active = ops.silu_and_mul(ops.linear(first, up))
        second, _ = ops.rms_norm(ops.linear(active, down), norm, residual)
        outputs = [ops.linear(second, down), ops.linear(second, plain)]
        plan = ops.compile(keep=[*outputs, *([first, active] if keep_all else [])])
        assert [first.quantized, active.quantized, second.quantized] == [not keep_all, not keep_all, False]
        # Embedding, two norms, SiLU and four products; one quantising operation for each float32 input.
        assert plan.native.num_ops == (8 + 3 if keep_all else 8 + 1)
        plan.native.run(5, 0, 0)
        results.append([plan.read(buffer, 5).copy() for buffer in outputs])
    np.testing.assert_array_equal(*results)


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
