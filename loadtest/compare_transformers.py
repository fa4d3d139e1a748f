"""Output tokens per second of streamllm against ``transformers.generate``, on the same requests, in one run.

    python loadtest/compare_transformers.py [--http] [--json FILE]

Both run the same weights in float32, greedily, on the same number of threads, and make exactly as many
tokens as each request asks for (end-of-sequence tokens do not stop them). Transformers takes the requests
in order, in static batches padded on the left, each of which runs to its longest output; only tokens asked
for count. streamllm gets all requests at once and runs as many at a time as a batch holds. They take turns;
each round has fresh prompts, so that nothing can be answered from a prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servers import EngineFailure, free_port, server
from tqdm import tqdm

from streamllm.bench.client import Client, RequestFailure, run_load
from streamllm.bench.prompts import Request, make_prompts, output_lengths

if TYPE_CHECKING:
    from streamllm import LLM
    from streamllm.sources.model_files import ModelFiles


def load_transformers(files: ModelFiles) -> Any:
    """The model in Transformers, float32, on the CPU; a GGUF's matrices are dequantised by Transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if files.kind == "folder":
        model = AutoModelForCausalLM.from_pretrained(files.path, dtype=torch.float32)
    else:
        # from_pretrained(gguf_file=...) does the same, but asks for accelerate, which has no part in it.
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        config = AutoConfig.from_pretrained(files.path.parent, gguf_file=files.path.name)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        tensors = load_gguf_checkpoint(str(files.path), return_tensors=True, model_to_load=model)["tensors"]
        missing = set(model.load_state_dict(tensors, strict=False).missing_keys)
        if missing - {"lm_head.weight"} or (missing and not config.tie_word_embeddings):
            raise RuntimeError(f"Transformers found no weights for {', '.join(sorted(missing))}.")
        model.tie_weights()
    return model.eval()


