"""Load test of any OpenAI-compatible server: latency percentiles, throughput, and a check of every answer.

    python loadtest/run.py --base-url http://127.0.0.1:8000 --concurrency 32 --requests 96 \\
        --input-len 128 --output-len 128

Exit code 0 if every request succeeded (and, with ``--verify``, every comparison held), else 1; 2 for a flag
that makes no sense.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm
from verify import check_idle, compare_alone

from streamllm.bench.arguments import positive_count, positive_number, temperature
from streamllm.bench.arrivals import arrival_times
from streamllm.bench.client import PATHS, Client, RequestFailure, Result, calibrate, run_lean, run_load
from streamllm.bench.plots import plot
from streamllm.bench.prompts import Request, make_prompts, output_lengths
from streamllm.bench.report import render, request_rows, summarise

DEFAULT_CONCURRENCY = 32


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="loadtest/run.py", description="Load test of any OpenAI-compatible server.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000", help="the server's address (default: %(default)s)")
    add("--model", help="model to ask for (default: the first one that the server lists)")
    add("--api-key", help="sent as a bearer token")
    add("--endpoint", choices=sorted(PATHS), default="completions", help="default: %(default)s")
    add("--requests", type=positive_count, default=96, help="how many in all (default: %(default)s)")
    add(
        "--concurrency",
        type=positive_count,
        help=f"requests under way at most (default: {DEFAULT_CONCURRENCY}; no limit with --request-rate)",
    )
    add(
        "--request-rate",
        type=positive_number,
        metavar="R",
        help="Poisson arrivals, R requests a second on average (default: a closed loop)",
    )
    add("--input-len", type=positive_count, default=128, help="prompt tokens (default: %(default)s)")
    add("--output-len", type=positive_count, default=128, help="tokens to generate (default: %(default)s)")
    add(
        "--output-len-range",
        type=positive_count,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="draw each output length uniformly from LOW to HIGH instead",
    )
    add("--temperature", type=temperature, default=0.0, help="0 is greedy (default: %(default)s)")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for the full output length; servers without vLLM's ignore_eos need --no-ignore-eos",
    )
    add(
        "--seed",
        type=int,
        default=0,
        help="draws prompts, lengths and arrivals; change it between runs, or a prefix cache may answer "
        "(default: %(default)s)",
    )
    add(
        "--timeout",
        type=positive_number,
        default=600.0,
        metavar="S",
        help="seconds that one request may take (default: %(default)s)",
    )
    add(
        "--verify",
        action="store_true",
        help="compare every stream with the same request alone, and require an idle server at the end",
    )
    add("--json", type=Path, metavar="FILE", help="write all numbers, request by request")
    add("--png", type=Path, metavar="FILE", help="write a picture (needs matplotlib)")
    args = parser.parse_args(argv)
    if args.verify and args.temperature != 0:
        parser.error("--verify compares greedy answers: it needs --temperature 0")
    if args.output_len_range and args.output_len_range[0] > args.output_len_range[1]:
        parser.error("--output-len-range: LOW must be at most HIGH")
    if args.concurrency is None and args.request_rate is None:
        args.concurrency = DEFAULT_CONCURRENCY
    for path in (args.json, args.png):
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"{path}: the folder does not exist")
    if args.png is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--png needs matplotlib: pip install matplotlib")
    return args


async def make_requests(client: Client, args: argparse.Namespace) -> list[Request]:
    num_words = (await calibrate(client, args.input_len, args.seed)).words_for(args.input_len)
    prompts = make_prompts(args.requests, num_words, args.seed)
    low, high = args.output_len_range or (args.output_len, args.output_len)
    lengths = output_lengths(args.requests, low, high, args.seed)
    return [
        Request(index, prompt, length)
        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


async def run(args: argparse.Namespace) -> int:
    async with Client(
        args.base_url,
        model=args.model,
        endpoint=args.endpoint,
        api_key=args.api_key,
        temperature=args.temperature,
        ignore_eos=args.ignore_eos,
        timeout=args.timeout,
    ) as client:
        model = await client.find_model()
        requests = await make_requests(client, args)
        arrivals = arrival_times(args.requests, args.request_rate, args.seed) if args.request_rate else None
        with tqdm(total=len(requests), desc="requests", disable=None) as bar:
            results, duration = await run_load(
                client,
                requests,
                concurrency=args.concurrency,
                arrivals=arrivals,
                on_result=lambda result: bar.update(),
            )
        summary = summarise(results, duration)
        print(render(summary, concurrency=args.concurrency, request_rate=args.request_rate))
        verified = await verify(client, requests, results) if args.verify else None

    if args.json is not None:
        document = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "arguments": {
                key: value for key, value in vars(args).items() if key not in ("api_key", "json", "png")
            },
            "model": model,
            **summary,
            "verify": verified,
            "requests": request_rows(results),
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    if args.png is not None:
        plot(args.png, results, summary, f"{model}, {len(requests)} requests")
    sound = verified is None or not (verified["differences"] or verified["leaks"])
    return 0 if sound and summary["failed"] == 0 else 1


async def verify(client: Client, requests: list[Request], results: list[Result]) -> dict[str, Any]:
    """Run the checks of ``--verify``, print what they found and return it for the JSON file."""
    leaks = [await check_idle(client)]
    with tqdm(total=len(requests), desc="alone", disable=None) as bar:
        differences = await compare_alone(client, requests, results, on_result=lambda result: bar.update())
    leaks.append(await check_idle(client))
    found = [leak for leak in dict.fromkeys(leaks) if leak is not None]
    for difference in differences:
        where = f" at character {difference['at']}" if "at" in difference else ""
        print(
            f"DIFFERENCE request {difference['index']}, {difference['field']}{where}: "
            f"streamed {_excerpt(difference['streamed'], difference)}, "
            f"alone {_excerpt(difference['alone'], difference)}"
        )
    for leak in found:
        print(f"LEAK {leak}")
    compared = sum(result.error is None for result in results)
    print(
        f"Verified: {compared - len(differences)} of {len(requests)} streams equal the same request alone; "
        f"server {'idle' if not found else 'not idle'} afterwards."
    )
    return {"compared": compared, "differences": differences, "leaks": found}


def _excerpt(value: Any, difference: dict[str, Any]) -> str:
    """A few characters around the place where two texts part."""
    if not isinstance(value, str) or "at" not in difference:
        return repr(value)
    start = max(difference["at"] - 20, 0)
    return repr(value[start : difference["at"] + 20])


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        return run_lean(run(args))
    except (RequestFailure, httpx.InvalidURL) as failure:
        print(f"error: {args.base_url}: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
