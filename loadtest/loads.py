"""The loads of the comparison: requests of an exact number of tokens, and what is measured on them.

Every load of every round has prompts of its own, so that no engine finds them in a cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from servers import EngineFailure

from streamllm.bench.client import Result
from streamllm.bench.prompts import Request, make_prompts, output_lengths
from streamllm.bench.report import summarise

LONG_PROMPT_TOKENS = 2000
SHARED_TOKENS = 1500
SHARED_TAIL_TOKENS = 32
SHARED_REQUESTS = 8
SHARED_OUTPUT_TOKENS = 16
MIXED_OUTPUT_RANGE = (16, 256)
KINDS = {
    "streams": "prompts of --input-len tokens, --output-len out, at each number of --streams",
    "long-prompt": "time to the first token of one prompt of 2,000 tokens",
    "shared-prefix": "8 prompts with the same first 1,500 tokens at once: time to the last first token",
    "mixed-lengths": "prompts of --input-len tokens, 16 to 256 out, at the largest number of --streams",
    "offline": "streamllm over HTTP against its LLM.generate, the same requests",
}

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Load:
    """Requests with token ids as prompts, and how many of them are under way at once at most.

    Attributes:
        name: the ``kind``, and the number of streams where that is a choice: ``streams-8``.
        kind: one of :data:`KINDS`.
    """

    name: str
    kind: str
    requests: list[Request]
    concurrency: int

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and output."""
        return max(len(request.prompt) + request.max_tokens for request in self.requests)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Which loads to make.

    Attributes:
        kinds: of :data:`KINDS`.
        streams: numbers of streams; the largest is that of the kinds that have one number only.
        requests_per_stream: a load at ``n`` streams has ``n`` times as many requests, and at least three.
        input_len, output_len: tokens of prompts and outputs, where the kind does not say otherwise.
        seed: draws words and lengths.
    """

    kinds: Collection[str]
    streams: Sequence[int]
    requests_per_stream: int
    input_len: int
    output_len: int
    seed: int


def make_loads(options: LoadOptions, encode: Encode, round_number: int) -> list[Load]:
    """The loads of one round. A function of its arguments: every engine gets the same requests.

    Args:
        encode: text to token ids, without special tokens.
    """
    most = max(options.streams)
    first_seed = (options.seed * 1000 + round_number) * 100
    seeds = iter(range(first_seed, first_seed + 100))
    loads = []
    for kind in KINDS:
        if kind not in options.kinds:
            continue
        if kind == "long-prompt":
            (prompt,) = make_token_prompts(1, LONG_PROMPT_TOKENS, encode, next(seeds))
            loads.append(Load(kind, kind, [Request(0, prompt, 1)], 1))
        elif kind == "shared-prefix":
            loads.append(_shared_prefix(encode, next(seeds), next(seeds)))
        else:
            for number in options.streams if kind == "streams" else (most,):
                requests = _distinct_requests(kind, number, options, encode, next(seeds))
                loads.append(Load(f"{kind}-{number}", kind, requests, number))
    return loads


def _distinct_requests(
    kind: str, number: int, options: LoadOptions, encode: Encode, seed: int
) -> list[Request]:
    count = max(options.requests_per_stream * number, 3)
    prompts = make_token_prompts(count, options.input_len, encode, seed)
    low, high = MIXED_OUTPUT_RANGE if kind == "mixed-lengths" else (options.output_len, options.output_len)
    # The same lengths in every round, that rounds may be compared.
    lengths = output_lengths(count, low, high, options.seed)
    return [Request(i, p, n) for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))]


def make_warm_up(options: LoadOptions, encode: Encode) -> list[Load]:
    """A few tokens at each number of streams, for buffers and kernels that are made on first use."""
    return [
        Load(
            f"warm-up-{number}",
            "warm-up",
            [
                Request(index, prompt, 8)
                for index, prompt in enumerate(make_token_prompts(number, 32, encode, -number))
            ],
            number,
        )
        for number in options.streams
    ]


def make_token_prompts(count: int, num_tokens: int, encode: Encode, seed: int) -> list[list[int]]:
    """``count`` prompts of exactly ``num_tokens`` tokens, whole words, no two with the same beginning."""
    return [
        _encode_exactly(_first_words(prompt.split(), num_tokens, encode), num_tokens, encode)
        for prompt in make_prompts(count, num_tokens, seed)
    ]


def _shared_prefix(encode: Encode, prefix_seed: int, tail_seed: int) -> Load:
    (prefix,) = make_prompts(1, SHARED_TOKENS, prefix_seed)
    common = _first_words(prefix.split(), SHARED_TOKENS, encode)
    requests = []
    for index, tail in enumerate(make_prompts(SHARED_REQUESTS, SHARED_TAIL_TOKENS, tail_seed)):
        words = common + _first_words(tail.split(), SHARED_TAIL_TOKENS, encode, inside=True)
        ids = _encode_exactly(words, SHARED_TOKENS + SHARED_TAIL_TOKENS, encode)
        requests.append(Request(index, ids, SHARED_OUTPUT_TOKENS))
    return Load("shared-prefix", "shared-prefix", requests, SHARED_REQUESTS)


def _first_words(words: Sequence[str], num_tokens: int, encode: Encode, inside: bool = False) -> list[str]:
    """As many of ``words`` as make ``num_tokens`` tokens; those that would go past it are left out, and the
    rest filled with a word of one token. ``inside``: they follow other words."""
    chosen: list[str] = []
    total = 0
    for word in [*words, *["time"] * num_tokens]:
        size = len(encode(f" {word}" if chosen or inside else word))
        if total + size <= num_tokens:
            chosen.append(word)
            total += size
    return chosen


def _encode_exactly(words: Sequence[str], num_tokens: int, encode: Encode) -> list[int]:
    ids = encode(" ".join(words))
    if len(ids) != num_tokens:
        raise ValueError(f"the tokenizer does not cut at spaces: {len(ids)} tokens instead of {num_tokens}")
    return ids


def check(load: Load, results: Sequence[Result]) -> None:
    """That every request did the work asked for: all prompt tokens, and exactly as many output tokens.

    Raises:
        EngineFailure: one failed, or an engine counts other tokens, or none.
    """
    for request, result in zip(load.requests, results, strict=True):
        if result.error is not None:
            raise EngineFailure(f"{load.name}: request {request.index} failed: {result.error}")
        wanted = len(request.prompt), request.max_tokens
        counted = result.prompt_tokens, result.completion_tokens
        if counted != wanted:
            raise EngineFailure(
                f"{load.name}: request {request.index} was to have {wanted[0]} prompt and {wanted[1]} output "
                f"tokens; the engine counted {counted[0]} and {counted[1]}"
            )


def figures(
    load: Load, results: Sequence[Result], duration: float, client_cpu: float, cores: int
) -> dict[str, float]:
    """What the tables show of one run of ``load``.

    Args:
        duration: seconds from the first sending to the last end.
        client_cpu: seconds of processor time that the load generator took meanwhile.
        cores: cores that engine and load generator share.

    Returns:
        ``tokens_per_s`` (output tokens); ``ttft_s``, the median, and ``last_ttft_s``, from the start of the
        load; ``itl_ms``, the median over the requests of the mean gap per token, which holds too where an
        engine sends several tokens in one event; ``tokens_per_s_alone``, the rate with the load generator's
        share of the time taken out: its processor time, spread over all cores. Those that the engine does
        not tell are left out.
    """
    tokens = sum(result.output_tokens for result in results)
    values = {
        "tokens_per_s": tokens / duration,
        "tokens_per_s_alone": tokens / (duration - client_cpu / cores),
    }
    ttfts = [result.ttft for result in results if result.ttft is not None]
    if ttfts:
        values["ttft_s"] = statistics.median(ttfts)
        values["last_ttft_s"] = max(r.due + r.ttft for r in results if r.ttft is not None)
    gaps = [result.tpot for result in results if result.tpot is not None]
    if gaps:
        values["itl_ms"] = 1e3 * statistics.median(gaps)
    return values


def record(
    load: Load, results: Sequence[Result], duration: float, client_cpu: float, cores: int
) -> dict[str, Any]:
    """One run of ``load`` for the JSON file: the figures of :func:`figures` and the full summary."""
    return {
        "load": load.name,
        "kind": load.kind,
        "streams": load.concurrency,
        "figures": figures(load, results, duration, client_cpu, cores),
        "client_cpu_s": client_cpu,
        "summary": summarise(results, duration),
    }
