from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from native_reference import address, philox_uniform, run, stride

from streamllm import _native


@pytest.fixture(params=_native.instruction_sets())
def instruction_set(request):
    before = _native.instruction_set()
    _native.set_instruction_set(request.param)
    yield request.param
    _native.set_instruction_set(before)


@dataclass
class Row:
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    position: int = 0
    num_logprobs: int = -1
    logprobs_mode: int = 0
    edits: int = 0
    allowed_mask: int = 0
    grammar_mask: int = 0
    replacement: int = 0
    target: int = -1


@dataclass
class Sampled:
    token: np.ndarray
    logprob: np.ndarray
    rank: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


def sample(logits: np.ndarray, rows: list[Row], max_logprobs: int = 20, threads: int = 2) -> Sampled:
    count, vocab_size = logits.shape
    columns = {
        "temperature": np.float32,
        "top_k": np.int32,
        "top_p": np.float32,
        "min_p": np.float32,
        "seed": np.uint64,
        "choice": np.int32,
        "position": np.int32,
        "num_logprobs": np.int32,
        "logprobs_mode": np.int32,
        "edits": np.int64,
        "allowed_mask": np.int64,
        "grammar_mask": np.int64,
        "replacement": np.int64,
        "target": np.int32,
    }
    inputs = {name: np.array([getattr(row, name) for row in rows], dtype) for name, dtype in columns.items()}
    result = Sampled(
        token=np.full(count, -7, np.int32),
        logprob=np.full(count, 7, np.float32),
        rank=np.full(count, -7, np.int32),
        top_ids=np.full((count, max_logprobs), -7, np.int32),
        top_logprobs=np.full((count, max_logprobs), 7, np.float32),
    )
    run(
        lambda plan: plan.sample(
            address(logits),
            stride(logits),
            vocab_size,
            **{name: address(array) for name, array in inputs.items()},
            **{name: address(array) for name, array in vars(result).items()},
            max_logprobs=max_logprobs,
        ),
        outputs=count,
        threads=threads,
    )
    return result


def kept_weights(logits: np.ndarray, row: Row) -> tuple[np.ndarray, np.ndarray]:
    """Ids (rising) and float64 weights that the filters leave."""
    x = logits.astype(np.float64)
    weights = np.exp((x - x.max()) / np.float64(np.float32(row.temperature)))
    ids = np.flatnonzero(weights >= row.min_p)
    if 0 < row.top_k < len(ids):
        ids = ids[weights[ids] >= np.sort(weights[ids])[-row.top_k]]
    if row.top_p < 1:
        order = ids[np.lexsort((ids, -weights[ids]))]
        sums = np.cumsum(weights[order])
        reached = sums >= row.top_p * weights[ids].sum()
        ids = np.sort(order[: int(np.argmax(reached)) + 1])
    return ids, weights[ids]


def expected_tokens(logits: np.ndarray, row: Row) -> set[int]:
    """The token that the numbers say, or two where they are within float32's error of an edge."""
    if row.temperature < 1e-5:
        return {int(np.argmax(logits))}
    u = philox_uniform(row.seed, row.choice, row.position)
    tokens = set()
    for error in (-1e-6, 0.0, 1e-6):
        near = replace(row, top_p=min(row.top_p * (1 + error), 1.0), min_p=min(row.min_p * (1 - error), 1.0))
        ids, weights = kept_weights(logits, near)
        sums = np.cumsum(weights)
        for nudge in (-1e-6, 0.0, 1e-6):
            at = int(np.searchsorted(sums, (u + nudge) * sums[-1], side="right"))
            tokens.add(int(ids[min(at, len(ids) - 1)]))
    return tokens


def random_row(rng: np.random.Generator) -> Row:
    return Row(
        temperature=float(rng.choice([0.0, 0.1, 0.7, 1.0, 1.0, 1.7, 10.0])),
        top_k=int(rng.choice([0, 0, 0, 1, 2, 5, 50, 100_000])),
        top_p=float(rng.choice([1.0, 1.0, 1e-9, 0.1, 0.5, 0.9, 0.95, 0.999])),
        min_p=float(rng.choice([0.0, 0.0, 0.01, 0.3, 1.0])),
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        choice=int(rng.integers(0, 20)),
        position=int(rng.integers(0, 2**31)),
    )


def random_logits(rng: np.random.Generator, count: int, vocab_size: int) -> np.ndarray:
    scale = rng.choice([0.0, 0.3, 2.0, 6.0], (count, 1))
    logits = (rng.standard_normal((count, vocab_size)) * scale).astype(np.float32)
    logits[rng.random((count, vocab_size)) < 0.2] = -np.inf
    logits[rng.random((count, vocab_size)) < 0.2] = 1.25  # ties
    logits[:, rng.integers(0, vocab_size)] = 1.25  # something finite
    return logits


@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 63, 64, 65, 300, 5000])
def test_same_uniform_number_gives_the_same_token_as_numpy(instruction_set, vocab_size):
    rng = np.random.default_rng(vocab_size)
    logits = random_logits(rng, 150, vocab_size)
    rows = [random_row(rng) for _ in range(150)]
    edges = 0
    for values, row, token in zip(logits, rows, sample(logits, rows).token, strict=True):
        expected = expected_tokens(values, row)
        assert token in expected, row
        edges += len(expected) > 1
    assert edges < 15  # of 150


