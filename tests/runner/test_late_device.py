"""The GPU's backend where everything is done as late as can be: two steps are queued whole before the first
operation of either runs, and the runner's arrays have been overwritten by then."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.cpu_as_gpu import ReplayRecorder
from helpers.drive import GREEDY, generate
from helpers.late_device import LateBackend
from helpers.pooled_recorder import PooledRecorder
from helpers.random_runner import CONFIG, RandomCheckpoint, make_runner, new_sequence, step_of

from streamllm.ops.gpu import device_inputs
from streamllm.runner.backends import load_model
from streamllm.runner.messages import OutputRow, PoolRow, PromptRows, ScheduledBatch, ScheduledRow, StepOutput
from streamllm.runner.model_runner import ModelRunner
from streamllm.sampling_params import SamplingParams

PROMPTS = [[1, 2, 3, 4, 5], [7] * 40, [9], list(range(60, 20, -1))]
MIXED = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=3, top_p=0.9, logprobs=4),
    SamplingParams(temperature=0.7, seed=4, top_k=7, repetition_penalty=1.3),
    SamplingParams(temperature=1.0, seed=5, min_p=0.05, logit_bias={3: 4.0}, allowed_token_ids=[1, 2, 3, 4]),
]
GRAPHS = pytest.mark.parametrize("recorder", [None, ReplayRecorder, PooledRecorder])


def late_runner(config=CONFIG, *, recorder=None, scribbles: bool = True, **settings) -> ModelRunner:
    checkpoint = RandomCheckpoint(config)
    backend = LateBackend(recorder=recorder and recorder(), scribbles=scribbles)
    loaded = load_model(config, backend, checkpoint, False, "float32")
    return make_runner(checkpoint, config, loaded=loaded, **settings)


def run_ahead(runner: ModelRunner, batches: list[ScheduledBatch]) -> list[StepOutput]:
    """Each step is submitted before the one before it has been waited for."""
    started, outputs = [], []
    for batch in batches:
        started.append(runner.start(batch))
        assert not started[-1].exclusive
        assert list(runner.sample()) == [None]
        if len(started) == 2:
            runner.wait()
            outputs.append(runner.result(started.pop(0)))
    runner.wait()
    return [*outputs, runner.result(started.pop(0))]


@GRAPHS
@pytest.mark.parametrize("windows", [(None, None), (20, None)])
@pytest.mark.parametrize("budget", [pytest.param(3, marks=pytest.mark.slow), 64])
def test_a_step_has_taken_what_it_needs_when_it_is_submitted(recorder, windows, budget):
    config = replace(CONFIG, layer_windows=windows)
    arguments = {"params": MIXED, "budget": budget, "max_tokens": 6, "keep_logits": False}
    expected = generate(make_runner(config=config, num_blocks=64), PROMPTS, **arguments)
    found = generate(late_runner(config, recorder=recorder, num_blocks=64), PROMPTS, **arguments)
    for one, two in zip(expected, found, strict=True):
        assert one.output == two.output
        for a, b in zip(one.logprobs, two.logprobs, strict=True):
            assert a.top_ids == b.top_ids and a.logprob == pytest.approx(b.logprob, abs=1e-5)


@GRAPHS
def test_a_step_goes_on_from_tokens_that_are_not_drawn_yet(recorder):
    params = SamplingParams(temperature=1.0, seed=11, logprobs=2)
    expected = generate(make_runner(), PROMPTS[:2], params=params, max_tokens=6)
    blocks = [[0, 1, 2, 3], [4, 5, 6, 7]]
    sequences = [new_sequence(slot, PROMPTS[slot], blocks[slot], params, seed=11) for slot in (0, 1)]
    batches = [step_of(*sequences)]
    for step in range(1, 6):
        rows = [ScheduledRow(slot, len(PROMPTS[slot]) + step - 1, 1, [], []) for slot in (0, 1)]
        batches.append(ScheduledBatch(step, rows=rows, output_rows=[OutputRow(0, 0), OutputRow(1, 1)]))
    outputs = run_ahead(late_runner(recorder=recorder), batches)
    for slot, run in enumerate(expected):
        assert [output.token_ids[slot][0] for output in outputs] == run.output
        assert [output.logprobs[slot][0].top_ids for output in outputs] == [x.top_ids for x in run.logprobs]


def test_graphs_hold_nothing_of_the_memory_that_they_share():
    recorder = PooledRecorder()
    runner = late_runner(recorder=lambda: recorder)
    assert recorder.pool.num_taken == 0
    runner.close()


@pytest.mark.parametrize("places", [0, 1, 8192])
def test_blocks_are_copied_and_tables_changed_behind_the_step_before(places, monkeypatch):
    """The second step copies a block that the first one writes; also where neither copies nor changes of
    tables fit into the buffers that steps bring them in."""
    monkeypatch.setattr(device_inputs, "MAX_TABLE_CHANGES", places)
    monkeypatch.setattr(device_inputs, "MAX_BLOCK_COPIES", places)
    prompt = list(range(1, 25))
    alone = [generate(make_runner(), [[*prompt, token]], max_tokens=2)[0].output for token in (30, 31)]
    sequence = new_sequence(1, [*prompt, 31], [0, 2], num_computed_tokens=24)
    both = [OutputRow(0, 0), OutputRow(1, 1)]
    outputs = run_ahead(
        late_runner(),
        [
            replace(step_of(new_sequence(0, prompt, [0, 1])), output_rows=[]),
            ScheduledBatch(
                1,
                new_sequences=[sequence],
                rows=[ScheduledRow(0, 24, 1, [30], []), ScheduledRow(1, 24, 1, [], [])],
                output_rows=both,
                block_copies=[(1, 2)],
            ),
            ScheduledBatch(
                2,
                rows=[ScheduledRow(0, 25, 1, [], [(0, 1, [3])]), ScheduledRow(1, 25, 1, [], [])],
                output_rows=both,
                block_copies=[(1, 3)],
            ),
        ],
    )
    assert [[output.token_ids[row][0] for output in outputs[1:]] for row in (0, 1)] == alone


@pytest.mark.parametrize("what", ["prompt logprobs", "pooling"])
def test_a_step_with_work_for_the_host_comes_behind_another(what):
    def batch() -> ScheduledBatch:
        made = step_of(new_sequence(1, [3, 9, 20, 4] * 3, [1]))
        if what == "pooling":
            return replace(made, pool_rows=[PoolRow(0, "mean", True)], output_rows=[])
        return replace(made, prompt_rows=[PromptRows(0, 1, ([3, 9, 20, 4] * 3)[1:], 2)])

    expected = make_runner().step(batch())
    runner = late_runner(scribbles=False)
    before = runner.start(step_of(new_sequence(0, [3, 9, 20, 4], [0])))
    assert list(runner.sample(step=before)) == [None]
    step = runner.start(batch())
    assert step.exclusive
    runner.wait()
    assert len(runner.result(before).token_ids[0]) == 1
    runner.wait()
    output = runner.finish()
    assert output.token_ids == expected.token_ids
    for ours, theirs in zip(output.prompt_logprobs, expected.prompt_logprobs, strict=True):
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
        np.testing.assert_array_equal(ours.top_ids, theirs.top_ids)
    for ours, theirs in zip(output.pooled, expected.pooled, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
