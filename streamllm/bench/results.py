"""The result file of ``streamllm bench serve``, with the keys of ``vllm bench serve``'s."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamllm.errors import StreamLLMError

if TYPE_CHECKING:
    from streamllm.bench.measure import Measurement

_COPIED = (
    "completed", "failed", "failures", "total_input_tokens", "total_output_tokens", "requests_without_usage",
    "request_throughput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests",
)  # fmt: skip


class ResultFile:
    """Where runs are kept, a line of JSON each: of one run, a JSON file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._path: Path | None = None
        self._is_begun = options.append_result

    def path(self, model: str) -> Path:
        """The file; its name may be made of the model's, and of the time when it is first asked for."""
        if self._path is None:
            self._path = result_path(self._options, model)
        return self._path

    def write(self, measurement: Measurement) -> None:
        """Add a run, if a flag asks for a file.

        Raises:
            StreamLLMError: the file cannot be written.
        """
        if not is_wanted(self._options):
            return
        path = self.path(measurement.model)
        line = json.dumps(document(self._options, measurement), allow_nan=False)
        try:
            with path.open("a" if self._is_begun else "w") as file:
                file.write(line + "\n")
        except OSError as error:
            raise StreamLLMError(f"{path} cannot be written: {error.strerror or error}.") from None
        self._is_begun = True


def is_wanted(options: argparse.Namespace) -> bool:
    """Whether a flag asks for a result file."""
    named = options.result_filename is not None
    return named or options.save_result or options.save_detailed or options.append_result


def result_path(options: argparse.Namespace, model: str) -> Path:
    """``--result-filename`` in ``--result-dir``, or a name made of label, rate, concurrency, model and time,
    as vLLM makes it."""
    folder = Path(options.result_dir or ".")
    if options.result_filename is not None:
        return folder / options.result_filename
    concurrency = "" if options.max_concurrency is None else f"-concurrency{options.max_concurrency}"
    rate = "inf" if options.request_rate is None else f"{options.request_rate:g}"
    base = model.rstrip("/").rpartition("/")[2]
    moment = time.strftime("%Y%m%d-%H%M%S")
    return folder / f"{options.label or options.backend}-{rate}qps{concurrency}-{base}-{moment}.json"


def check_outputs(options: argparse.Namespace) -> None:
    """Look before the run whether everything can be written after it.

    Raises:
        StreamLLMError: a folder is missing and cannot be made, or something is in the way.
    """
    paths = [options.png] if options.png is not None else []
    if is_wanted(options) or options.plot_timeline:
        try:
            Path(options.result_dir or ".").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StreamLLMError(f"--result-dir {options.result_dir}: {error.strerror or error}.") from None
        paths.append(result_path(options, "model"))
    for path in paths:
        folder = path.absolute().parent
        if not folder.is_dir():
            raise StreamLLMError(f"{path} cannot be written: there is no folder {folder}.")
        target = path if path.exists() else folder
        if path.is_dir() or not os.access(target, os.W_OK):
            reason = "it is a folder" if path.is_dir() else "no permission"
            raise StreamLLMError(f"{path} cannot be written: {reason}.")


def document(options: argparse.Namespace, measurement: Measurement) -> dict[str, Any]:
    """A run under vLLM's keys, and streamllm's ``base_url``, ``round``, ``seed``, ``failures`` and
    ``requests_without_usage``. A latency without a sample is ``null``."""
    summary = measurement.summary
    found: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label,
        "model_id": measurement.model,
        "tokenizer_id": None,
        "num_prompts": len(measurement.results),
        **dict(options.metadata),
        "request_rate": "inf" if options.request_rate is None else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "base_url": measurement.url,
        "round": measurement.round_number,
        "seed": measurement.seed,
        "duration": measurement.duration,
        "request_goodput": summary.get("request_goodput"),
        **{key: summary[key] for key in _COPIED},
    }
    if options.ramp_up_strategy is not None:
        for key in ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps"):
            found[key] = getattr(options, key)
    keys = ("mean", "median", "std", *(f"p{rank:g}" for rank in options.metric_percentiles))
    for name in options.percentile_metrics:
        values = summary["latency_ms"][name] or dict.fromkeys(keys)
        found |= {f"{key}_{name}_ms": values[key] for key in keys}
    return found | (_details(measurement) if options.save_detailed else {})


def _details(measurement: Measurement) -> dict[str, Any]:
    results = measurement.results
    return {
        "input_lens": [r.prompt_tokens for r in results],
        "output_lens": [r.output_tokens for r in results],
        "start_times": [r.due for r in results],
        "ttfts": [r.ttft for r in results],
        "itls": [r.itls for r in results],
        "latencies": [r.e2e for r in results],
        "generated_texts": [r.text for r in results],
        "errors": ["" if r.error is None else str(r.error) for r in results],
    }
