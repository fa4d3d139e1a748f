"""The GPU's backend on a CPU: what it computes, in which precision, and how its queue gives results."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.drive import GREEDY, generate, run_step
from helpers.random_runner import CONFIG, RandomCheckpoint, make_runner, new_sequence, step_of

from streamllm.errors import ConfigError
from streamllm.ops.step_inputs import ROW_EDITS
from streamllm.runner import gpu_backend
from streamllm.runner.messages import OutputRow, ScheduledBatch, ScheduledRow
from streamllm.runner.prompt_rows import SLICE_ROWS
from streamllm.runner.stream_waiter import StreamWaiter
from streamllm.sampling_params import SamplingParams

PROMPTS = [[1, 2, 3, 4, 5], [7] * 40, [9], list(range(60, 20, -1))]
MIXED = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=3, top_p=0.9, logprobs=4),
    SamplingParams(temperature=0.7, seed=4, top_k=7, logprobs=0),
    SamplingParams(temperature=1.0, seed=2**64 - 1, min_p=0.05),
]


def same_generations(left, right, atol=1e-5) -> None:
    for one, two in zip(left, right, strict=True):
        assert one.output == two.output
        np.testing.assert_allclose(one.logits, two.logits, atol=atol)
        for a, b in zip(one.logprobs, two.logprobs, strict=True):
            assert (a.rank, a.top_ids) == (b.rank, b.top_ids)
            assert a.logprob == pytest.approx(b.logprob, abs=1e-5)


@pytest.mark.parametrize("backend", ["gpu", "gpu-graphs"])
@pytest.mark.parametrize("windows", [(None, None), (20, 20), (None, 20), (20, None)])
@pytest.mark.parametrize("budget", [pytest.param(5, marks=pytest.mark.slow), 64])
def test_chunks_and_batches_equal_the_cpu(backend, windows, budget):
    config = replace(CONFIG, layer_windows=windows)
    settings = {"num_blocks": 64}
    expected = generate(make_runner(config=config, **settings), PROMPTS, params=MIXED, max_tokens=12)
    runner = make_runner(config=config, backend=backend, **settings)
    same_generations(generate(runner, PROMPTS, params=MIXED, budget=budget, max_tokens=12), expected)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gpu", "gpu-graphs"])
def test_contexts_of_many_splits_are_attended_to_in_turns(backend, monkeypatch):
    settings = {"max_model_len": 1024, "num_blocks": 256, "max_num_batched_tokens": 512}
    config = replace(CONFIG, layer_windows=(None, 300), max_position_embeddings=1024)
    prompts = [[5, 6] * 300, [3, 2, 1] * 85, [1] * 511]
    expected = generate(make_runner(config=config, **settings), prompts, budget=512, max_tokens=4)
    item_bytes = 4 * config.num_heads * (config.head_dim + 2)
    monkeypatch.setattr(gpu_backend, "PARTIALS_BYTES", 4 * item_bytes)  # a sequence of 1,024 tokens at a time
    runner = make_runner(config=config, backend=backend, **settings)
    same_generations(generate(runner, prompts, budget=512, max_tokens=4), expected)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float16, 0.03), (torch.bfloat16, 0.2)])
@pytest.mark.parametrize("backend", ["gpu", "gpu-graphs"])
def test_16_bit_activations_are_close(dtype, atol, backend):
    expected = generate(make_runner(), PROMPTS, max_tokens=1)
    name = str(dtype).removeprefix("torch.")
    runner = make_runner(backend=backend, dtype=dtype, kv_cache_dtype=name)
    for one, two in zip(expected, generate(runner, PROMPTS, max_tokens=1), strict=True):
        np.testing.assert_allclose(one.logits, two.logits, atol=atol)
        assert not np.array_equal(one.logits, two.logits)
        assert two.logits[0].dtype == np.float32


def test_an_8_bit_cache_is_close():
    exact, coarse = (
        generate(make_runner(backend="gpu", kv_cache_dtype=dtype), PROMPTS, max_tokens=1)
        for dtype in ("float32", "fp8")
    )
    for one, two in zip(exact, coarse, strict=True):
        np.testing.assert_allclose(one.logits, two.logits, atol=0.3)
        assert not np.array_equal(one.logits, two.logits)


def test_a_cache_of_another_precision_is_refused():
    with pytest.raises(ConfigError, match=r"kv_cache_dtype on a GPU must be one of .*fp8.*int8, got 'int4'"):
        make_runner(backend="gpu", kv_cache_dtype="int4")


@pytest.mark.parametrize("backend", ["gpu", "gpu-graphs"])
def test_a_copied_block_keeps_what_it_was_copied_from(backend):
    """Two sequences share a prompt whose last block is copied before one of them writes into it."""
    prompt = list(range(1, 25))
    alone = [generate(make_runner(), [[*prompt, token]], max_tokens=1)[0] for token in (30, 31)]
    runner = make_runner(backend=backend)
    run_step(runner, step_of(new_sequence(0, prompt, [0, 1])))
    batch = ScheduledBatch(
        1,
        new_sequences=[new_sequence(1, [*prompt, 31], [0, 2], num_computed_tokens=24)],
        rows=[ScheduledRow(0, 24, 1, [30], []), ScheduledRow(1, 24, 1, [], [])],
        output_rows=[OutputRow(0, 0), OutputRow(1, 1)],
        block_copies=[(1, 2)],
    )
    run_step(runner, batch)
    for row, expected in zip(runner.logits(), alone, strict=True):
        np.testing.assert_allclose(row, expected.logits[0], atol=1e-5)


@pytest.mark.parametrize("backend", ["gpu", "gpu-graphs"])
def test_a_step_may_follow_before_the_last_ones_tokens_are_known(backend):
    params = SamplingParams(temperature=1.0, seed=11, logprobs=2)
    expected = generate(make_runner(), PROMPTS[:2], params=params, max_tokens=6)
    runner = make_runner(backend=backend)
    sequences = [
        new_sequence(slot, prompt, [4 * slot, 4 * slot + 1, 4 * slot + 2, 4 * slot + 3], params, seed=11)
        for slot, prompt in enumerate(PROMPTS[:2])
    ]
    batches = [step_of(*sequences)]
    for step in range(1, 6):
        rows = [ScheduledRow(slot, len(PROMPTS[slot]) + step - 1, 1, [], []) for slot in (0, 1)]
        batches.append(ScheduledBatch(step, rows=rows, output_rows=[OutputRow(0, 0), OutputRow(1, 1)]))
    started, outputs = [], []
    for batch in batches:
        started.append(runner.start(batch))
        assert not started[-1].exclusive
        assert list(runner.sample()) == [None]
        if len(started) == 2:  # two in flight, always
            runner.wait()
            outputs.append(runner.result(started.pop(0)))
    runner.wait()
    outputs.append(runner.result(started.pop(0)))
    for slot, run in enumerate(expected):
        assert [output.token_ids[slot][0] for output in outputs] == run.output
        for output, logprobs in zip(outputs, run.logprobs, strict=True):
            assert output.logprobs[slot][0].top_ids == logprobs.top_ids


def test_more_than_two_steps_are_refused():
    runner = make_runner(backend="gpu")
    for slot in (0, 1):
        runner.start(step_of(new_sequence(slot, [1, 2], [slot])))
        list(runner.sample())
    with pytest.raises(RuntimeError, match="wait for it first"):
        runner.start(step_of(new_sequence(2, [1, 2], [2])))


def test_each_mark_is_one_signal():
    runner = make_runner(backend="gpu")
    for slot in (0, 1):
        runner.start(step_of(new_sequence(slot, [1, 2], [slot])))
        list(runner.sample())
    descriptor = os.dup(runner.event_fd)
    os.set_blocking(descriptor, False)
    runner.wait()
    runner.wait()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(descriptor)
    os.close(descriptor)
    runner.close()
    assert runner.event_fd is None


def test_rules_may_change_once_the_draw_is_submitted():
    """What a row's edits say is taken when the draw is submitted, not read when it is made."""
    runner = make_runner(backend="gpu")
    bias_ids, bias_values = np.array([17], np.int32), np.array([1e4], np.float32)
    record = np.zeros(1, ROW_EDITS)
    record["bias_ids"], record["bias_values"] = bias_ids.ctypes.data, bias_values.ctypes.data
    record["num_biases"], record["repetition_penalty"] = 1, 1.0
    runner.start(step_of(new_sequence(0, [1, 2], [0])))
    fill = runner._state.fill_outputs

    def with_bias(batch, inputs, sampling):
        fill(batch, inputs, sampling)
        sampling.edits[0] = record.ctypes.data

    runner._state.fill_outputs = with_bias
    list(runner.sample())
    bias_values[:] = 0
    record[:] = np.zeros(1, ROW_EDITS)
    runner.wait()
    assert runner.result().token_ids == [[17]]


