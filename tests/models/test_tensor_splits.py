"""What a forward's dataflow allows to be divided, in forwards that no family has."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from streamllm.models.forward_trace import (
    ForwardTrace,
    TracedBuffer,
    TracedMatrix,
    TracedVector,
    TracingOps,
)
from streamllm.models.tensor_splits import NotDivisible, find_splits
from streamllm.ops import Attention, Gate, RMSNorm

QKV, OUT, UP, DOWN, HEAD = (
    TracedMatrix(((name, 8),), 8, False) for name in ("qkv", "out", "up", "down", "head")
)
ATTENTION = Attention(group=0, place=0, num_heads=2, num_kv_heads=1, head_dim=2, rotary_dim=0, scale=1.0)


def trace_of(forward: Callable[[TracingOps, TracedBuffer], TracedBuffer]) -> ForwardTrace:
    ops, head = TracingOps(), TracingOps()
    forward(ops, ops.embedding(None, HEAD))
    logits = head.soft_cap(head.scale(head.linear(TracedBuffer(None), HEAD), 2.0), 3.0)
    return ForwardTrace(tuple(ops.calls), tuple(head.calls), logits, (), 0)


def attend(ops: TracingOps, x: TracedBuffer) -> TracedBuffer:
    q = ops.rotary_and_cache(ops.linear(x, QKV), None, ATTENTION)
    return ops.paged_attention(q, None, ATTENTION)


def test_elementwise_operations_may_stand_between_products():
    def forward(ops: TracingOps, x: TracedBuffer) -> TracedBuffer:
        x = ops.linear(ops.scale(attend(ops, x), 0.5), OUT)
        return ops.linear(ops.soft_cap(ops.gate_and_mul(ops.linear(x, UP), Gate()), 1.0), DOWN)

    splits = find_splits(trace_of(forward))
    (attention,), (inner,) = splits.attentions, splits.inners
    assert (attention.qkv, attention.attention, attention.out) == (QKV, ATTENTION, OUT)
    assert (inner.first, inner.second) == (UP, DOWN)
    assert splits.vocabulary == [HEAD, HEAD]


def norm(ops: TracingOps, x: TracedBuffer) -> TracedBuffer:
    return ops.rms_norm(x, RMSNorm(TracedVector("norm", 8), 8, 1e-5))[0]


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda ops, x: ops.linear(norm(ops, attend(ops, x)), OUT), "its operation rms_norm reads columns"),
        (lambda ops, x: ops.add(x, attend(ops, x)), "its operation add reads columns"),
        (lambda ops, x: ops.activate(x, "silu"), "is no product of its own"),
        (lambda ops, x: ops.gate_and_mul(norm(ops, ops.linear(x, UP)), Gate()), "is no product of its own"),
    ],
    ids=["a norm over all heads", "a sum", "no product", "a norm before the gate"],
)
def test_what_mixes_columns_cannot_be_divided(forward, reason):
    with pytest.raises(NotDivisible, match=reason):
        find_splits(trace_of(forward))


def test_a_product_that_is_read_twice_cannot_be_divided():
    def forward(ops: TracingOps, x: TracedBuffer) -> TracedBuffer:
        up = ops.linear(x, UP)
        return ops.add(up, ops.linear(ops.activate(up, "relu"), DOWN))

    with pytest.raises(NotDivisible, match="is no product of its own"):
        find_splits(trace_of(forward))
