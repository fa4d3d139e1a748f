"""What a long prompt does to others: the gaps in a stream beside it, and how soon a short prompt gets in.

One client decodes; another sends a prompt of ``--chunks`` chunks; a third then sends a short prompt.
Reported: the decoder's longest gap against the median step with a chunk in it, and the steps from the short
prompt's arrival to its first token.

    python loadtest/fairness.py [--chunks 50] [--budget 64] [--model M] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from streamllm import AsyncEngine, SamplingParams
from streamllm.config import EngineConfig
from streamllm.engine.stream import RequestStream
from streamllm.sampling_params import RequestOutputKind


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="as of streamllm serve; the default model if left out")
    parser.add_argument("--chunks", type=int, default=50, help="chunks that the long prompt is cut into")
    parser.add_argument("--budget", type=int, default=64, help="tokens a step")
    parser.add_argument("--short", type=int, default=60, help="tokens of the short prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def params(max_tokens: int | None) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )


async def token_times(stream: RequestStream) -> list[float]:
    """``time.monotonic()`` of each output of a stream."""
    return [time.monotonic() async for _ in stream]


async def one_round(engine: AsyncEngine, options: argparse.Namespace, seed: int) -> dict[str, float]:
    rng = random.Random(seed)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(100, engine.tokenizer.vocab_size) for _ in range(length)]

    decoding = await engine.add_request(prompt(8), params(None))
    await anext(decoding)
    decoder = asyncio.create_task(token_times(decoding))
    began = time.monotonic()
    # The decoder takes one token of each step's budget.
    prefilling = await engine.add_request(prompt(options.chunks * (options.budget - 1)), params(1))
    long = asyncio.create_task(token_times(prefilling))
    # No event tells when the long prompt has been scheduled.
    while engine.stats().num_running < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    steps_before = engine.stats().num_steps
    short = await engine.add_request(prompt(options.short), params(1))
    await anext(short)
    short_steps = engine.stats().num_steps - steps_before
    (long_end,) = await long
    decoding.abort()
    times = await decoder
    gaps = [b - a for a, b in itertools.pairwise(times) if began <= a and b <= long_end]
    return {
        "longest_gap_ms": 1e3 * max(gaps),
        "median_gap_ms": 1e3 * statistics.median(gaps),
        "short_first_token_steps": short_steps,
    }


async def measure(engine: AsyncEngine, options: argparse.Namespace) -> list[dict[str, float]]:
    await engine.start()
    await one_round(engine, options, seed=-1)  # touches every page of the KV pool that the rounds will use
    rounds = [await one_round(engine, options, seed) for seed in range(options.rounds)]
    await engine.stop()
    return rounds


def main() -> None:
    options = arguments()
    engine = AsyncEngine.from_config(EngineConfig(model=options.model, max_num_batched_tokens=options.budget))
    rounds = asyncio.run(measure(engine, options))
    result: dict[str, Any] = {
        "chunks": options.chunks,
        "budget": options.budget,
        "rounds": rounds,
        "longest_over_median_gap": statistics.median(
            r["longest_gap_ms"] / r["median_gap_ms"] for r in rounds
        ),
        "short_first_token_steps": max(r["short_first_token_steps"] for r in rounds),
    }
    for number, values in enumerate(rounds):
        print(f"round {number}: " + ", ".join(f"{name} {value:.1f}" for name, value in values.items()))
    print(
        f"longest gap / median gap beside {options.chunks} chunks: {result['longest_over_median_gap']:.2f}; "
        f"a short prompt's first token after at most {result['short_first_token_steps']} steps"
    )
    if options.json:
        options.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
