"""The runs of ``streamllm bench serve``: each server in turn, round after round."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from streamllm.bench.arrivals import Ramp, arrival_times
from streamllm.bench.client import Client, RequestFailure, Result, calibrate, run_load
from streamllm.bench.datasets import input_length, make_requests
from streamllm.bench.prompts import Request, TokensPerWord, prompts_of_lengths
from streamllm.bench.report import render, summarise
from streamllm.bench.results import ResultFile
from streamllm.errors import StreamLLMError

READY_INTERVAL = 1.0
"""Seconds between looks at a server that does not answer yet."""

NOT_READY = ("cannot connect", "connection broken", "timeout", "HTTP 502", "HTTP 503")
"""Failures of a server that is still starting; any other would come again."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run over all requests on one server.

    Attributes:
        url, model: what was measured.
        round_number: 0, 1, ...
        seed: what the round's requests and arrivals were drawn with.
        results: in the order of the requests.
        duration: seconds.
        summary: see :func:`streamllm.bench.report.summarise`.
    """

    url: str
    model: str
    round_number: int
    seed: int
    results: Sequence[Result]
    duration: float
    summary: dict[str, Any]


async def measure_servers(
    options: argparse.Namespace, urls: Sequence[str], result_file: ResultFile
) -> list[Measurement]:
    """Run all rounds, print a report of each run and write what is to be kept of it.

    Raises:
        StreamLLMError: a server does not answer or refuses the first request, or a result cannot be written.
        ConfigError: the data set cannot be read.
    """
    measurements = []
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(make_client(url, options)) for url in urls]
        contacts = [await _contact(url, client, options) for url, client in zip(urls, clients, strict=True)]
        for round_number in range(options.rounds):
            seed = options.seed + round_number
            # The first server's count, so that all get the same requests.
            requests = make_requests(options, contacts[0], seed=seed)
            for url, client in zip(urls, clients, strict=True):
                if round_number == 0:
                    await _warm_up(url, client, requests, options)
                if len(urls) * options.rounds > 1:
                    print(f"\n{url}, round {round_number + 1} of {options.rounds}")
                results, duration = await _run(client, requests, options, seed)
                summary = _summarise(results, duration, options)
                print(_render(summary, options), flush=True)
                found = Measurement(url, client.model or "", round_number, seed, results, duration, summary)
                result_file.write(found)
                measurements.append(found)
    return measurements


def make_client(url: str, options: argparse.Namespace) -> Client:
    """The client that the flags ask for."""
    is_chat = options.endpoint.endswith("/chat/completions")
    body: dict[str, Any] = {}
    for name in ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"):
        if (value := getattr(options, name)) is not None:
            body[name] = value
    if options.logprobs is not None:
        top = {"top_logprobs": options.logprobs}
        body |= {"logprobs": True, **top} if is_chat else {"logprobs": options.logprobs}
    return Client(
        url,
        model=options.served_model_name or options.model,
        endpoint="chat" if is_chat else "completions",
        path=options.endpoint,
        api_key=options.api_key,
        headers=dict(options.header),
        temperature=options.temperature,
        ignore_eos=options.ignore_eos,
        extra_body=body | options.extra_body,
        request_id_prefix=options.request_id_prefix,
        timeout=options.timeout,
    )


async def _contact(url: str, client: Client, options: argparse.Namespace) -> TokensPerWord:
    """Find the model and how the server counts, waiting for it as long as the flags allow."""
    deadline = time.perf_counter() + options.ready_check_timeout_sec
    while True:
        try:
            await client.find_model()
            return await calibrate(client, input_length(options), options.seed)
        except RequestFailure as failure:
            if failure.kind not in NOT_READY or time.perf_counter() >= deadline:
                raise StreamLLMError(f"{url}: {failure}") from None
        await asyncio.sleep(READY_INTERVAL)


async def _warm_up(
    url: str, client: Client, requests: Sequence[Request], options: argparse.Namespace
) -> None:
    """As many requests as the flags say, as long as the first ones but of other words, so that no prefix
    cache will know the measured ones."""
    like = requests[: options.num_warmups]
    if not like:
        return
    prompts = prompts_of_lengths([len(str(each.prompt).split()) for each in like], f"warmups {options.seed}")
    warmups = [
        Request(each.index, prompt, each.max_tokens) for each, prompt in zip(like, prompts, strict=True)
    ]
    results, _ = await run_load(client, warmups, concurrency=options.max_concurrency)
    for result in results:
        if result.error is not None:
            raise StreamLLMError(f"{url}: a warm-up request failed: {result.error}")


async def _run(
    client: Client, requests: Sequence[Request], options: argparse.Namespace, seed: int
) -> tuple[list[Result], float]:
    finished: list[Result] = []
    start = time.perf_counter()
    with tqdm(total=len(requests), desc="requests", disable=options.disable_tqdm or None) as bar:

        def on_result(result: Result) -> None:
            finished.append(result)
            bar.update()

        try:
            return await run_load(
                client,
                requests,
                concurrency=options.max_concurrency,
                arrivals=_arrivals(len(requests), options, seed),
                on_result=on_result,
            )
        except asyncio.CancelledError:  # Ctrl-C
            bar.close()
            if finished:
                summary = _summarise(finished, time.perf_counter() - start, options)
                print(f"interrupted after {len(finished)} of {len(requests)} requests")
                print(_render(summary, options), flush=True)
            raise


def _arrivals(count: int, options: argparse.Namespace, seed: int) -> list[float] | None:
    rate: float | Ramp | None = options.request_rate
    if options.ramp_up_strategy is not None:
        rate = Ramp(options.ramp_up_strategy, options.ramp_up_start_rps, options.ramp_up_end_rps)
    if rate is None:
        return None
    return arrival_times(count, rate, seed, burstiness=options.burstiness, burst_size=options.burst_size)


def _summarise(results: Sequence[Result], duration: float, options: argparse.Namespace) -> dict[str, Any]:
    return summarise(results, duration, percentiles=options.metric_percentiles, objectives=options.objectives)


def _render(summary: dict[str, Any], options: argparse.Namespace) -> str:
    return render(
        summary,
        concurrency=options.max_concurrency,
        request_rate=options.request_rate,
        metrics=options.percentile_metrics,
    )
