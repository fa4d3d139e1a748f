"""Pooled hidden states of real steps, against those of each prefix run alone, and of any other chunking."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.drive import GREEDY, run_step_on
from helpers.random_runner import CONFIG, RandomCheckpoint, make_runner, new_sequence, step_of

from streamllm.runner import model_runner
from streamllm.runner.executor import Executor
from streamllm.runner.messages import PoolRow, ScheduledBatch, ScheduledRow
from streamllm.runner.pooler import HIDDEN_NOT_FINITE, Pooler

PROMPT = [int(token) for token in np.random.default_rng(1).integers(0, CONFIG.vocab_size, 60)]
BLOCKS = [0, 1, 2, 3]


def pool_step(*sequences, pooling: str, step: int = 0) -> ScheduledBatch:
    """A step that computes and pools whole prompts, and samples nothing."""
    batch = step_of(*sequences, step=step)
    batch.output_rows = []
    batch.pool_rows = [PoolRow(row, pooling, True) for row in range(len(sequences))]
    return batch


def in_chunks(runner, prompt: list[int], ends: list[int], pooling: str, slot: int = 0) -> np.ndarray:
    """A prompt's pooled vector, computed up to each of ``ends`` in a step of its own."""
    start = 0
    for step, end in enumerate(ends):
        batch = ScheduledBatch(step, rows=[ScheduledRow(slot, start, end - start, [], [])])
        if start == 0:
            batch.new_sequences = [new_sequence(slot, prompt, BLOCKS)]
        complete = end == len(prompt)
        if complete or pooling == "mean":
            batch.pool_rows = [PoolRow(0, pooling, complete)]
        pooled = runner.step(batch).pooled
        assert complete or pooled in ([], [None])
        start = end
    runner.step(ScheduledBatch(len(ends), finished_slots=[slot]))
    return pooled[0]


@pytest.mark.parametrize("backend", ["cpu", "torch", "gpu", "gpu-graphs"])
def test_last_is_the_last_row_and_mean_the_mean_of_all(backend):
    runner = make_runner(backend=backend)
    rows = [in_chunks(runner, PROMPT[:end], [end], "last") for end in range(1, len(PROMPT) + 1)]
    last = runner.step(pool_step(new_sequence(0, PROMPT, BLOCKS), pooling="last")).pooled[0]
    runner.step(ScheduledBatch(1, finished_slots=[0]))
    mean = runner.step(pool_step(new_sequence(0, PROMPT, BLOCKS), pooling="mean")).pooled[0]
    assert last.dtype == mean.dtype == np.float64 and last.shape == mean.shape == (CONFIG.hidden_size,)
    np.testing.assert_allclose(last, rows[-1], atol=1e-5)
    np.testing.assert_allclose(mean, np.mean(rows, 0), atol=1e-5)
    assert np.abs(last - mean).max() > 0.1


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_chunks_and_neighbours_change_no_bit(pooling):
    runner = make_runner()
    whole = in_chunks(runner, PROMPT, [60], pooling)
    for ends in ([1, 60], [59, 60], [16, 32, 48, 60], [7, 8, 31, 44, 60]):
        np.testing.assert_array_equal(in_chunks(runner, PROMPT, ends, pooling), whole)
    # Between a prompt that is sampled from and one that is pooled the other way.
    others = new_sequence(0, PROMPT[:9], [4], GREEDY), new_sequence(2, PROMPT[5:25], [5, 6], GREEDY)
    batch = step_of(others[0], new_sequence(1, PROMPT[:30], BLOCKS), others[1])
    batch.output_rows = batch.output_rows[:1]
    batch.pool_rows = [PoolRow(1, pooling, False)] * (pooling == "mean")
    batch.pool_rows.append(PoolRow(2, "last" if pooling == "mean" else "mean", True))
    batch.rows[1].num_tokens = 30
    batch.new_sequences[1].token_ids = PROMPT
    first = runner.step(batch)
    assert len(first.token_ids) == 1 and first.pooled[:-1] == [None] * (pooling == "mean")
    rest = ScheduledBatch(1, rows=[ScheduledRow(1, 30, 30, [], [])], pool_rows=[PoolRow(0, pooling, True)])
    np.testing.assert_array_equal(runner.step(rest).pooled[0], whole)


def test_a_slot_that_is_used_again_begins_a_new_sum():
    runner = make_runner()
    whole = in_chunks(runner, PROMPT, [60], "mean")
    abandoned = ScheduledBatch(
        0, rows=[ScheduledRow(0, 0, 20, [], [])], pool_rows=[PoolRow(0, "mean", False)]
    )
    abandoned.new_sequences = [new_sequence(0, PROMPT[::-1], BLOCKS)]
    runner.step(abandoned)
    again = pool_step(new_sequence(0, PROMPT, BLOCKS), pooling="mean", step=1)
    again.finished_slots = [0]
    np.testing.assert_array_equal(runner.step(again).pooled[0], whole)


def test_a_mean_that_has_not_begun_is_an_error():
    pooler = Pooler()
    batch = ScheduledBatch(0, rows=[ScheduledRow(3, 16, 4, [], [])], pool_rows=[PoolRow(0, "mean", True)])
    with pytest.raises(ValueError, match="slot 3 goes on at position 16"):
        pooler.pool(batch, np.array([0, 4]), np.ones((4, 8), np.float32))


@pytest.mark.parametrize("backend", ["cpu", "torch", "gpu", "gpu-graphs"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_hidden_states_that_are_not_finite_fail_their_prompt_alone(backend, pooling):
    checkpoint = RandomCheckpoint(CONFIG)
    # The model reads token 7 as not a number.
    checkpoint.tensors["model.embed_tokens.weight"][7] = np.nan
    runner = make_runner(checkpoint, backend=backend)
    batch = pool_step(new_sequence(0, [1, 7], [0]), new_sequence(1, [1, 2], [1]), pooling=pooling)
    failed, fine = runner.step(batch).pooled
    assert failed == HIDDEN_NOT_FINITE and np.isfinite(fine).all()


@pytest.mark.parametrize("backend", ["cpu", "torch", "gpu", "gpu-graphs"])
async def test_pooling_leaves_the_event_loop_where_it_is_much(backend, monkeypatch):
    def batch(step: int) -> ScheduledBatch:
        both = step_of(new_sequence(2 * step, PROMPT[:30], BLOCKS), new_sequence(2 * step + 1, [1], [4]))
        both.step, both.output_rows, both.pool_rows = step, both.output_rows[1:], [PoolRow(0, "mean", True)]
        return both

    executor = Executor(make_runner(backend=backend))
    inline = await run_step_on(executor, batch(0))
    monkeypatch.setattr(model_runner, "MANY_VALUES", 0)
    apart = await run_step_on(executor, batch(1))
    np.testing.assert_array_equal(apart.pooled[0], inline.pooled[0])
    assert apart.token_ids == inline.token_ids
    executor.close()


def test_a_sum_that_is_given_up_takes_no_memory():
    runner = make_runner()
    started = ScheduledBatch(0, rows=[ScheduledRow(0, 0, 20, [], [])], pool_rows=[PoolRow(0, "mean", False)])
    started.new_sequences = [new_sequence(0, PROMPT, BLOCKS)]
    runner.step(started)
    assert list(runner._pooler._sums) == [0]
    runner.step(ScheduledBatch(1, finished_slots=[0]))
    assert not runner._pooler._sums
