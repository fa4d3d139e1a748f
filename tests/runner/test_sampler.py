"""The sampling semantics, and the native sampler as its twin."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.sampling_rows import copy_buffers, native_sample

from streamllm.ops.step_inputs import TOKEN_NOT_FINITE, SamplingBuffers
from streamllm.runner import sampler


def test_philox_matches_the_published_vectors():
    # Random123's known-answer tests (kat_vectors, philox4x32 10).
    assert sampler.philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert sampler.philox4x32((ones,) * 4, (ones, ones)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert sampler.philox4x32((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)) == (
        0xD16CFE09,
        0x94FDCCEB,
        0x5001E420,
        0x24126EA1,
    )


def test_uniform_depends_on_seed_choice_and_position():
    draws = [
        sampler.uniform(seed, choice, position)
        for seed in (0, 1, 2**40)
        for choice in (0, 1)
        for position in range(200)
    ]
    assert len(set(draws)) > 1190
    assert all(0 <= draw < 1 for draw in draws)
    assert 0.45 < np.mean(draws) < 0.55


def test_greedy_takes_the_lowest_of_equals():
    logits = np.array([1, 3, 3, -np.inf], np.float32)
    assert sampler.sample_token(logits, temperature=0.0) == 1
    assert sampler.sample_token(logits, temperature=9e-6) == 1


def test_not_finite_logits_give_no_token():
    sampling = SamplingBuffers.allocate(3)
    for temperature in (0.0, 1.0):
        sampling.temperature[:] = temperature
        bad = np.array([[1, np.nan], [1, np.inf], [-np.inf, -np.inf]], np.float32)
        sampler.sample(bad, sampling)
        assert sampling.token.tolist() == [TOKEN_NOT_FINITE] * 3


def test_filters_keep_the_documented_sets():
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.2, 0.1], np.float32))

    def kept(**filters):
        return sampler.kept_weights(
            logits, **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **filters}
        )[0].tolist()

    assert kept() == [0, 1, 2, 3, 4]
    assert kept(top_k=1) == [1]
    assert kept(top_k=2) == [1, 2, 3]
    assert kept(top_p=0.3) == [1]
    assert kept(top_p=0.5) == [1, 2]
    assert kept(top_p=0.75) == [1, 2, 3]
    assert kept(top_p=0.85) == [0, 1, 2, 3]
    assert kept(min_p=0.4) == [1, 2, 3]
    assert kept(min_p=0.4, top_p=0.7) == [1, 2]
    assert kept(top_p=1e-9) == [1]


def test_draws_follow_the_distribution():
    probabilities = np.array([0.5, 0.25, 0.125, 0.125])
    logits = np.log(probabilities).astype(np.float32)
    tokens = [
        sampler.sample_token(logits, temperature=1.0, seed=7, position=position) for position in range(4000)
    ]
    share = np.bincount(tokens, minlength=4) / len(tokens)
    assert np.abs(share - probabilities).max() < 0.03


def test_logprobs_are_raw_and_ranked():
    logits = np.array([0.0, 2.0, 1.0, 2.0], np.float32)
    logprob, rank, top_ids, top_logprobs = sampler.token_logprobs(logits, 2, 3)
    expected = logits - np.log(np.exp(logits).sum())
    assert rank == 3
    assert top_ids.tolist() == [1, 3, 2]
    assert logprob == pytest.approx(expected[2], abs=1e-6)
    assert top_logprobs == pytest.approx(expected[[1, 3, 2]], abs=1e-6)


def random_sampling(rng: np.random.Generator, rows: int) -> SamplingBuffers:
    sampling = SamplingBuffers.allocate(rows)
    sampling.temperature[:] = rng.choice([0.0, 0.3, 1.0, 1.7], rows)
    sampling.top_k[:] = rng.choice([0, 1, 5, 50], rows)
    sampling.top_p[:] = rng.choice([1.0, 0.95, 0.5, 0.01], rows)
    sampling.min_p[:] = rng.choice([0.0, 0.05, 0.5, 1.0], rows)
    sampling.seed[:] = rng.integers(0, 2**64, rows, dtype=np.uint64)
    sampling.choice[:] = rng.integers(0, 4, rows)
    sampling.position[:] = rng.integers(0, 5000, rows)
    sampling.num_logprobs[:] = rng.choice([-1, 0, 1, 20], rows)
    return sampling


@pytest.mark.parametrize(("vocab_size", "spread"), [(17, 1.0), (1000, 3.0), (49152, 2.0), (5003, 0.0)])
def test_native_sampler_equals_the_reference(vocab_size, spread):
    rng = np.random.default_rng(vocab_size)
    rows = 96 if vocab_size < 10_000 else 48
    logits = (rng.standard_normal((rows, vocab_size)) * spread).astype(np.float32)
    logits[1] = np.round(logits[1])  # many ties
    logits[2, rng.integers(0, vocab_size, vocab_size // 2)] = -np.inf
    logits[3, vocab_size // 2] = np.nan
    logits[4, vocab_size - 1] = np.inf
    logits[5] = -np.inf
    native = random_sampling(rng, rows)
    reference = copy_buffers(native)
    native_sample(logits, vocab_size, native)
    sampler.sample(logits, reference)

    differing = np.flatnonzero(native.token != reference.token)
    # exp's last bit may move an edge of the kept set or of a token's interval past the drawn number.
    assert len(differing) <= rows // 40, (native.token[differing], reference.token[differing])
    assert native.token[3:6].tolist() == [-1, -1, -1]
    same = (native.token == reference.token) & (native.token >= 0)
    for row in np.flatnonzero(same & (native.num_logprobs >= 0)):
        count = min(int(native.num_logprobs[row]), vocab_size)
        assert native.rank[row] == reference.rank[row]
        np.testing.assert_allclose(native.logprob[row], reference.logprob[row], atol=2e-5)
        assert native.top_ids[row, :count].tolist() == reference.top_ids[row, :count].tolist()
        np.testing.assert_allclose(
            native.top_logprobs[row, :count], reference.top_logprobs[row, :count], atol=2e-5
        )


def test_native_sampler_ignores_padding_of_the_vocabulary():
    logits = np.zeros((2, 64), np.float32)
    logits[:, 40:] = 100.0
    logits[:, 7] = 5.0
    logits[0, 50] = np.nan
    sampling = SamplingBuffers.allocate(2)
    native_sample(logits, 40, sampling)
    assert sampling.token.tolist() == [7, 7]
