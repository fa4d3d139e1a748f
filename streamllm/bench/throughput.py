"""``streamllm bench throughput``: how fast a whole data set is answered that is there from the start.

Flags, lines and JSON fields are those of vLLM's benchmark of the same name. Time counts from the texts of the
prompts to the last token: tokenising is part of it.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamllm.bench.arguments import positive_count
from streamllm.bench.datasets import add_dataset_arguments, check_dataset, input_length, make_requests
from streamllm.bench.offline import add_engine_arguments, check_length, json_results
from streamllm.cli.arguments import engine_settings
from streamllm.config import EngineConfig

if TYPE_CHECKING:
    from streamllm.bench.prompts import Request, TokensPerWord
    from streamllm.engine.async_engine import AsyncEngine
    from streamllm.llm_tokenizer import LLMTokenizer
    from streamllm.sampling_params import SamplingParams
    from streamllm.text.tokenizer import Tokenizer

    AnyTokenizer = LLMTokenizer | Tokenizer


@dataclass(frozen=True, slots=True)
class Totals:
    """What a run took and gave.

    Attributes:
        seconds: from the first prompt to the last token.
        output_tokens: of all choices.
    """

    seconds: float
    num_requests: int
    prompt_tokens: int
    output_tokens: int

    @property
    def num_tokens(self) -> int:
        """Prompts' and outputs' together."""
        return self.prompt_tokens + self.output_tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("requests").add_argument
    add("--n", type=positive_count, default=1, metavar="N",
        help="choices of each prompt. Default: %(default)s.")  # fmt: skip
    add("--async-engine", action="store_true",
        help="take a stream for each request, as the server does, instead of LLM.generate")  # fmt: skip
    add("--disable-detokenize", action="store_true", help="make no text of the tokens")
    add_dataset_arguments(parser)
    # The data set's seed is the engine's too.
    add_engine_arguments(parser, without=("seed",))


def run(options: argparse.Namespace) -> int:
    """Measure, and print.

    Raises:
        ConfigError: flags do not fit together, the data set cannot be used, or a sequence would be too long.
        ModelLoadError: the model cannot be run.
        StreamLLMError: the results cannot be written.
    """
    check_dataset(options)
    settings = {"disable_log_stats": True, **engine_settings(options), "seed": options.seed}
    with json_results(options.output_json) as write:
        measure = _with_async_engine if options.async_engine else _with_llm
        totals = measure(options, settings)
        seconds = totals.seconds
        print(
            f"Throughput: {totals.num_requests / seconds:.2f} requests/s, "
            f"{totals.num_tokens / seconds:.2f} total tokens/s, "
            f"{totals.output_tokens / seconds:.2f} output tokens/s"
        )
        print(f"Total num prompt tokens:  {totals.prompt_tokens}")
        print(f"Total num output tokens:  {totals.output_tokens}")
        write(_results(totals))
    return 0


def _results(totals: Totals) -> dict[str, Any]:
    return {
        "elapsed_time": totals.seconds,
        "num_requests": totals.num_requests,
        "total_num_tokens": totals.num_tokens,
        "total_prompt_tokens": totals.prompt_tokens,
        "total_output_tokens": totals.output_tokens,
        "requests_per_second": totals.num_requests / totals.seconds,
        "tokens_per_second": totals.num_tokens / totals.seconds,
        "output_tokens_per_second": totals.output_tokens / totals.seconds,
    }


def _with_llm(options: argparse.Namespace, settings: dict[str, Any]) -> Totals:
    from streamllm.llm import LLM

    with LLM(**settings) as llm:
        requests = _requests(options, llm.get_tokenizer(), llm.stats().max_model_len)
        params = [_params(request, options) for request in requests]
        start = time.perf_counter()
        outputs = llm.generate([request.prompt for request in requests], params)
        seconds = time.perf_counter() - start
    return Totals(
        seconds,
        len(outputs),
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(choice.token_ids) for output in outputs for choice in output.outputs),
    )


def _with_async_engine(options: argparse.Namespace, settings: dict[str, Any]) -> Totals:
    from streamllm.engine.async_engine import AsyncEngine

    engine = AsyncEngine.from_config(EngineConfig(**settings))

    async def measure() -> Totals:
        await engine.start()
        try:
            requests = _requests(options, engine.tokenizer, engine.max_model_len)
            return await _stream_all(engine, requests, [_params(each, options) for each in requests])
        finally:
            await engine.stop()

    return asyncio.run(measure())


async def _stream_all(
    engine: AsyncEngine, requests: Sequence[Request], params: Sequence[SamplingParams]
) -> Totals:
    """All requests at once, each read token by token."""
    from tqdm import tqdm

    from streamllm.llm_batch import together

    prompt_tokens = output_tokens = 0
    with tqdm(total=len(requests), desc="Requests", unit="request", disable=None) as bar:

        async def read(request: Request, own: SamplingParams) -> None:
            nonlocal prompt_tokens, output_tokens
            num_prompt_tokens = 0
            async for output in engine.generate(request.prompt, own):
                num_prompt_tokens = len(output.prompt_token_ids)
                output_tokens += sum(len(choice.token_ids) for choice in output.outputs)
            prompt_tokens += num_prompt_tokens
            bar.update()

        start = time.perf_counter()
        await together(read(request, own) for request, own in zip(requests, params, strict=True))
        seconds = time.perf_counter() - start
    return Totals(seconds, len(requests), prompt_tokens, output_tokens)


def _params(request: Request, options: argparse.Namespace) -> SamplingParams:
    from streamllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        n=options.n,
        temperature=1.0,
        ignore_eos=True,
        max_tokens=request.max_tokens,
        detokenize=not options.disable_detokenize,
        output_kind=RequestOutputKind.DELTA,
    )


# -- the data set ------------------------------------------------------------------------------------------


def _requests(options: argparse.Namespace, tokenizer: AnyTokenizer, max_model_len: int) -> list[Request]:
    """The data set's requests, each of which the engine can answer in full."""
    from tqdm import tqdm

    typical = input_length(options)
    is_exact = options.dataset_name in ("random", "prefix_repetition") and options.random_range_ratio == 0
    if is_exact:  # found before prompts are made that would take all memory
        check_length("each prompt", typical, 1, max_model_len)
    requests = make_requests(options, tokens_per_word(tokenizer, typical))
    for request in tqdm(requests, desc="Checking prompts", disable=None, leave=False):
        num_tokens = len(tokenizer.encode(request.prompt))
        check_length(f"request {request.index}", num_tokens, request.max_tokens, max_model_len)
    return requests


def tokens_per_word(tokenizer: AnyTokenizer, num_tokens: int) -> TokensPerWord:
    """How a tokenizer counts words, measured on a short text and on one of about ``num_tokens``."""
    from streamllm.bench.prompts import TokensPerWord, make_prompts

    few, many = 4, max(num_tokens, 1000)
    short, long = (len(tokenizer.encode(make_prompts(1, words, seed=0)[0])) for words in (few, many))
    return TokensPerWord.from_probes((few, short), (many, long))
