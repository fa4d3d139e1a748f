"""Mixture-of-experts layers as the recorder plans them, against the torch reference."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from streamllm import _native
from streamllm.ops import Experts, Gate, RMSNorm
from streamllm.ops.cpu_plan import CpuOps
from streamllm.ops.kv_cache import KVCache
from streamllm.ops.plan_recorder import row_stride
from streamllm.ops.step_inputs import StepInputs
from streamllm.ops.stored_rows import StoredRows
from streamllm.ops.torch_ops import TorchOps

MAX_TOKENS, VOCAB, HIDDEN, WIDTH, NUM_EXPERTS, TOP_K = 24, 50, 64, 96, 6, 2


def make_inputs() -> StepInputs:
    cache = KVCache(
        layers_per_block=1, num_blocks=1, block_size=16, num_kv_heads=1, head_dim=8, kv_cache_dtype="float32"
    )
    inputs = StepInputs.allocate(MAX_TOKENS, MAX_TOKENS, (), (), cache)
    inputs.token_ids[:] = np.random.default_rng(0).integers(0, VOCAB, MAX_TOKENS)
    inputs.output_rows[:3] = (7, 0, 7)
    inputs.num_tokens, inputs.num_outputs = MAX_TOKENS, 3
    return inputs


def random(*shape: int, seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) / 6).astype(np.float32)


def quantised(weight: np.ndarray) -> StoredRows:
    return StoredRows("q8_0", gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0))


def experts_of(ops, *, normalize: bool, gate: Gate, quantise: bool = False) -> Experts:
    gate_up, down = random(NUM_EXPERTS, 2, WIDTH, HIDDEN, seed=1), random(NUM_EXPERTS, HIDDEN, WIDTH, seed=2)
    as_stored = quantised if quantise else np.asarray
    return Experts(
        gate_up=ops.expert_matrices(
            2 * WIDTH,
            HIDDEN,
            ([as_stored(half) for half in halves] for halves in gate_up),
            random(NUM_EXPERTS, 2 * WIDTH, seed=3),
        ),
        down=ops.expert_matrices(
            HIDDEN, WIDTH, ([as_stored(matrix)] for matrix in down), random(NUM_EXPERTS, HIDDEN, seed=4)
        ),
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        normalize=normalize,
        gate=gate,
    )


def normed(ops, inputs: StepInputs):
    hidden = ops.embedding(inputs, ops.matrix(VOCAB, HIDDEN, [random(VOCAB, HIDDEN, seed=5)]))
    return ops.rms_norm(hidden, RMSNorm(ops.vector(np.ones(HIDDEN)), HIDDEN, 1e-5))[0]


def router_logits(ops, x):
    return ops.linear(x, ops.matrix(NUM_EXPERTS, HIDDEN, [random(NUM_EXPERTS, HIDDEN, seed=6)]))


@pytest.mark.parametrize("gate", [Gate("silu"), Gate("gelu_tanh"), Gate("silu", limit=1.0)])
@pytest.mark.parametrize("normalize", [True, False])
def test_layer_equals_torch(normalize, gate):
    """On tokens and on outputs."""
    inputs = make_inputs()

    def build(ops):
        x = normed(ops, inputs)
        logits = router_logits(ops, x)
        experts = experts_of(ops, normalize=normalize, gate=gate)
        selected, selected_logits = ops.select_rows(x, inputs), ops.select_rows(logits, inputs)
        on_outputs = ops.experts(selected, selected_logits, experts)
        return ops.add(ops.experts(x, logits, experts), x), on_outputs

    ops = CpuOps(threads=2, max_tokens=MAX_TOKENS, max_outputs=MAX_TOKENS)
    on_tokens, on_outputs = build(ops)
    plan = ops.compile(keep=[on_tokens, on_outputs])
    plan.native.run(MAX_TOKENS, 0, 3)
    expected, expected_outputs = build(TorchOps())
    np.testing.assert_allclose(plan.read(on_tokens, MAX_TOKENS), expected.numpy(), atol=1e-5)
    np.testing.assert_allclose(plan.read(on_outputs, 3), expected_outputs.numpy(), atol=1e-5)


def test_what_only_quantised_experts_read_is_written_quantised():
    """The same bits, whether the norm writes quantised rows or the layer quantises them."""
    inputs, results = make_inputs(), []
    for keep_x in (False, True):
        ops = CpuOps(threads=2, max_tokens=MAX_TOKENS, max_outputs=1)
        # The router reads rows of its own, which stay as they are.
        logits, x = router_logits(ops, normed(ops, inputs)), normed(ops, inputs)
        experts = experts_of(ops, normalize=True, gate=Gate(), quantise=True)
        out = ops.experts(x, logits, experts)
        plan = ops.compile(keep=[out, *([x] if keep_x else [])])
        assert x.quantized is not keep_x
        plan.native.run(MAX_TOKENS, 0, 0)
        results.append(plan.read(out, MAX_TOKENS).copy())
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("quantise", [False, True])
def test_intermediate_rows_lie_in_the_arena(quantise):
    """top_k rows a token, quantised for quantised down products; reused by what comes after."""
    inputs = make_inputs()
    ops = CpuOps(threads=1, max_tokens=MAX_TOKENS, max_outputs=1)
    x = normed(ops, inputs)
    logits = router_logits(ops, x)
    experts = experts_of(ops, normalize=True, gate=Gate(), quantise=quantise)
    for _ in range(5):
        x = ops.experts(x, logits, experts)
    plan = ops.compile(keep=[x])
    rows = MAX_TOKENS * TOP_K
    active = _native.quantized_bytes(rows, WIDTH) if quantise else rows * row_stride(WIDTH) * 4
    others = MAX_TOKENS * (3 * row_stride(HIDDEN) + row_stride(NUM_EXPERTS)) * 4
    assert plan.arena.nbytes <= active + others + 64


def test_weight_bytes_are_counted_and_parts_checked():
    torch_ops, ops = TorchOps(), CpuOps(threads=1, max_tokens=1, max_outputs=1)
    for each in (torch_ops, ops):
        weights = each.expert_matrices(64, 16, ([np.ones((64, 16))] for _ in range(3)), np.ones((3, 64)))
        assert weights.bias.shape == (3, 64)
    assert torch_ops.weight_bytes == ops.weight_bytes == 3 * 64 * 17 * 4
    for each in (torch_ops, ops):
        with pytest.raises(ValueError, match="have 3 rows"):
            each.expert_matrices(4, 2, [[np.ones((4, 2), np.float32)], [np.ones((3, 2), np.float32)]])
