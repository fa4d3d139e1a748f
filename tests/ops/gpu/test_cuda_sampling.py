"""The CUDA sampler, emulated on this CPU, against the definition in numpy.

What emulation cannot see: how fast it is, and the GPU's own exp(), whose last bits differ from this CPU's.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from helpers.cuda_emulation import address, emulated
from helpers.sampling_checks import (
    OUTPUTS,
    blank_results,
    check_against_definition,
    possible_tokens,
    random_logits,
    random_rules,
    random_settings,
)
from helpers.sampling_rows import RowRules, copy_buffers

from streamllm.ops.gpu.cuda import sampling as cuda_sampling
from streamllm.ops.gpu.kernels import PADDING_TARGET
from streamllm.ops.step_inputs import (
    TOKEN_NOT_FINITE,
    TOKEN_NOTHING_ALLOWED,
    LogprobsMode,
    SamplingBuffers,
)
from streamllm.runner import sampler


def sample(
    logits: np.ndarray,
    sampling: SamplingBuffers,
    *,
    num_threads: int = 64,
    num_blocks: int = 2,
    seed: int = 0,
    vocab_size: int | None = None,
) -> None:
    library = emulated("sampling.cu")
    library.set_seed(seed)
    vocab_size = vocab_size or logits.shape[1]
    scratch = np.full((num_blocks, 2, vocab_size), np.nan, np.float32)
    arrays = {name: address(getattr(sampling, name)) for name in cuda_sampling.ARRAYS}
    arguments = cuda_sampling.SampleArgs(
        logits=address(logits),
        scratch=address(scratch),
        **arrays,
        logits_stride=logits.strides[0] // 4,
        num_outputs=len(logits),
        vocab_size=vocab_size,
        max_logprobs=sampling.top_ids.shape[1],
        num_blocks=num_blocks,
        num_threads=num_threads,
    )
    library.call("sample", arguments)


def assert_same_bits(actual: SamplingBuffers, expected: SamplingBuffers) -> None:
    for name in OUTPUTS:
        np.testing.assert_array_equal(
            getattr(actual, name).view(np.int32), getattr(expected, name).view(np.int32), name
        )


@pytest.mark.parametrize(
    ("vocab_size", "rows"), [(1, 60), (2, 60), (31, 100), (32, 100), (33, 100), (300, 100), (1000, 60)]
)
def test_everything_at_once(vocab_size, rows):
    rng = np.random.default_rng(vocab_size)
    logits = random_logits(rng, rows, vocab_size)
    sampling = random_settings(rng, rows)
    rules = random_rules(rng, sampling, vocab_size)
    check_against_definition(sample, logits, sampling)
    assert vocab_size == 1 or (sampling.token >= 0).sum() > rows // 2
    del rules


@pytest.mark.parametrize("num_threads", [32, 1024])
@pytest.mark.parametrize(("vocab_size", "rows"), [(49_152, 6), (151_936, 2)])
def test_large_vocabularies(vocab_size, rows, num_threads):
    rng = np.random.default_rng(vocab_size + num_threads)
    logits = (rng.standard_normal((rows, vocab_size)) * rng.choice([0.5, 3.0], (rows, 1))).astype(np.float32)
    sampling = random_settings(rng, rows)
    sampling.temperature[:] = rng.choice([0.7, 1.0, 1.3], rows)
    sampling.top_k[:], sampling.top_p[:] = np.arange(rows) % 3 * 40, [0.95, 0.9] * (rows // 2)
    sampling.min_p[:] = 0.0
    sampling.num_logprobs[:], sampling.logprobs_mode[:] = 20, LogprobsMode.PROCESSED_LOGPROBS
    rules = random_rules(rng, sampling, vocab_size)
    check_against_definition(functools.partial(sample, num_threads=num_threads), logits, sampling)
    del rules


@pytest.mark.parametrize("step", [0.0, 0.25])
def test_flat_rows_keep_the_same_tokens(step):
    """Searches go through many candidates; with a step there are many ties."""
    rng = np.random.default_rng(3)
    rows, vocab_size = 24, 8011
    logits = rng.standard_normal((rows, vocab_size)).astype(np.float32)
    logits *= rng.choice([0.0, 0.3, 1.0], (rows, 1)).astype(np.float32)
    if step:
        logits = np.round(logits / step).astype(np.float32) * np.float32(step)
    logits[:8, rng.random(vocab_size) < 0.5] = -np.inf
    sampling = SamplingBuffers.allocate(rows)
    sampling.temperature[:] = rng.choice([0.5, 1.0, 2.0], rows)
    sampling.top_k[:] = rng.choice([0, 0, 700, 5000], rows)
    sampling.top_p[:] = rng.choice([1.0, 0.05, 0.5, 0.95, 0.999], rows)
    sampling.min_p[:] = rng.choice([0.0, 0.0, 0.02, 0.3], rows)
    sampling.position[:] = np.arange(rows)
    sampling.num_logprobs[:], sampling.logprobs_mode[:] = 0, LogprobsMode.PROCESSED_LOGPROBS
    expected = copy_buffers(sampling)
    sample(logits, sampling)
    sampler.sample(logits, expected)
    differing = sampling.token != expected.token
    assert differing.sum() <= 1, np.flatnonzero(differing)
    # The logprob is the size of the kept set in disguise; a token on its edge more or less hardly shows.
    np.testing.assert_allclose(sampling.logprob[~differing], expected.logprob[~differing], atol=1e-3)


@pytest.mark.parametrize("vocab_size", [1, 2, 17, 64, 300, 4000])
def test_same_uniform_number_gives_the_same_token(vocab_size):
    """Equal but where the random number lies within 1e-6 of an edge, which is rare."""
    rng = np.random.default_rng(vocab_size)
    rows = 60
    logits = random_logits(rng, rows, vocab_size)
    sampling = random_settings(rng, rows)
    sampling.temperature[:] = rng.choice([0.1, 0.7, 1.0, 1.7], rows)
    sample(logits, sampling)
    ambiguous = 0
    for row in range(rows):
        settings = (float(sampling.temperature[row]), int(sampling.top_k[row]), float(sampling.top_p[row]),
                    float(sampling.min_p[row]))  # fmt: skip
        uniform = sampler.uniform(
            int(sampling.seed[row]), int(sampling.choice[row]), int(sampling.position[row])
        )
        tokens = possible_tokens(logits[row], *settings, uniform)
        assert sampling.token[row] in tokens, (row, settings)
        ambiguous += len(tokens) > 1
    assert ambiguous < rows // 10


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (1.5, 20, 0.9, 0.05)],
)
def test_frequencies_follow_the_kept_weights(temperature, top_k, top_p, min_p):
    draws = 500
    logits = (np.random.default_rng(1).standard_normal((1, 40)) * 2).astype(np.float32)
    sampling = SamplingBuffers.allocate(draws)
    sampling.temperature[:], sampling.top_k[:] = temperature, top_k
    sampling.top_p[:], sampling.min_p[:] = top_p, min_p
    sampling.seed[:], sampling.position[:] = 5, np.arange(draws)
    sample(np.repeat(logits, draws, axis=0), sampling, num_threads=32)
    ids, weights = sampler.kept_weights(logits[0], temperature, top_k, top_p, min_p)
    counts = np.bincount(sampling.token, minlength=40)
    assert set(np.flatnonzero(counts)) <= set(ids.tolist())
    probabilities = weights / weights.sum()
    deviation = np.abs(counts[ids] / draws - probabilities)
    assert (deviation < 5 * np.sqrt(probabilities / draws) + 1e-3).all()


def test_bits_depend_on_neither_order_nor_threads_nor_batch():
    """Ten orders of threads and blocks; blocks of 32 to 1024 threads; rows alone, and in a batch whose rows
    are dealt out to fewer and more blocks."""
    rng = np.random.default_rng(7)
    rows, vocab_size = 10, 700
    logits = random_logits(rng, rows, vocab_size)
    settings = random_settings(rng, rows)
    settings.temperature[:8] = 1.0
    rules = random_rules(rng, settings, vocab_size)
    expected = copy_buffers(settings)
    sample(logits, expected)
    for seed in range(1, 11):
        sampling = copy_buffers(settings)
        sample(logits, sampling, seed=seed)
        assert_same_bits(sampling, expected)
    for num_threads, num_blocks in [(32, 1), (96, 20), (256, 3), (1024, 10)]:
        sampling = copy_buffers(settings)
        sample(logits, sampling, num_threads=num_threads, num_blocks=num_blocks)
        assert_same_bits(sampling, expected)
    for row in range(rows):
        alone = one_row(settings, row)
        sample(logits[row : row + 1], alone)
        assert_same_bits(alone, one_row(expected, row))
    del rules


@pytest.mark.parametrize(
    ("position", "uniform", "token"),
    [(14883995, 0.0, 1), (630968, 0.25, 3), (9297664, 0.5, 5), (150078, 0.75, 7)],
)
def test_an_id_owns_the_lower_end_of_its_interval(position, uniform, token):
    """Random numbers on the edge between two of four equal weights; with forbidden ids between them."""
    logits = np.array([[-np.inf, 0.0] * 4], np.float32)
    sampling = SamplingBuffers.allocate(1)
    sampling.temperature[0], sampling.position[0] = 1.0, position
    assert sampler.uniform(0, 0, position) == uniform
    sample(logits, sampling)
    assert sampling.token[0] == sampler.sample_token(logits[0], temperature=1.0, position=position) == token


def one_row(sampling: SamplingBuffers, row: int) -> SamplingBuffers:
    alone = SamplingBuffers.allocate(1)
    for name in SamplingBuffers.__slots__:
        getattr(alone, name)[0] = getattr(sampling, name)[row]
    return alone


def test_padding_rows_are_left_alone():
    """Their logits and settings are whatever an earlier step left."""
    sampling = SamplingBuffers.allocate(4)
    blank_results(sampling)
    sampling.target[1::2] = PADDING_TARGET
    sampling.edits[1::2] = sampling.allowed_mask[1::2] = 8  # no address
    sampling.num_logprobs[:] = 2
    logits = np.zeros((4, 40), np.float32)
    logits[1], logits[2, 5] = np.nan, 1.0
    sample(logits, sampling)
    assert sampling.token.tolist() == [0, -77, 5, -77]
    assert np.isnan(sampling.logprob[1::2]).all() and (sampling.top_ids[1::2] == -77).all()


def test_greedy_takes_the_lowest_id_of_the_largest():
    rng = np.random.default_rng(0)
    for vocab_size in (1, 17, 1024, 1025):
        logits = rng.integers(-3, 4, (10, vocab_size)).astype(np.float32)
        logits[logits == 3] = 2.0
        logits[rng.random(logits.shape) < 0.3] = -np.inf
        logits[:, -1] = rng.integers(-3, 6, 10)
        logits[0] = [-0.0] * (vocab_size // 2) + [0.0] * (vocab_size - vocab_size // 2)
        sampling = SamplingBuffers.allocate(10)
        sample(logits, sampling)
        np.testing.assert_array_equal(sampling.token, logits.argmax(1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab_size", [1, 40, 1025])
def test_rows_that_are_not_finite(vocab_size, temperature):
    logits = np.zeros((6, vocab_size), np.float32)
    logits[0, -1], logits[1, vocab_size // 2], logits[2] = np.nan, np.inf, -np.inf
    logits[3, 1:] = -np.inf
    logits[5, 0] = -np.nan
    sampling = SamplingBuffers.allocate(6)
    sampling.temperature[:], sampling.top_k[:], sampling.num_logprobs[:] = temperature, 3, 1
    sample(logits, sampling)
    assert sampling.token[[0, 1, 2, 3, 5]].tolist() == [-1, -1, -1, 0, -1] and sampling.token[4] >= 0


def test_rows_without_any_token_left():
    logits = np.zeros((5, 50), np.float32)
    logits[3, 3] = np.nan
    sampling = SamplingBuffers.allocate(5)
    sampling.temperature[:] = [0.0, 1.0, 1.0, 1.0, 1.0]
    sampling.num_logprobs[:] = 3
    rules = RowRules(sampling)
    for row in (0, 1, 3):
        rules.allow(row, np.zeros(50, bool))
    rules.allow(2, np.arange(50) < 2)
    rules.edit(2, banned=[0, 1])
    rules.replace(4, np.array([*range(49), np.nan]))
    sample(logits, sampling)
    assert sampling.token.tolist() == [TOKEN_NOTHING_ALLOWED] * 3 + [TOKEN_NOT_FINITE] * 2


def test_a_temperature_that_is_none_gives_no_token():
    sampling = SamplingBuffers.allocate(2)
    sampling.temperature[:] = [np.nan, 1.0]
    sample(np.zeros((2, 20), np.float32), sampling)
    assert sampling.token[0] == TOKEN_NOT_FINITE and sampling.token[1] >= 0


def test_top_p_cuts_ties_by_id_and_top_k_keeps_them():
    rows = 200
    logits = np.zeros((rows, 130), np.float32)
    logits[:, :2] = -np.inf
    sampling = SamplingBuffers.allocate(rows)
    sampling.temperature[:], sampling.top_p[:], sampling.position[:] = 1.0, 0.25, np.arange(rows)
    sample(logits, sampling)
    assert set(sampling.token) == set(range(2, 34))  # 32 of 128 equal weights
    logits[:, 100] = 1.0
    sampling.top_p[:], sampling.top_k[:] = 1.0, 2
    sample(logits, sampling)
    assert len(set(sampling.token)) > 60 and not set(sampling.token) & {0, 1}


def test_ids_beyond_the_vocabulary_are_padding():
    logits = np.zeros((2, 64), np.float32)
    logits[:, 40:] = 100.0
    logits[:, 7] = 5.0
    logits[0, 50] = np.nan
    sampling = SamplingBuffers.allocate(2)
    sample(logits, sampling, vocab_size=40)
    assert sampling.token.tolist() == [7, 7]


def test_more_logprobs_than_buffers_hold():
    sampling = SamplingBuffers.allocate(1)
    sampling.num_logprobs[0] = 1000
    sample(np.arange(200, dtype=np.float32)[None], sampling)
    assert sampling.top_ids[0].tolist() == list(range(199, 135, -1))


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"num_threads": 48}, "size"), ({"num_threads": 2048}, "size"), ({"num_blocks": 0}, "size")],
)
def test_what_the_kernel_does_not_support_is_refused(changed, message):
    sampling = SamplingBuffers.allocate(1)
    with pytest.raises(ValueError, match=message):
        sample(np.zeros((1, 8), np.float32), sampling, **changed)


def test_vocabularies_that_are_too_large_are_refused():
    sampling = SamplingBuffers.allocate(1)
    with pytest.raises(ValueError, match="size"):
        sample(np.zeros((1, 2**19 + 1), np.float32), sampling)
