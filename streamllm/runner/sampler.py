"""Sampling in numpy: what the native kernel is tested against, and the torch backend's sampler.

What happens to a row, in this order (vLLM's; Transformers' too where it has the same step):

1. A logits processor's result takes the place of the model's logits.
2. Bias is added.
3. Repetition penalty over the tokens of prompt and output; then frequency and presence penalty over those of
   the output.
4. Bans: ids that are not allowed, what the grammar forbids, bad words that would be completed now, and EOS
   and stop ids while fewer than ``min_tokens`` tokens are there. They come last so that nothing undoes them.
5. Temperature, min-p, top-k, top-p, then one counter-based random number, so that a seeded request gives the
   same tokens alone, in any batch and after preemption. Greedy rows take the likeliest token of step 4.

Logprobs are those of the model's own logits, whatever the steps did to them, unless ``logprobs_mode`` asks
for the processed ones: of step 4 for greedy rows, else of step 4 over the temperature, with -inf for every
token that step 5 filtered out.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamllm.ops.step_inputs import (
    LARGEST_LOGIT,
    ROW_EDITS,
    TOKEN_NOT_FINITE,
    TOKEN_NOTHING_ALLOWED,
    LogprobsMode,
    SamplingBuffers,
)
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


def _array_at(address: int, count: int, dtype: Any) -> np.ndarray:
    """A view of ``count`` elements of memory that outlives it."""
    if not count:
        return np.empty(0, dtype)
    memory = (ctypes.c_uint8 * (count * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(memory, dtype)


@dataclass(frozen=True)
class RowEdits:
    """What one row adds to its logits and forbids among them; see :data:`ROW_EDITS`.

    Attributes:
        bias_ids, bias_values: int32 and float32 ``[biases]``, ids distinct.
        seen_ids, output_counts: int32 ``[seen]``, distinct tokens that the penalties know of, and how often
            each stands in the output.
        banned_ids: int32 ``[banned]``.
    """

    bias_ids: np.ndarray
    bias_values: np.ndarray
    seen_ids: np.ndarray
    output_counts: np.ndarray
    banned_ids: np.ndarray
    repetition_penalty: np.float32
    frequency_penalty: np.float32
    presence_penalty: np.float32

    @classmethod
    def at(cls, address: int) -> RowEdits:
        """Those of the :data:`ROW_EDITS` at an address; the arrays are views."""
        record = _array_at(address, 1, ROW_EDITS)[0]
        biases, seen, banned = (int(record[name]) for name in ("num_biases", "num_seen", "num_banned"))
        return cls(
            _array_at(int(record["bias_ids"]), biases, np.int32),
            _array_at(int(record["bias_values"]), biases, np.float32),
            _array_at(int(record["seen_ids"]), seen, np.int32),
            _array_at(int(record["output_counts"]), seen, np.int32),
            _array_at(int(record["banned_ids"]), banned, np.int32),
            *(np.float32(record[f"{name}_penalty"]) for name in ("repetition", "frequency", "presence")),
        )


def processed_logits(
    logits: np.ndarray, edits: RowEdits | None = None, masks: Sequence[np.ndarray] = ()
) -> np.ndarray:
    """Float32 ``logits [vocab_size]`` after bias, penalties and bans (steps 2 to 4), as a copy.

    Args:
        masks: uint32 ``[ceil(vocab_size / 32)]`` each; tokens without a 1 in every one are forbidden.
    """
    logits = logits.copy()
    if edits is not None:
        logits[edits.bias_ids] += edits.bias_values
        _penalise(logits, edits)
    for mask in masks:
        logits[np.unpackbits(mask.view(np.uint8), count=len(logits), bitorder="little") == 0] = -np.inf
    if edits is not None:
        logits[edits.banned_ids] = -np.inf
    return logits


def _penalise(logits: np.ndarray, edits: RowEdits) -> None:
    ids, counts = edits.seen_ids, edits.output_counts
    possible = logits[ids] > -np.inf
    ids, counts = ids[possible], counts[possible]
    x, largest = logits[ids], np.float32(LARGEST_LOGIT)
    with np.errstate(over="ignore"):
        x = np.where(x > 0, x / edits.repetition_penalty, x * edits.repetition_penalty)
    x = x.clip(-largest, largest)
    generated = counts > 0
    x[generated] -= edits.frequency_penalty * counts[generated].astype(np.float32)
    x[generated] -= edits.presence_penalty
    logits[ids] = x.clip(-largest, largest)


def kept_weights(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[np.ndarray, np.ndarray]:
    """The ids that may be drawn, ascending, and their weights (probabilities times a constant), float64.

    Weights that float32 cannot hold are no part of it. Ties at the edge of top-k are all kept; top-p keeps
    the shortest prefix, by falling weight and rising id, that reaches its share of what min-p and top-k left.
    """
    weights = np.exp((logits - logits.max()) / np.float32(temperature)).astype(np.float64)
    ids = np.flatnonzero(weights >= max(min_p, np.finfo(np.float32).tiny))
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
    """Draws one id from float32 ``logits [vocab_size]``, of which one is finite and none NaN or +inf.

    Below a temperature of 1e-5 the id is the likeliest, the lowest of equals.
    """
    if _greedy(temperature):
        return int(logits.argmax())
    ids, weights = kept_weights(logits, temperature, top_k, top_p, min_p)
    sums = np.cumsum(weights)
    chosen = int(np.searchsorted(sums, uniform(seed, choice, position) * sums[-1], side="right"))
    return int(ids[min(chosen, len(ids) - 1)])


def _greedy(temperature: float) -> bool:
    return bool(np.float32(temperature) < np.float32(GREEDY_TEMPERATURE))


def kept_logits(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """What processed logprobs are made of: float32 logits over the temperature, -inf for what the filters
    drop; the logits themselves for greedy rows."""
    if _greedy(temperature):
        return logits
    scaled = logits / np.float32(temperature)
    if top_k <= 0 and top_p >= 1 and min_p <= 0:
        return scaled
    ids, _ = kept_weights(logits, temperature, top_k, top_p, min_p)
    kept = np.full_like(scaled, -np.inf)
    kept[ids] = scaled[ids]
    return kept


def token_logprobs(
    logits: np.ndarray, token: int, count: int, *, normalised: bool = True
) -> tuple[float, int, np.ndarray, np.ndarray]:
    """Logprobs of one row's float32 logits, or (not ``normalised``) the logits themselves.

    Returns:
        value and rank (1 + logits that are greater) of ``token``, then ids and values of the ``count``
        likeliest tokens, the lower id first among equals.
    """
    values = logits.astype(np.float64)
    if normalised:
        values = (values - values.max()) - np.log(np.exp(values - values.max()).sum())
    top = np.argsort(-logits, kind="stable")[:count]
    rank = 1 + int((logits > logits[token]).sum())
    return float(values[token]), rank, top.astype(np.int32), values[top].astype(np.float32)


def sample(logits: np.ndarray, sampling: SamplingBuffers) -> None:
    """Samples every row of float32 ``logits [outputs, vocab_size]``; results go into ``sampling``."""
    for row, row_logits in enumerate(logits):
        _sample_row(row, row_logits, sampling)


def _sample_row(row: int, raw: np.ndarray, sampling: SamplingBuffers) -> None:
    if not np.isfinite(raw.max()):
        sampling.token[row] = TOKEN_NOT_FINITE
        return
    if sampling.target[row] >= 0:
        sampling.token[row] = sampling.target[row]
        _report(row, raw, LogprobsMode.RAW_LOGPROBS, sampling)
        return
    logits = _processed_row(row, raw, sampling)
    if not np.isfinite(logits.max()):
        sampling.token[row] = TOKEN_NOTHING_ALLOWED if logits.max() == -np.inf else TOKEN_NOT_FINITE
        return
    temperature, top_k = float(sampling.temperature[row]), int(sampling.top_k[row])
    top_p, min_p = float(sampling.top_p[row]), float(sampling.min_p[row])
    sampling.token[row] = sample_token(
        logits,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=int(sampling.seed[row]),
        choice=int(sampling.choice[row]),
        position=int(sampling.position[row]),
    )
    if sampling.num_logprobs[row] >= 0:
        mode = LogprobsMode(int(sampling.logprobs_mode[row]))
        if mode in (LogprobsMode.PROCESSED_LOGPROBS, LogprobsMode.PROCESSED_LOGITS):
            raw = kept_logits(logits, temperature, top_k, top_p, min_p)
        _report(row, raw, mode, sampling)


def _processed_row(row: int, raw: np.ndarray, sampling: SamplingBuffers) -> np.ndarray:
    """Steps 1 to 4 for one row of the buffers."""
    vocab_size = len(raw)
    replacement, edits = int(sampling.replacement[row]), int(sampling.edits[row])
    masks = [
        _array_at(int(address), -(-vocab_size // 32), np.uint32)
        for address in (sampling.allowed_mask[row], sampling.grammar_mask[row])
        if address
    ]
    return processed_logits(
        _array_at(replacement, vocab_size, np.float32) if replacement else raw,
        RowEdits.at(edits) if edits else None,
        masks,
    )


def _report(row: int, logits: np.ndarray, mode: LogprobsMode, sampling: SamplingBuffers) -> None:
    logprob, rank, top_ids, top_logprobs = token_logprobs(
        logits,
        int(sampling.token[row]),
        max(int(sampling.num_logprobs[row]), 0),
        normalised=mode in (LogprobsMode.RAW_LOGPROBS, LogprobsMode.PROCESSED_LOGPROBS),
    )
    sampling.logprob[row], sampling.rank[row] = logprob, rank
    sampling.top_ids[row, : len(top_ids)] = top_ids
    sampling.top_logprobs[row, : len(top_ids)] = top_logprobs