def generate_static(
    model: Any, requests: Sequence[Request], batch_size: int, on_batch: Callable[[int], Any]
) -> list[list[int]]:
    """``transformers.generate`` over static batches in the requests' order; each batch runs to its longest
    output, and what a request did not ask for is cut off. ``on_batch`` gets the number of requests done."""
    import torch
    from transformers import GenerationConfig

    outputs = []
    for start in range(0, len(requests), batch_size):
        batch = requests[start : start + batch_size]
        width = max(len(request.prompt) for request in batch)
        longest = max(request.max_tokens for request in batch)
        ids = torch.zeros((len(batch), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        # On the model, not as an argument: generate() would fill its unset eos_token_id from the model's own.
        model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, max_new_tokens=longest)
        with torch.inference_mode():
            result = model.generate(ids, attention_mask=mask)
        if result.shape[1] != width + longest:
            raise RuntimeError(f"generate() made {result.shape[1] - width} tokens instead of {longest}.")
        new_tokens = result[:, width:].tolist()
        outputs += [row[: request.max_tokens] for row, request in zip(new_tokens, batch, strict=True)]
        on_batch(len(batch))
    return outputs


def generate_offline(llm: LLM, requests: Sequence[Request]) -> list[list[int]]:
    """All requests at once through ``LLM.generate``."""
    from streamllm import SamplingParams

    prompts = [{"prompt_token_ids": request.prompt} for request in requests]
    params = [SamplingParams(temperature=0, max_tokens=r.max_tokens, ignore_eos=True) for r in requests]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def generate_http(base_url: str, requests: Sequence[Request], concurrency: int) -> int:
    """All requests through the server, streaming; returns the number of tokens received."""

    async def run() -> int:
        async with Client(base_url) as client:
            await client.find_model()
            with tqdm(total=len(requests), desc="streams", disable=None) as bar:
                results, _ = await run_load(
                    client, requests, concurrency=concurrency, on_result=lambda result: bar.update()
                )
        for request, result in zip(requests, results, strict=True):
            if result.error is not None:
                raise result.error
            if result.output_tokens != request.max_tokens:
                raise RuntimeError(f"{result.output_tokens} tokens instead of {request.max_tokens}.")
        return sum(result.output_tokens for result in results)

    return asyncio.run(run())


@contextlib.contextmanager
def serve(model: str | None, concurrency: int, threads: int) -> Iterator[str]:
    """A streamllm server of its own process on a free loopback port; yields its address once it is ready."""
    port = free_port()
    command = [sys.executable, "-m", "streamllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", "float32", "--max-num-seqs", str(concurrency)]
    command += ["--threads", str(threads), *(["--model", model] if model else [])]
    url = f"http://127.0.0.1:{port}"
    with (
        tempfile.TemporaryDirectory() as folder,
        server(command, Path(folder, "server.log"), f"{url}/health"),
    ):
        yield url


def make_requests(
    args: argparse.Namespace, encode: Callable[[str], list[int]], round_number: int
) -> list[Request]:
    """The requests of one round (0 warms up): always the same output lengths, fresh prompts."""
    prompts = make_prompts(args.requests, args.input_len, args.seed * 1000 + round_number)
    low, high = args.output_len_range
    lengths = output_lengths(args.requests, low, high, args.seed)
    return [Request(i, encode(prompt), n) for i, (prompt, n) in enumerate(zip(prompts, lengths, strict=True))]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Load everything, run the rounds and return all numbers, ready for JSON."""
    import torch

    from streamllm import LLM
    from streamllm.sources.resolve import resolve

    torch.set_num_threads(args.threads)
    llm = LLM(model=args.model, dtype="float32", max_num_seqs=args.concurrency, threads=args.threads)
    files = resolve(args.model)
    reference = load_transformers(files)
    encode = llm.get_tokenizer().encode

    def run_transformers(requests: Sequence[Request]) -> list[list[int]]:
        with tqdm(total=len(requests), desc="transformers", disable=None) as bar:
            return generate_static(reference, requests, args.concurrency, bar.update)

    with contextlib.ExitStack() as stack:
        contenders: dict[str, Callable[[Sequence[Request]], Any]] = {
            "transformers": run_transformers,
            "streamllm": lambda requests: generate_offline(llm, requests),
        }
        if args.http:
            url = stack.enter_context(serve(args.model, args.concurrency, args.threads))
            contenders["streamllm_http"] = lambda requests: generate_http(url, requests, args.concurrency)
        for run in contenders.values():
            run([Request(r.index, r.prompt, 4) for r in make_requests(args, encode, 0)[: args.concurrency]])
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        identical = 0
        for round_number in range(1, args.rounds + 1):
            requests = make_requests(args, encode, round_number)
            outputs = {}
            for name, run in contenders.items():
                start = time.perf_counter()
                outputs[name] = run(requests)
                seconds[name].append(time.perf_counter() - start)
            pairs = zip(outputs["transformers"], outputs["streamllm"], strict=True)
            identical += sum(a == b for a, b in pairs)

    tokens = sum(request.max_tokens for request in requests)
    rates = {name: [tokens / duration for duration in durations] for name, durations in seconds.items()}
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "model": files.served_name,
        "arguments": {key: value for key, value in vars(args).items() if key != "json"},
        "versions": _versions(),
        "output_tokens_per_round": tokens,
        "prompt_tokens_last_round": sum(len(request.prompt) for request in requests),
        "seconds": seconds,
        "output_tokens_per_second": rates,
        "median_output_tokens_per_second": medians,
        "ratio": {name: rate / medians["transformers"] for name, rate in medians.items()},
        "identical_outputs": {"streamllm": identical, "of": args.rounds * args.requests},
    }


def _versions() -> dict[str, str]:
    import torch
    import transformers

    import streamllm

    modules = (streamllm, torch, transformers)
    return {module.__name__: module.__version__ for module in modules}


def render(result: dict[str, Any]) -> str:
    """The table on the terminal."""
    arguments = result["arguments"]
    low, high = arguments["output_len_range"]
    lines = [
        f"{result['model']}, float32, {arguments['threads']} threads, {arguments['requests']} requests, "
        f"batches of {arguments['concurrency']},",
        f"prompts of about {arguments['input_len']} tokens, outputs of {low} to {high} "
        f"(seed {arguments['seed']}), {result['output_tokens_per_round']} output tokens a round",
        "",
        f"{'':<16}{'output tokens/s':>16}{'ratio':>9}   rounds",
    ]
    for name, rates in result["output_tokens_per_second"].items():
        median, ratio = result["median_output_tokens_per_second"][name], result["ratio"][name]
        rounds = " ".join(f"{rate:.1f}" for rate in rates)
        lines.append(f"{name:<16}{median:>16.1f}{ratio:>8.2f}x   {rounds}")
    identical = result["identical_outputs"]
    lines += ["", f"{identical['streamllm']} of {identical['of']} outputs are the same tokens in both."]
    return "\n".join(lines)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="loadtest/compare_transformers.py",
        description="streamllm against transformers.generate in static batches.",
        allow_abbrev=False,
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    add = parser.add_argument
    add("--model", help="folder or .gguf file, as for streamllm serve (default: the default model)")
    add("--requests", type=int, default=48, help="requests a round (default: %(default)s)")
    add("--concurrency", type=int, default=16, help="batch size of both (default: %(default)s)")
    add("--rounds", type=int, default=3, help="turns of each; medians are reported (default: %(default)s)")
    add(
        "--input-len",
        type=int,
        default=128,
        help="words in a prompt, about a token each (default: %(default)s)",
    )
    add(
        "--output-len-range",
        type=int,
        nargs=2,
        metavar=("LOW", "HIGH"),
        default=(16, 256),
        help="output lengths, drawn uniformly (default: 16 256)",
    )
    add("--threads", type=int, default=cores, help="threads of both (default: the cores, here %(default)s)")
    add("--seed", type=int, default=0, help="draws prompts and lengths (default: %(default)s)")
    add("--http", action="store_true", help="measure streamllm over HTTP too, from a server started here")
    add("--require", type=float, metavar="RATIO", help="exit with 1 if streamllm is not RATIO times as fast")
    add("--json", type=Path, metavar="FILE", help="write all numbers")
    args = parser.parse_args(argv)
    for name in ("requests", "concurrency", "rounds", "input_len", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    low, high = args.output_len_range
    if not 1 <= low <= high:
        parser.error("--output-len-range: LOW must be at least 1 and at most HIGH")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    from streamllm.errors import ConfigError, ModelLoadError

    try:
        result = measure(args)
    except (ConfigError, ModelLoadError, RequestFailure, EngineFailure, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(render(result))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.require is not None and result["ratio"]["streamllm"] < args.require:
        print(f"streamllm is {result['ratio']['streamllm']:.2f} times as fast, not {args.require:g}.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