def test_a_kernel_that_fails_fails_its_step_alone(monkeypatch):
    runner = make_runner(backend="gpu")
    backend = runner._backend

    def broken(*args):
        raise RuntimeError("no kernel for this")

    with monkeypatch.context() as patch:
        patch.setattr(backend.ops.kernels, "paged_prefill", broken, raising=False)
        with pytest.raises(RuntimeError, match="no kernel for this"):
            runner.start(step_of(new_sequence(0, [1, 2], [0])))
    expected = run_step(make_runner(), step_of(new_sequence(1, [3, 4], [1])))
    assert run_step(runner, step_of(new_sequence(1, [3, 4], [1]))).token_ids == expected.token_ids


class FakeEvent:
    """A CUDA event that is reached when the test says so."""

    made: list[FakeEvent] = []

    def __init__(self, blocking: bool):
        assert blocking
        self.reached = threading.Event()
        self.error: Exception | None = None
        FakeEvent.made.append(self)

    def record(self, stream) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        self.reached.wait()
        if self.error is not None:
            raise self.error


def test_a_stream_is_waited_for_place_by_place(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    FakeEvent.made.clear()
    descriptor = os.eventfd(0, os.EFD_SEMAPHORE)
    waiter = StreamWaiter(descriptor)
    errors: list[Exception] = []
    for _ in range(3):
        waiter.add("the stream", errors.append)
    first, second, third = FakeEvent.made
    assert first.stream == "the stream"
    second.error = RuntimeError("an illegal memory access was encountered")
    third.reached.set()
    first.reached.set()
    os.eventfd_read(descriptor)
    assert errors == []
    second.reached.set()
    os.eventfd_read(descriptor)
    os.eventfd_read(descriptor)
    assert errors == [second.error]
    waiter.close()
    os.close(descriptor)


def test_an_error_of_the_device_is_raised_by_its_mark():
    runner = make_runner(backend="gpu")
    for slot in (0, 1):
        runner.start(step_of(new_sequence(slot, [1, 2], [slot])))
        list(runner.sample())
    runner._backend._marks[0].error = RuntimeError("an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        runner.wait()
    runner.wait()
    assert runner.result().errors == [None]


def test_the_largest_step_leaves_no_trace():
    runner = make_runner(backend="gpu")
    runner._backend.run_largest_step()
    expected = generate(make_runner(), PROMPTS, max_tokens=6)
    same_generations(generate(runner, PROMPTS, max_tokens=6), expected)


def test_the_largest_step_compiles_for_every_number_of_rows(monkeypatch):
    """Kernels are compiled apart for one row, for multiples of 16, and for tiles of each power of two."""
    runner = make_runner(backend="gpu", max_num_seqs=40, max_num_batched_tokens=100)
    backend, forwards, draws = runner._backend, [], []
    kernels, forward = backend.ops.kernels, backend._forward
    sample = kernels.sample

    def noted(logits, vocab_size, sampling, num_outputs):
        draws.append(num_outputs)
        sample(logits, vocab_size, sampling, num_outputs)

    def noted_forward(batch):
        forwards.append((batch.num_tokens, batch.max_query_len))
        return forward(batch)

    monkeypatch.setattr(kernels, "sample", noted, raising=False)
    monkeypatch.setattr(backend, "_forward", noted_forward)
    backend.run_largest_step()
    assert forwards == [(n, n) for n in (1, 2, 16, 32, 64, 100)]
    assert draws == [1, 2, 16, 32, SLICE_ROWS]


def test_weights_are_held_once_in_their_dtype():
    checkpoint = RandomCheckpoint(CONFIG)
    matrices = sum(tensor.size for tensor in checkpoint.tensors.values() if tensor.ndim == 2)
    vectors = sum(tensor.size for tensor in checkpoint.tensors.values() if tensor.ndim == 1)
    runner = make_runner(checkpoint, backend="gpu", dtype=torch.bfloat16, kv_cache_dtype="bfloat16")
    assert runner.weight_bytes == 2 * matrices + 4 * vectors
    assert runner.kv_cache_bytes == 32 * 16 * 2 * 2 * CONFIG.head_dim * 2
