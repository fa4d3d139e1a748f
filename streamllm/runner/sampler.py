"""Sampling in numpy: what the native kernel is tested against, and the torch backend's sampler.

One pass a row: temperature, min-p, top-k, top-p, then one counter-based random number, so that a seeded
request gives the same tokens alone, in any batch and after preemption.
"""

from __future__ import annotations

import numpy as np

from streamllm.ops.step_inputs import SamplingBuffers
from streamllm.sampling_params import GREEDY_TEMPERATURE

_MASK32 = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & _MASK32,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & _MASK32,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int) -> float:
    """The random number in [0, 1), a multiple of 2^-24, of output token ``position`` of a choice."""
    words = philox4x32((position, choice, 0, 0), (seed & _MASK32, seed >> 32 & _MASK32))
    return (words[0] >> 8) * 2.0**-24


def kept_weights(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[np.ndarray, np.ndarray]:
    """The ids that may be drawn, ascending, and their weights (probabilities times a constant), float64.

    Ties at the edge of top-k are all kept; top-p keeps the shortest prefix, by falling weight and rising id,
    that reaches its share of what min-p and top-k left.
    """
    weights = np.exp((logits - logits.max()) / np.float32(temperature)).astype(np.float64)
    ids = np.flatnonzero(weights >= min_p)
    if 0 < top_k < len(ids):
        kept = weights[ids]
        ids = ids[kept >= np.partition(kept, -top_k)[-top_k]]
    if top_p < 1:
        order = ids[np.argsort(-weights[ids], kind="stable")]
        sums = np.cumsum(weights[order])
        count = int(np.searchsorted(sums, float(np.float32(top_p)) * sums[-1])) + 1
        ids = np.sort(order[:count])
    return ids, weights[ids]


def sample_token(
    logits: np.ndarray,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    choice: int = 0,
    position: int = 0,
) -> int:
    """Draws one id from float32 ``logits [vocab_size]``: -1 if they hold NaN or +inf, or nothing but -inf.

    Below a temperature of 1e-5 the id is the likeliest, the lowest of equals.
    """
    if not np.isfinite(logits.max()):
        return -1
    if np.float32(temperature) < np.float32(GREEDY_TEMPERATURE):
        return int(logits.argmax())
    ids, weights = kept_weights(logits, temperature, top_k, top_p, min_p)
    sums = np.cumsum(weights)
    chosen = int(np.searchsorted(sums, uniform(seed, choice, position) * sums[-1], side="right"))
    return int(ids[min(chosen, len(ids) - 1)])


def token_logprobs(logits: np.ndarray, token: int, count: int) -> tuple[float, int, np.ndarray, np.ndarray]:
    """Raw logprobs (temperature 1, nothing filtered) of one row.

    Returns:
        logprob and rank (1 + logits that are greater) of ``token``, then ids and logprobs of the ``count``
        likeliest tokens, the lower id first among equals.
    """
    exact = logits.astype(np.float64)
    logprobs = (exact - exact.max()) - np.log(np.exp(exact - exact.max()).sum())
    top = np.argsort(-logits, kind="stable")[:count]
    rank = 1 + int((logits > logits[token]).sum())
    return float(logprobs[token]), rank, top.astype(np.int32), logprobs[top].astype(np.float32)


def sample(logits: np.ndarray, sampling: SamplingBuffers) -> None:
    """Samples every row of float32 ``logits [outputs, vocab_size]``; results go into ``sampling``."""
    for row, row_logits in enumerate(logits):
        token = sample_token(
            row_logits,
            temperature=float(sampling.temperature[row]),
            top_k=int(sampling.top_k[row]),
            top_p=float(sampling.top_p[row]),
            min_p=float(sampling.min_p[row]),
            seed=int(sampling.seed[row]),
            choice=int(sampling.choice[row]),
            position=int(sampling.position[row]),
        )
        sampling.token[row] = token
        count = int(sampling.num_logprobs[row])
        if token >= 0 and count >= 0:
            logprob, rank, top_ids, top_logprobs = token_logprobs(row_logits, token, count)
            sampling.logprob[row], sampling.rank[row] = logprob, rank
            sampling.top_ids[row, : len(top_ids)] = top_ids
            sampling.top_logprobs[row, : len(top_ids)] = top_logprobs
