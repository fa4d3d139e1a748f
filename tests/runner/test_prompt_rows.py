"""Logprobs of a prompt's tokens, against the logits that each prefix gives when it is run alone."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.drive import generate, run_step
from helpers.random_runner import CONFIG, RandomCheckpoint, make_runner, new_sequence, step_of

from streamllm.runner.executor import Executor
from streamllm.runner.messages import OutputRow, PromptRows, ScheduledBatch, ScheduledRow
from streamllm.runner.model_runner import NOT_FINITE
from streamllm.runner.prompt_rows import SLICE_ROWS
from streamllm.sampling_params import SamplingParams

PROMPT = [int(token) for token in np.random.default_rng(1).integers(0, CONFIG.vocab_size, 150)]
BLOCKS = list(range(10))


def judged(prompt: list[int]) -> np.ndarray:
    """Log probabilities of all tokens after each prefix of ``prompt``: float64 ``[len(prompt), vocab]``."""
    runner = make_runner(num_blocks=32)
    rows = [generate(runner, [prompt[:end]], max_tokens=1)[0].logits[0] for end in range(1, len(prompt) + 1)]
    logits = np.array(rows, np.float64)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def check(chunk, expected: np.ndarray, prompt: list[int], first: int, count: int, width: int) -> None:
    rows = np.arange(first - 1, first - 1 + count)
    tokens = np.array(prompt[first : first + count])
    own = expected[rows, tokens]
    assert chunk.first == first and chunk.logprobs.shape == (count,)
    np.testing.assert_allclose(chunk.logprobs, own, atol=1e-5)
    np.testing.assert_array_equal(chunk.ranks, 1 + (expected[rows] > own[:, None]).sum(1))
    order = np.argsort(-expected[rows], axis=1, kind="stable")[:, :width]
    np.testing.assert_array_equal(chunk.top_ids, order)
    np.testing.assert_allclose(chunk.top_logprobs, np.take_along_axis(expected[rows], order, 1), atol=1e-5)


@pytest.mark.parametrize("backend", ["cpu", "torch", "gpu", "gpu-graphs"])
def test_every_token_is_judged_by_the_row_before_it(backend):
    expected = judged(PROMPT)
    runner = make_runner(backend=backend, max_num_batched_tokens=128)
    assert len(PROMPT) - 22 > 2 * SLICE_ROWS - 1, "the second step takes several slices"
    for step, (start, end) in enumerate([(0, 1), (1, 22), (22, 149), (149, 150)]):
        batch = ScheduledBatch(step, rows=[ScheduledRow(0, start, end - start, [], [])])
        if start == 0:
            batch.new_sequences = [new_sequence(0, PROMPT, BLOCKS)]
        tokens = PROMPT[start + 1 : end + 1]
        if tokens:
            batch.prompt_rows = [PromptRows(0, start + 1, tokens, 3)]
        if end == len(PROMPT):
            batch.output_rows = [OutputRow(0, 0)]
        output = run_step(runner, batch)
        if tokens:
            check(output.prompt_logprobs[0], expected, PROMPT, start + 1, len(tokens), 3)
    assert output.prompt_logprobs == [] and output.token_ids == [[int(expected[-1].argmax())]]


def test_prompt_rows_leave_the_sampled_rows_alone():
    """Neighbours of every kind: a seeded one, one with logprobs, and two prompts that are judged."""
    seeded = SamplingParams(temperature=1.0, top_k=9, seed=5, logprobs=4)
    neighbour = new_sequence(0, PROMPT[:9], [0], seeded, seed=5)
    alone = run_step(make_runner(), step_of(neighbour))
    first, second = new_sequence(1, PROMPT[:20], [1, 2]), new_sequence(2, PROMPT[3:30], [3, 4])
    batch = step_of(first, neighbour, second)
    batch.prompt_rows = [PromptRows(0, 5, PROMPT[5:20], 0), PromptRows(2, 1, PROMPT[4:30], 2)]
    output = run_step(make_runner(), batch)
    assert (output.token_ids[1], output.logprobs[1]) == (alone.token_ids[0], alone.logprobs[0])
    check(output.prompt_logprobs[0], judged(PROMPT[:20]), PROMPT[:20], 5, 15, 0)
    check(output.prompt_logprobs[1], judged(PROMPT[3:30]), PROMPT[3:30], 1, 26, 2)


def test_no_more_alternatives_than_tokens():
    runner = make_runner(sampled_vocab_size=5)
    batch = step_of(new_sequence(0, [1, 2, 3], [0]))
    batch.prompt_rows = [PromptRows(0, 1, [2, 3], 20)]
    chunk = run_step(runner, batch).prompt_logprobs[0]
    assert chunk.top_ids.shape == (2, 5) and sorted(chunk.top_ids[0].tolist()) == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(np.exp(chunk.top_logprobs).sum(1), 1, atol=1e-5)


@pytest.mark.parametrize("backend", ["cpu", "torch", "gpu", "gpu-graphs"])
def test_logits_that_are_not_finite_fail_their_prompt_alone(backend):
    checkpoint = RandomCheckpoint(CONFIG)
    # The model reads token 7 as not a number.
    checkpoint.tensors["model.embed_tokens.weight"][7] = np.nan
    config = CONFIG.__class__(**{**CONFIG.__dict__, "tie_word_embeddings": False})
    checkpoint.tensors["lm_head.weight"] = RandomCheckpoint(CONFIG, 1).tensors["model.embed_tokens.weight"]
    runner = make_runner(checkpoint, config, backend=backend)
    batch = step_of(new_sequence(0, [1, 7, 3], [0]), new_sequence(1, [1, 2, 3], [1]))
    batch.prompt_rows = [PromptRows(0, 1, [7, 3], 1), PromptRows(1, 1, [2, 3], 1)]
    failed, fine = run_step(runner, batch).prompt_logprobs
    assert failed == NOT_FINITE and np.isfinite(fine.logprobs).all()


@pytest.mark.parametrize(
    "backend", ["cpu", "torch", "gpu", pytest.param("gpu-graphs", marks=pytest.mark.slow)]
)
def test_logits_and_draw_apart_give_what_they_give_together(backend):
    params = SamplingParams(temperature=1.0, seed=3, logprobs=2)
    together = run_step(
        make_runner(backend=backend), step_of(new_sequence(0, PROMPT[:9], [0], params, seed=3))
    )
    runner = make_runner(backend=backend)
    for step in range(2):
        batch = step_of(new_sequence(step, PROMPT[:9], [step], params, seed=3), step=step)
        whole = run_step(runner, batch)
        logits = runner.logits()
        runner._backend.submit_logits()
        runner._backend.wait()
        np.testing.assert_array_equal(runner.logits(), logits)
        runner._backend.submit_draw()
        runner._backend.wait()
        assert runner.result() == whole == together


@pytest.mark.parametrize(
    "backend", ["cpu", "torch", "gpu", pytest.param("gpu-graphs", marks=pytest.mark.slow)]
)
async def test_slices_are_phases_of_the_executor(backend, monkeypatch):
    batch = step_of(new_sequence(0, PROMPT, BLOCKS))
    batch.prompt_rows = [PromptRows(0, 1, PROMPT[1:], 1)]
    expected = make_runner(max_num_batched_tokens=256).step(batch)
    executor = Executor(make_runner(backend=backend, max_num_batched_tokens=256))
    step = executor.submit(batch)
    submitted = []
    submit = executor.runner._backend.submit_sample
    monkeypatch.setattr(
        executor.runner._backend,
        "submit_sample",
        lambda: submit() or submitted.append(executor.runner._inputs.num_outputs),
    )
    step.sample()
    output = await step.output()
    assert submitted == [64, 64, 21, 1]
    assert output.token_ids == expected.token_ids
    np.testing.assert_allclose(
        output.prompt_logprobs[0].logprobs, expected.prompt_logprobs[0].logprobs, atol=1e-5
    )
    executor.close()
