"""``streamllm bench latency``: how long one batch takes from its prompts to its last token, over and over.

Flags, lines and JSON fields are those of vLLM's benchmark of the same name. Prompts differ in their first
tokens from all others, of earlier iterations too, so that the prefix cache, which stays as it is in service,
has none of them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from streamllm.bench.arguments import count, positive_count
from streamllm.bench.offline import add_engine_arguments, check_length, json_results
from streamllm.cli.arguments import engine_settings
from streamllm.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from streamllm.llm import LLM
    from streamllm.llm_inputs import Prompt
    from streamllm.llm_tokenizer import LLMTokenizer

PERCENTAGES = (10, 25, 50, 75, 90, 99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("batch").add_argument
    add("--input-len", type=positive_count, default=32, metavar="N",
        help="tokens of each prompt. Default: %(default)s.")  # fmt: skip
    add("--output-len", type=positive_count, default=128, metavar="N",
        help="tokens to generate for each, whatever the model says. Default: %(default)s.")  # fmt: skip
    add("--batch-size", type=positive_count, default=8, metavar="N",
        help="prompts that are asked at once. Default: %(default)s.")  # fmt: skip
    add("--n", type=positive_count, default=1, metavar="N",
        help="choices of each prompt, or beams. Default: %(default)s.")  # fmt: skip
    add("--use-beam-search", action="store_true", help="search with --n beams instead of sampling")
    add("--num-iters-warmup", type=count, default=10, metavar="N",
        help="iterations before those that count. Default: %(default)s.")  # fmt: skip
    add("--num-iters", type=positive_count, default=30, metavar="N",
        help="iterations that count. Default: %(default)s.")  # fmt: skip
    add("--disable-detokenize", action="store_true", help="make no text of the tokens")
    add_engine_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, and print.

    Raises:
        ConfigError: flags do not fit together, or sequences would be too long.
        ModelLoadError: the model cannot be run.
        StreamLLMError: the results cannot be written.
    """
    if options.use_beam_search and options.disable_detokenize:
        raise ConfigError("--disable-detokenize does not go with --use-beam-search: beams come as texts.")
    with json_results(options.output_json) as write:
        from streamllm.llm import LLM

        with LLM(**engine_settings(options)) as llm:
            lengths = options.input_len, options.output_len
            check_length("--input-len and --output-len", *lengths, llm.stats().max_model_len)
            latencies = _measure(llm, options)
        results = _results(latencies, options)
        print(f"Avg latency: {results['avg_latency']:.6f} seconds")
        for percentage, latency in results["percentiles"].items():
            print(f"{percentage}% percentile latency: {latency:.6f} seconds")
        print(f"Output throughput: {results['output_tokens_per_second']:.2f} tokens/s")
        write(results)
    return 0


def _measure(llm: LLM, options: argparse.Namespace) -> list[float]:
    """Seconds of each iteration that counts."""
    from tqdm import trange

    batches = _batches(llm.get_tokenizer(), options)
    for _ in trange(options.num_iters_warmup, desc="Warm-up iterations", disable=None):
        _generate(llm, next(batches), options)
    latencies = []
    for _ in trange(options.num_iters, desc="Iterations", disable=None):
        batch = next(batches)
        start = time.perf_counter()
        _generate(llm, batch, options)
        latencies.append(time.perf_counter() - start)
    return latencies


def _generate(llm: LLM, batch: list[Prompt], options: argparse.Namespace) -> None:
    from streamllm.sampling_params import BeamSearchParams, SamplingParams

    max_tokens = options.output_len
    if options.use_beam_search:
        try:
            beams = BeamSearchParams(beam_width=options.n, max_tokens=max_tokens, ignore_eos=True)
            llm.beam_search(batch, beams, use_tqdm=False)
        except InvalidRequestError as error:
            raise (error.renamed("--n") if error.param == "beam_width" else error) from None
        return
    params = SamplingParams(
        n=options.n,
        temperature=1.0,
        ignore_eos=True,
        max_tokens=max_tokens,
        detokenize=not options.disable_detokenize,
    )
    llm.generate(batch, params, use_tqdm=False)


def _batches(tokenizer: LLMTokenizer, options: argparse.Namespace) -> Iterator[list[Prompt]]:
    """A batch for each iteration, as token ids."""
    from streamllm.bench.prompts import make_prompts

    size, length = options.batch_size, options.input_len
    num_prompts = size * (options.num_iters_warmup + options.num_iters)
    # A word is a token or more, so that there are enough tokens to cut from.
    texts = make_prompts(num_prompts, length, getattr(options, "seed", 0))
    for first in range(0, num_prompts, size):
        yield [tokenizer.encode(text)[:length] for text in texts[first : first + size]]


def _results(latencies: list[float], options: argparse.Namespace) -> dict[str, Any]:
    import numpy as np

    percentiles = np.percentile(latencies, PERCENTAGES).tolist()
    average = float(np.mean(latencies))
    return {
        "avg_latency": average,
        "latencies": latencies,
        "percentiles": {str(p): value for p, value in zip(PERCENTAGES, percentiles, strict=True)},
        "output_tokens_per_second": options.batch_size * options.n * options.output_len / average,
    }
