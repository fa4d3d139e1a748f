"""The runner's own promises; what models compute is tested with the models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.drive import GREEDY, generate, run_step
from helpers.random_runner import CONFIG, RandomCheckpoint, make_runner, new_sequence, step_of

from streamllm.errors import ConfigError, ModelLoadError
from streamllm.runner.messages import ScheduledBatch
from streamllm.runner.model_runner import NOT_FINITE, ModelRunner
from streamllm.sampling_params import SamplingParams


@pytest.mark.parametrize("backend", ["cpu", "torch", "gpu", "gpu-graphs"])
def test_a_preempted_sequence_continues_as_if_nothing_happened(backend):
    """It comes back with its output so far, in another slot and other blocks; the random counter goes on."""
    params = SamplingParams(temperature=1.0, seed=5, logprobs=2)
    runner = make_runner(backend=backend)
    prompt = [3, 9, 20, 4]
    [whole] = generate(runner, [prompt], params=params, max_tokens=12)
    tokens = prompt + whole.output[:7]
    output = run_step(runner, step_of(new_sequence(2, tokens, [30, 11], params, seed=5, num_prompt_tokens=4)))
    assert output.token_ids == [[whole.output[7]]]
    assert output.logprobs[0][0].top_ids == whole.logprobs[7].top_ids
    if backend == "cpu":
        assert output.logprobs == [[whole.logprobs[7]]]


def test_cached_tokens_and_copied_blocks_are_used():
    runner = make_runner()
    tokens = list(range(20))
    first = run_step(runner, step_of(new_sequence(0, tokens, [4, 5])))
    logits = runner.logits()
    fork = step_of(new_sequence(1, tokens, [4, 7], num_computed_tokens=19), step=1)
    fork.block_copies = [(5, 7)]
    assert run_step(runner, fork).token_ids == first.token_ids
    assert np.array_equal(runner.logits(), logits)


def test_only_output_rows_have_logits_and_only_wanted_ones_logprobs():
    runner = make_runner()
    batch = step_of(
        new_sequence(0, [1, 2, 3], [0]),
        new_sequence(1, [5, 6], [1], SamplingParams(temperature=0.0, logprobs=0)),
        new_sequence(2, [9], [2], SamplingParams(temperature=0.0, logprobs=5)),
    )
    del batch.output_rows[0]
    output = run_step(runner, batch)
    logits = runner.logits()
    assert logits.shape == (2, CONFIG.vocab_size)
    assert output.token_ids == [[int(row.argmax())] for row in logits]
    assert output.errors == [None, None]
    bare, five = output.logprobs[0][0], output.logprobs[1][0]
    assert (bare.rank, bare.top_ids, bare.top_logprobs) == (1, [], [])
    expected = logits[1].astype(np.float64) - np.log(np.exp(logits[1].astype(np.float64)).sum())
    assert five.top_ids == np.argsort(-logits[1], kind="stable")[:5].tolist()
    np.testing.assert_allclose(five.top_logprobs, expected[five.top_ids], atol=1e-5)
    assert five.logprob == five.top_logprobs[0]
    plain = run_step(runner, ScheduledBatch(1, finished_slots=[1, 2]))
    assert (plain.token_ids, plain.logprobs, plain.errors) == ([], [], [])


@pytest.mark.parametrize("backend", ["cpu", "torch", "gpu", "gpu-graphs"])
def test_logits_that_are_not_finite_are_an_error_of_that_row_only(backend):
    checkpoint = RandomCheckpoint(CONFIG)
    checkpoint.tensors["model.embed_tokens.weight"][13] = np.nan
    # Not tied: only a prompt that holds the token meets the NaN.
    config = replace(CONFIG, tie_word_embeddings=False)
    checkpoint.tensors["lm_head.weight"] = RandomCheckpoint(CONFIG, 1).tensors["model.embed_tokens.weight"]
    runner = make_runner(checkpoint, config, backend=backend)
    output = run_step(runner, step_of(new_sequence(0, [1, 13, 2], [0]), new_sequence(1, [1, 2], [1])))
    assert output.errors == [NOT_FINITE, None]
    assert output.token_ids[0] == [] and output.logprobs == [None, None]
    assert len(output.token_ids[1]) == 1
    # The poisoned blocks do no harm to their next owner.
    clean = run_step(
        runner,
        ScheduledBatch(1, finished_slots=[0], **vars_of(step_of(new_sequence(0, [1, 2], [0])))),
    )
    assert clean.token_ids == [output.token_ids[1]]


def vars_of(batch: ScheduledBatch) -> dict:
    return {"new_sequences": batch.new_sequences, "rows": batch.rows, "output_rows": batch.output_rows}


@pytest.mark.parametrize("backend", ["cpu", "torch", "gpu", "gpu-graphs"])
def test_ids_beyond_the_tokenizer_are_never_sampled(backend):
    checkpoint = RandomCheckpoint(CONFIG)
    checkpoint.tensors["model.embed_tokens.weight"][60:] *= 50
    free = generate(make_runner(checkpoint, backend=backend), [[1, 2, 3]], max_tokens=8)[0]
    assert max(free.output) >= 60
    bounded = make_runner(checkpoint, backend=backend, sampled_vocab_size=60)
    for params in (GREEDY, SamplingParams(temperature=2.0, logprobs=20, seed=1)):
        run = generate(bounded, [[1, 2, 3]], params=params, max_tokens=8)[0]
        assert max(run.output) < 60
        assert all(max(entry.top_ids) < 60 for entry in run.logprobs)


def test_a_refused_batch_leaves_the_runner_usable():
    runner = make_runner()
    expected = generate(runner, [[5, 6, 7]])[0].output
    with pytest.raises(ValueError, match="the batch has 65 tokens, more than 64"):
        runner.start(step_of(new_sequence(0, [1] * 65, [0, 1, 2, 3, 4])))
    assert not runner.in_flight
    run_step(runner, ScheduledBatch(1, finished_slots=[0]))
    assert generate(runner, [[5, 6, 7]])[0].output == expected


def test_a_phase_at_a_time():
    runner = make_runner()
    runner.start(step_of(new_sequence(0, [1, 2], [0])))
    for early in (runner.sample, lambda: runner.start(ScheduledBatch(1))):
        with pytest.raises(RuntimeError, match="still running"):
            early()
    runner.wait()
    for work in runner.sample():
        assert work is None and runner.in_flight
        runner.wait()
    assert len(runner.result().token_ids[0]) == 1
    runner.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 12}, "head_dim 12 is not supported"),
        ({"head_dim": 264}, "head_dim 264 is not supported"),
        ({"num_heads": 3, "num_kv_heads": 2}, "num_heads 3 is not a multiple of num_kv_heads 2"),
        ({"architecture": "MambaForCausalLM"}, "architecture MambaForCausalLM is not supported"),
        ({"ropes": (replace(CONFIG.ropes[0], rotary_dim=24),)}, "rotary_dim 24 is not supported"),
    ],
)
def test_models_that_cannot_run_are_refused_by_name(changes, message):
    with pytest.raises(ModelLoadError, match=message):
        make_runner(RandomCheckpoint(CONFIG), replace(CONFIG, **changes))


def test_weights_larger_than_memory_are_refused():
    config = replace(CONFIG, vocab_size=2**31 - 1, hidden_size=2**20)
    checkpoint = RandomCheckpoint(CONFIG)
    shape = (config.vocab_size, config.hidden_size)
    checkpoint.tensors["model.embed_tokens.weight"] = np.broadcast_to(np.float32(0), shape)
    with pytest.raises(ModelLoadError, match="Not enough memory for the model's weights"):
        make_runner(checkpoint, config)


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="backend must be cpu or torch, got 'tpu'"):
        make_runner(backend="tpu")
    with pytest.raises(ConfigError, match="block_size must be a positive multiple of 16"):
        make_runner(block_size=8)


def test_sizes_are_told():
    runner = make_runner()
    assert ModelRunner.kv_bytes_per_block(CONFIG, 16, "float16") == 2 * 2 * 16 * 16 * 2
    assert (runner.num_blocks, runner.vocab_size) == (32, 70)
    assert runner.weight_bytes >= 4 * sum(t.size for t in RandomCheckpoint(CONFIG).tensors.values())
