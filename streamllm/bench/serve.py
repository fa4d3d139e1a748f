"""``streamllm bench serve``: measures OpenAI-compatible servers, under the flags of ``vllm bench serve``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamllm.bench.arguments import count, number, positive_count, positive_number, rate, temperature
from streamllm.bench.datasets import add_dataset_arguments, check_dataset
from streamllm.bench.goodput import parse_goodput
from streamllm.cli.config_file import add_config_argument
from streamllm.errors import ConfigError, StreamLLMError

if TYPE_CHECKING:
    from streamllm.bench.measure import Measurement

METRICS = ("ttft", "tpot", "itl", "e2el")

_ENDPOINTS = {
    "vllm": "/v1/completions",
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_argument(parser)
    _add_server_arguments(parser)
    _add_load_arguments(parser)
    add_dataset_arguments(parser)
    _add_sampling_arguments(parser)
    _add_report_arguments(parser)


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    # fmt: off
    add("--backend", choices=tuple(_ENDPOINTS), default="vllm",
        help="openai-chat asks /v1/chat/completions, the others /v1/completions. Default: %(default)s.")
    add("--base-url", nargs="+", action="extend", metavar="URL",
        help="the server; several are measured in turn, round by round, and compared")
    add("--host", default="127.0.0.1", help="of the server, without --base-url. Default: %(default)s.")
    add("--port", type=int, default=8000, metavar="N", help="Default: %(default)s.")
    add("--endpoint", metavar="PATH", help="the path to ask, if not the backend's")
    add("--header", nargs="+", action="extend", type=_key_value, default=[], metavar="KEY=VALUE",
        help="sent with every request")
    add("--api-key", metavar="KEY", help="sent as a bearer token. Default: $OPENAI_API_KEY.")
    add("--model", metavar="NAME", help="the model to ask for. Default: the first one that the server lists.")
    add("--served-model-name", metavar="NAME", help="the model's name in requests, in place of --model")
    add("--tokenizer", metavar="NAME", help="not needed: the server itself says how it counts a prompt")
    add("--trust-remote-code", action="store_true", help="not needed: no model is loaded here")
    add("--ready-check-timeout-sec", type=count, default=0, metavar="S",
        help="seconds to wait for a server that is still starting. Default: 0.")
    add("--timeout", type=positive_number, default=21600.0, metavar="S",
        help="seconds that one request may take. Default: 6 hours.")
    # fmt: on


def _add_load_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("load").add_argument
    # fmt: off
    add("--max-concurrency", type=positive_count, metavar="N",
        help="requests under way at most. Default: no limit.")
    add("--request-rate", type=rate, default=math.inf, metavar="R",
        help="requests a second that arrive on average; inf, the default: each as soon as --max-concurrency "
        "lets it. A request that waits for its turn counts its wait.")
    add("--burstiness", type=positive_number, default=1.0, metavar="B",
        help="shape of the gamma-distributed gaps between arrivals: 1 is a Poisson process, less is "
        "burstier, more is steadier. Default: 1.")
    add("--burst-size", type=positive_count, default=1, metavar="N",
        help="N requests arrive together, at --request-rate on average. Default: 1.")
    add("--ramp-up-strategy", choices=("linear", "exponential"),
        help="let the request rate go from --ramp-up-start-rps to --ramp-up-end-rps over the requests")
    add("--ramp-up-start-rps", type=positive_number, metavar="R", help="requests a second at the beginning")
    add("--ramp-up-end-rps", type=positive_number, metavar="R", help="requests a second at the end")
    add("--num-warmups", type=count, default=0, metavar="N",
        help="requests before the measurement, as long as its first ones, of other words. Default: 0.")
    add("--rounds", type=positive_count, default=1, metavar="N",
        help="repeat everything with the next seeds, all servers in each round. A file's prompts come again: "
        "a prefix cache may then answer. Default: 1.")
    add("--request-id-prefix", metavar="TEXT", help="send X-Request-Id: this and the request's number")
    # fmt: on


def _add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sampling").add_argument
    # fmt: off
    add("--ignore-eos", action="store_true",
        help="generate exactly the output length; an extension of vLLM's that other servers may refuse")
    add("--temperature", type=temperature, default=0.0, metavar="X", help="0 is greedy. Default: 0.")
    for name in ("top-p", "min-p", "frequency-penalty", "presence-penalty", "repetition-penalty"):
        add(f"--{name}", type=number, metavar="X", help=f"{name.replace('-', '_')} of the requests")
    add("--top-k", type=int, metavar="N", help="top_k of the requests")
    add("--logprobs", type=count, metavar="N", help="ask for so many logprobs a token")
    add("--extra-body", type=_json_object, default={}, metavar="JSON", help="further fields of the requests")
    # fmt: on


def _add_report_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("report").add_argument
    # fmt: off
    add("--percentile-metrics", type=_metrics, default=METRICS[:3], metavar="NAMES",
        help=f"latencies to report, of {','.join(METRICS)}. Default: ttft,tpot,itl.")
    add("--metric-percentiles", type=_percentiles, default=(99.0,), metavar="P",
        help="their percentiles, such as 50,90,99. Default: 99.")
    add("--goodput", nargs="+", action="extend", default=[], metavar="METRIC:MS",
        help="report requests a second that met all of these, such as ttft:200 tpot:50 e2el:2000")
    add("--save-result", action="store_true", help="write a JSON file with vLLM's keys")
    add("--save-detailed", action="store_true", help="the same with times and texts of every request")
    add("--append-result", action="store_true", help="add the result to the file, a line each")
    add("--result-dir", metavar="DIR", help="where it goes; made if it is not there. Default: here.")
    add("--result-filename", metavar="FILE", help="its name. Default: made of label, load, model and time.")
    add("--metadata", nargs="+", action="extend", type=_key_value, default=[], metavar="KEY=VALUE",
        help="added to the result")
    add("--label", metavar="TEXT", help="beginning of the result's name. Default: the backend's.")
    add("--plot-timeline", action="store_true", help="write a picture beside the result, as --png")
    add("--png", type=Path, metavar="FILE",
        help="write a picture: histograms of the latencies and a timeline, or several runs compared")
    add("--disable-tqdm", action="store_true", help="no progress bar (outside a terminal there is none)")
    # fmt: on


def run(options: argparse.Namespace) -> int:
    """Measure.

    Returns:
        0; 1 if a request failed.

    Raises:
        ConfigError: flags are wrong, or the data set cannot be read.
        StreamLLMError: a server does not answer, or an output cannot be written.
    """
    urls = check(options)
    from streamllm.bench.client import run_lean
    from streamllm.bench.comparison import render_comparison
    from streamllm.bench.measure import measure_servers
    from streamllm.bench.results import ResultFile

    result_file = ResultFile(options)
    measurements = run_lean(measure_servers(options, urls, result_file))
    servers: dict[str, list[Measurement]] = {url: [] for url in urls}
    for measurement in measurements:
        servers[measurement.url].append(measurement)
    if len(measurements) > 1:
        print("\n" + render_comparison(servers, options.percentile_metrics))
    pictures = [options.png] if options.png is not None else []
    if options.plot_timeline:
        pictures.append(result_file.path(measurements[0].model).with_suffix(".png"))
    for path in pictures:
        _draw(path, servers)
    return 1 if any(measurement.summary["failed"] for measurement in measurements) else 0


def check(options: argparse.Namespace) -> list[str]:
    """Complete the flags with what follows from them, and look at everything that can be known before the
    first request.

    Returns:
        the servers' URLs.

    Raises:
        ConfigError: flags are wrong.
        StreamLLMError: an output cannot be written.
    """
    from streamllm.bench.results import check_outputs

    urls = options.base_url or [f"http://{options.host}:{options.port}"]
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url {url}: must begin with http:// or https://.")
    if len(set(urls)) < len(urls):
        raise ConfigError("--base-url names a server twice; --rounds repeats a measurement.")
    _check_requests(options)
    options.request_rate = None if options.request_rate == math.inf else options.request_rate
    _check_load(options)
    options.objectives = parse_goodput(options.goodput)
    check_dataset(options)
    wants_picture = options.png is not None or options.plot_timeline
    if wants_picture and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--png and --plot-timeline need matplotlib: pip install 'streamllm[loadtest]'.")
    check_outputs(options)
    return urls


def _check_requests(options: argparse.Namespace) -> None:
    options.endpoint = options.endpoint or _ENDPOINTS[options.backend]
    if not options.endpoint.startswith("/"):
        raise ConfigError(f"--endpoint {options.endpoint}: must begin with /.")
    if options.backend == "openai-chat" and not options.endpoint.endswith("/chat/completions"):
        raise ConfigError(f"--endpoint {options.endpoint}: --backend openai-chat needs .../chat/completions.")
    options.api_key = options.api_key or os.environ.get("OPENAI_API_KEY")
    sent = [("--api-key", options.api_key or ""), ("--request-id-prefix", options.request_id_prefix or "")]
    for flag, text in sent + [("--header", "=".join(pair)) for pair in options.header]:
        if not (text.isascii() and text.isprintable()):
            raise ConfigError(f"{flag}: what an HTTP header holds must be printable ASCII.")


def _check_load(options: argparse.Namespace) -> None:
    ends = options.ramp_up_start_rps, options.ramp_up_end_rps
    if options.ramp_up_strategy is not None:
        if None in ends:
            raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps.")
        if options.request_rate is not None:
            raise ConfigError("--request-rate and --ramp-up-strategy exclude each other.")
        return
    if ends != (None, None):
        raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy.")
    for name in ("burst_size", "burstiness"):
        if options.request_rate is None and getattr(options, name) != 1:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} needs a --request-rate: without one all requests come at once.")


def _draw(path: Path, servers: dict[str, list[Measurement]]) -> None:
    from streamllm.bench.plots import plot, plot_comparison

    runs = [run for runs in servers.values() for run in runs]
    try:
        if len(runs) == 1:
            title = f"{runs[0].model}, {len(runs[0].results)} requests"
            plot(path, runs[0].results, runs[0].summary, title)
        else:
            plot_comparison(path, servers)
    except OSError as error:
        raise StreamLLMError(f"{path} cannot be written: {error.strerror or error}.") from None


def _key_value(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not key or not separator:
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, got {text!r}")
    return key.strip(), value.strip()


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if unknown := [name for name in names if name not in METRICS]:
        raise argparse.ArgumentTypeError(f"must be some of {','.join(METRICS)}; got {unknown[0]!r}")
    return tuple(dict.fromkeys(names))


def _percentiles(text: str) -> tuple[float, ...]:
    ranks = tuple(number(part) for part in text.split(","))
    if not all(0 <= rank <= 100 for rank in ranks):
        raise argparse.ArgumentTypeError(f"must be numbers between 0 and 100, got {text!r}")
    return ranks