@pytest.mark.parametrize(
    "row",
    [
        Row(temperature=1.0),
        Row(temperature=0.7, top_k=5),
        Row(temperature=1.3, top_p=0.8),
        Row(temperature=1.0, min_p=0.2),
        Row(temperature=1.5, top_k=20, top_p=0.9, min_p=0.05),
    ],
)
def test_frequencies_follow_the_kept_weights(row):
    logits = np.random.default_rng(1).standard_normal((1, 40)).astype(np.float32) * 2
    draws = 20_000
    rows = [Row(row.temperature, row.top_k, row.top_p, row.min_p, seed=5, position=i) for i in range(draws)]
    tokens = sample(np.repeat(logits, draws, axis=0), rows).token
    ids, weights = kept_weights(logits[0], row)
    counts = np.bincount(tokens, minlength=40)
    assert set(np.flatnonzero(counts)) <= set(ids.tolist())
    probabilities = weights / weights.sum()
    deviation = np.abs(counts[ids] / draws - probabilities)
    assert (deviation < 5 * np.sqrt(probabilities / draws) + 1e-3).all()


def test_greedy_takes_the_lowest_id_of_the_largest(instruction_set):
    rng = np.random.default_rng(0)
    for vocab_size in (1, 17, 1000, 1024, 1025, 3000):
        logits = rng.integers(-3, 4, (50, vocab_size)).astype(np.float32)
        logits[rng.random(logits.shape) < 0.3] = -np.inf
        logits[:, -1] = rng.integers(-3, 6, 50)
        np.testing.assert_array_equal(sample(logits, [Row()] * 50).token, logits.argmax(1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab_size", [1, 40, 1025])
def test_rows_that_are_not_finite_give_minus_one(instruction_set, vocab_size, temperature):
    logits = np.zeros((5, vocab_size), np.float32)
    logits[0, -1], logits[1, vocab_size // 2], logits[2] = np.nan, np.inf, -np.inf
    logits[3, 1:] = -np.inf
    result = sample(logits, [Row(temperature=temperature, top_k=3, num_logprobs=1)] * 5)
    assert result.token[:4].tolist() == [-1, -1, -1, 0] and result.token[4] >= 0


def test_top_p_cuts_ties_by_id_and_top_k_keeps_them(instruction_set):
    logits = np.zeros((300, 130), np.float32)
    logits[:, :2] = -np.inf
    rows = [Row(temperature=1.0, top_p=0.25, position=i) for i in range(300)]
    assert set(sample(logits, rows).token) == set(range(2, 34))  # 32 of 128 equal weights
    logits[:, 100] = 1.0
    rows = [Row(temperature=1.0, top_k=2, position=i) for i in range(300)]
    tokens = sample(logits, rows).token
    assert len(set(tokens)) > 60 and 0 not in tokens and 1 not in tokens


@pytest.mark.parametrize("vocab_size", [1, 5, 64, 700, 4000])
def test_logprobs(instruction_set, vocab_size):
    rng = np.random.default_rng(vocab_size)
    logits = random_logits(rng, 60, vocab_size)
    rows = [random_row(rng) for _ in range(60)]
    for i, row in enumerate(rows):
        row.num_logprobs = [-1, 0, 1, 5, 20, 90][i % 6]
    result = sample(logits, rows, max_logprobs=90)
    for i, row in enumerate(rows):
        if row.num_logprobs < 0:
            assert result.logprob[i] == 7 and result.rank[i] == -7
            continue
        x = logits[i].astype(np.float64)
        logprobs = x - x.max() - np.log(np.exp(x - x.max()).sum())
        token = result.token[i]
        np.testing.assert_allclose(result.logprob[i], logprobs[token], atol=2e-6, rtol=1e-6)
        assert result.rank[i] == 1 + (logits[i] > logits[i, token]).sum()
        order = np.lexsort((np.arange(vocab_size), -logits[i]))[: row.num_logprobs]
        np.testing.assert_array_equal(result.top_ids[i, : len(order)], order)
        np.testing.assert_allclose(
            result.top_logprobs[i, : len(order)], logprobs[order], atol=2e-6, rtol=1e-6
        )
        assert (result.top_ids[i, len(order) : row.num_logprobs] == -1).all()
        assert (result.top_ids[i, row.num_logprobs :] == -7).all()


def test_row_does_not_depend_on_the_batch(instruction_set):
    rng = np.random.default_rng(4)
    logits = random_logits(rng, 40, 2000)
    rows = [random_row(rng) for _ in range(40)]
    for row in rows:
        row.num_logprobs = 5
    together = sample(logits, rows, threads=4)
    for i in rng.permutation(40)[:15]:
        alone = sample(logits[i : i + 1], [rows[i]], threads=1)
        for name, values in vars(alone).items():
            np.testing.assert_array_equal(values[0], getattr(together, name)[i])


def test_seed_choice_and_position_each_change_the_draw():
    logits = np.zeros((4, 50_000), np.float32)
    row = Row(temperature=1.0, seed=2**40 + 1, choice=1, position=1)
    changed = [row, replace(row, seed=1), replace(row, choice=0), replace(row, position=0)]
    assert len(set(sample(logits, changed).token)) == 4
    u = philox_uniform(row.seed, row.choice, row.position)
    assert sample(logits[:1], [row]).token[0] == int(u * 50_000)


def test_too_many_logprobs_are_refused():
    with pytest.raises(ValueError, match="num_logprobs must be at most max_logprobs = 4, not 5"):
        sample(np.zeros((1, 8), np.float32), [Row(num_logprobs=5)], max_logprobs=4)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, words):
    """Vectors of the Random123 distribution (kat_vectors)."""
    assert _native.philox4x32(*counter, *key) == words
