"""Rows for a sampler of the GPU path, and their comparison with the definition in numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from helpers.sampling_rows import RowRules, copy_buffers

from streamllm.ops.step_inputs import SamplingBuffers
from streamllm.runner import sampler

Sampler = Callable[[np.ndarray, SamplingBuffers], None]
"""(float32 logits ``[rows, vocab_size]``, buffers with host addresses, which take the results)."""

OUTPUTS = ("token", "logprob", "rank", "top_ids", "top_logprobs")


def random_logits(rng: np.random.Generator, rows: int, vocab_size: int) -> np.ndarray:
    """Of all sorts: flat, peaked, with ties, zeros of both signs, -inf; each with something finite."""
    scale = rng.choice([0.0, 0.3, 2.0, 6.0, 1e30], (rows, 1), p=[0.1, 0.2, 0.4, 0.25, 0.05])
    logits = (rng.standard_normal((rows, vocab_size)) * scale).astype(np.float32)
    kind = rng.random((rows, 1))
    dice = rng.random((rows, vocab_size))
    logits[(dice < 0.3) & (kind < 0.6)] = -np.inf
    logits[(dice > 0.7) & (kind > 0.4)] = 1.25
    logits[(dice > 0.45) & (dice < 0.5)] = -0.0
    logits[(dice >= 0.5) & (dice < 0.55)] = 0.0
    logits[:, rng.integers(0, vocab_size)] = 1.25
    return logits


def random_settings(rng: np.random.Generator, rows: int, max_logprobs: int = 64) -> SamplingBuffers:
    """Temperatures, filters, seeds and logprobs of every kind; results pre-filled with what none is."""
    sampling = SamplingBuffers.allocate(rows)
    sampling.temperature[:] = rng.choice([0.0, 1e-5, 0.1, 0.7, 1.0, 1.0, 1.7, 10.0, np.inf], rows)
    sampling.top_k[:] = rng.choice([0, 0, 0, 1, 2, 5, 50, 100_000], rows)
    sampling.top_p[:] = rng.choice([1.0, 1.0, 0.0, 1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 2.0**-24], rows)
    sampling.min_p[:] = rng.choice([0.0, 0.0, 0.01, 0.3, 1.0], rows)
    sampling.seed[:] = rng.integers(0, 2**64, rows, dtype=np.uint64)
    sampling.choice[:] = rng.integers(0, 20, rows)
    sampling.position[:] = rng.integers(0, 2**31 - 1, rows)
    sampling.num_logprobs[:] = rng.choice([-1, 0, 1, 5, 20, max_logprobs], rows)
    sampling.logprobs_mode[:] = rng.integers(0, 4, rows)
    blank_results(sampling)
    return sampling


def random_rules(rng: np.random.Generator, sampling: SamplingBuffers, vocab_size: int) -> RowRules:
    """A random selection of everything that a row can be given, with ids outside the vocabulary too."""
    rules = RowRules(sampling)

    def some_ids() -> list[int]:
        count = int(rng.integers(0, min(vocab_size, 200) + 1))
        return (rng.choice(vocab_size + 3, count, replace=False) - 1).tolist()

    for row in range(len(sampling.token)):
        if rng.random() < 0.6:
            rules.edit(
                row,
                bias={i: float(rng.uniform(-100, 100)) for i in some_ids()[:20]},
                seen={i: int(rng.integers(0, 4)) for i in some_ids()},
                penalties=(
                    float(rng.choice([1.0, 1.3, 0.5, 1e-38, 3e38])),
                    float(rng.choice([0.0, 0.7, -1.5])),
                    float(rng.choice([0.0, -2.0, 1.1])),
                ),
                banned=some_ids() if rng.random() < 0.5 else [],
            )
        if rng.random() < 0.3:
            rules.allow(row, rng.random(vocab_size) < rng.choice([0.0, 0.02, 0.5, 1.0]))
        if rng.random() < 0.3:
            rules.allow(row, rng.random(vocab_size) < 0.7, grammar=True)
        if rng.random() < 0.3:
            rules.replace(row, rng.standard_normal(vocab_size) * 3)
        if rng.random() < 0.1:
            sampling.target[row] = rng.integers(0, vocab_size)
    return rules


def blank_results(sampling: SamplingBuffers) -> None:
    """Fills results with what no sampler writes."""
    for name in OUTPUTS:
        array = getattr(sampling, name)
        array[...] = np.nan if array.dtype == np.float32 else -77


def edits_in_vocabulary(edits: sampler.RowEdits, vocab_size: int) -> sampler.RowEdits:
    """The edits without ids that are none."""
    lists = (edits.bias_ids, edits.seen_ids, edits.banned_ids)
    bias, seen, banned = ((ids >= 0) & (ids < vocab_size) for ids in lists)
    return sampler.RowEdits(
        edits.bias_ids[bias],
        edits.bias_values[bias],
        edits.seen_ids[seen],
        edits.output_counts[seen],
        edits.banned_ids[banned],
        edits.repetition_penalty,
        edits.frequency_penalty,
        edits.presence_penalty,
    )


def defined(logits: np.ndarray, sampling: SamplingBuffers) -> SamplingBuffers:
    """What the definition makes of the rows."""
    expected = copy_buffers(sampling)
    records, read, vocab_size = {}, sampler.RowEdits.at, logits.shape[1]
    for address in set(sampling.edits[sampling.edits != 0].tolist()):
        records[address] = edits_in_vocabulary(read(address), vocab_size)
    sampler.RowEdits.at = staticmethod(records.__getitem__)
    try:
        with np.errstate(invalid="ignore", over="ignore", divide="ignore", under="ignore"):
            sampler.sample(logits, expected)
    finally:
        sampler.RowEdits.at = read
    return expected


def check_against_definition(sample: Sampler, logits: np.ndarray, sampling: SamplingBuffers) -> np.ndarray:
    """Samples, and compares all results with the definition's.

    Tokens may differ in few rows, where exp's last bit moved the edge of a kept set or of a token's interval
    past the random number. Logprobs of processed rows are the kept set's size in disguise: a tie at its edge
    more or less, and they differ by as much.

    Returns:
        the rows whose tokens differ.
    """
    expected = defined(logits, sampling)
    sample(logits, sampling)
    vocab_size = logits.shape[1]
    same = sampling.token == expected.token
    failed = (sampling.token < 0) | (expected.token < 0)
    np.testing.assert_array_equal(sampling.token[failed], expected.token[failed])
    assert (~same).sum() <= len(logits) // 40, (sampling.token[~same], expected.token[~same])
    edges = 0
    for row in np.flatnonzero(same):
        wanted = int(sampling.num_logprobs[row])
        reported = sampling.token[row] >= 0 and (wanted >= 0 or sampling.target[row] >= 0)
        if not reported:
            for name in OUTPUTS[1:]:
                assert_untouched(getattr(sampling, name)[row])
            continue
        wanted = max(wanted, 0)
        count = min(wanted, vocab_size)
        np.testing.assert_array_equal(sampling.top_ids[row, count:wanted], -1)
        np.testing.assert_array_equal(sampling.top_logprobs[row, count:wanted], -np.inf)
        assert_untouched(sampling.top_ids[row, wanted:])
        assert_untouched(sampling.top_logprobs[row, wanted:])
        values = {name: (getattr(sampling, name)[row], getattr(expected, name)[row]) for name in OUTPUTS}
        if sampling.target[row] < 0 and sampling.logprobs_mode[row] % 2 and not _same_kept_set(values, count):
            edges += 1
            continue
        assert values["rank"][0] == values["rank"][1], row
        assert_close(*values["logprob"])
        np.testing.assert_array_equal(values["top_ids"][0][:count], values["top_ids"][1][:count])
        assert_close(values["top_logprobs"][0][:count], values["top_logprobs"][1][:count])
    assert edges <= len(logits) // 20
    return np.flatnonzero(~same)


def _same_kept_set(values: dict[str, tuple[np.ndarray, np.ndarray]], count: int) -> bool:
    ours, theirs = (np.isfinite(side[:count]) for side in values["top_logprobs"])
    logprob, expected = values["logprob"]
    return bool((ours == theirs).all() and np.isclose(logprob, expected, atol=2e-5, rtol=1e-6))


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, atol=2e-5, rtol=1e-6)


def assert_untouched(values: np.ndarray) -> None:
    blank = np.isnan(values) if values.dtype == np.float32 else values == -77
    assert blank.all()


def possible_tokens(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> set[int]:
    """The token that the definition draws from one row, and those that it would draw if top-p, min-p or the
    random number were off by 1e-6."""
    tokens = set()
    for error in (-1e-6, 0.0, 1e-6):
        ids, weights = sampler.kept_weights(
            logits, temperature, top_k, min(top_p * (1 + error), 1.0), min(min_p * (1 - error), 1.0)
        )
        sums = np.cumsum(weights)
        for nudge in (-1e-6, 0.0, 1e-6):
            at = int(np.searchsorted(sums, (uniform + nudge) * sums[-1], side="right"))
            tokens.add(int(ids[min(at, len(ids) - 1)]))
    return tokens
