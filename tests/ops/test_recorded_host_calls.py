"""Python functions in recorded plans: what they see of the buffers, and what they do to them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from helpers.token_inputs import MAX_ROWS, token_inputs

from streamllm.ops import RMSNorm
from streamllm.ops.cpu_plan import CpuOps
from streamllm.ops.plan_recorder import row_stride
from streamllm.ops.stored_rows import StoredRows


def cpu_ops(threads: int = 2) -> CpuOps:
    return CpuOps(threads=threads, max_tokens=MAX_ROWS, max_outputs=MAX_ROWS)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("width", [5, 32, 256])
def test_rows_are_read_and_written_where_they_lie(width, threads):
    """Of every number of rows, in a plan that was recorded once; 256 has gaps between rows."""
    ops, inputs, shapes = cpu_ops(threads), token_inputs([0]), []
    table = np.random.default_rng(0).standard_normal((50, width)).astype(np.float32)
    x = ops.embedding(inputs, ops.matrix(50, width, [table]))

    def add_one(rows: np.ndarray) -> None:
        shapes.append((rows.shape, rows.dtype, rows.strides[0]))
        rows += 1.0

    ops.host_call([x], add_one)
    out = ops.scale(x, 2.0)
    plan = ops.compile(keep=[out])
    for count in (1, 7, MAX_ROWS):
        ids = np.random.default_rng(count).integers(0, 50, count)
        inputs.token_ids[:count] = ids
        plan.native.run(count, 1, 0)
        np.testing.assert_array_equal(plan.read(out, count), (table[ids] + 1) * 2)
        assert shapes.pop() == ((count, width), np.float32, row_stride(width) * 4)


def test_a_buffer_that_a_call_writes_is_used_by_the_operations_after_it():
    """Its place is taken by no other buffer from the call on."""
    ops, inputs = cpu_ops(), token_inputs([3, 1])
    eye = ops.matrix(32, 32, [np.eye(32, dtype=np.float32)])
    x = ops.embedding(inputs, eye)
    made = ops.new_buffer(32)

    def copy(rows: np.ndarray, out: np.ndarray) -> None:
        out[:] = rows[:, ::-1]

    ops.host_call([x, made], copy)
    for _ in range(3):
        x = ops.linear(x, eye)
    total = ops.add(made, x)
    plan = ops.compile(keep=[total])
    plan.native.run(2, 1, 0)
    expected = np.eye(32)[[3, 1]]
    np.testing.assert_array_equal(plan.read(total, 2), expected + expected[:, ::-1])


def test_what_a_call_reads_is_never_quantised():
    """A norm that only quantised products read otherwise, and what stands between two of them."""
    ops, inputs, seen = cpu_ops(), token_inputs([3, 1, 4]), []
    weight = np.random.default_rng(1).standard_normal((32, 32)).astype(np.float32)
    stored = StoredRows("q8_0", gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0))
    product, norm = ops.matrix(32, 32, [stored]), RMSNorm(ops.vector(np.ones(32)), 32, 1e-5)
    normed, _ = ops.rms_norm(ops.embedding(inputs, ops.matrix(32, 32, [weight])), norm)
    unseen = ops.activate(ops.linear(normed, product), "silu")
    out = ops.linear(unseen, product)
    ops.host_call([normed], lambda rows: seen.append(rows.copy()))
    plan = ops.compile(keep=[out])
    assert (normed.quantized, unseen.quantized) == (False, True)
    plan.native.run(3, 1, 0)
    rows = weight[[3, 1, 4]]
    expected = rows / np.sqrt(np.square(rows).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(seen[0], expected, rtol=1e-5)


def test_a_call_on_outputs_of_a_buffer_of_another_plan():
    ops, inputs, seen = cpu_ops(), token_inputs([7, 1, 4], [2, 0]), []
    hidden = ops.embedding(inputs, ops.matrix(8, 8, [np.eye(8, dtype=np.float32)]))
    forward = ops.compile(keep=[hidden])
    ops.host_call([hidden], lambda rows: seen.append(rows.argmax(1).tolist()))
    selected = ops.select_rows(hidden, inputs)
    ops.host_call([selected], lambda rows: seen.append(rows.argmax(1).tolist()))
    head = ops.compile(keep=[selected])
    forward.native.run(3, 1, 2)
    head.native.run(3, 1, 2)
    assert seen == [[7, 1, 4], [4, 7]]


def test_what_a_call_raises_comes_out_of_wait_and_the_plan_stays_usable():
    ops, inputs, errors = cpu_ops(), token_inputs([1]), [ConnectionError("rank 1 has gone")]
    x = ops.embedding(inputs, ops.matrix(8, 8, [np.eye(8, dtype=np.float32)]))

    def fail_once(rows: np.ndarray) -> None:
        if errors:
            raise errors.pop()

    ops.host_call([x], fail_once)
    out = ops.scale(x, 2.0)
    plan = ops.compile(keep=[out])
    with pytest.raises(ConnectionError, match="rank 1"):
        plan.native.run(1, 1, 0)
    plan.native.run(1, 1, 0)
    assert plan.read(out, 1).tolist() == [[0, 2, 0, 0, 0, 0, 0, 0]]


def test_buffers_of_unlike_rows_are_refused():
    ops, inputs = cpu_ops(), token_inputs([1], [0])
    x = ops.embedding(inputs, ops.matrix(8, 8, [np.eye(8, dtype=np.float32)]))
    with pytest.raises(ValueError, match="equally many rows"):
        ops.host_call([x, ops.select_rows(x, inputs)], print)
