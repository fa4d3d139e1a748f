"""The stages of loadtest/gpu.py, each of which runs in a process of its own."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import gpu_cases
import gpu_steps
import run as load_test
from gpu_cases import Case, CaseMaker
from gpu_device import Device, Peaks
from gpu_model import LLAMA_8B, TINY, ModelShape, make_model
from gpu_steps import StepBenchmark
from servers import free_port, server

from streamllm.ops.gpu.kernels import GpuKernels
from streamllm.sources import resolve

LOADS = ((1, 8), (32, 128), (128, 512))
TINY_LOADS = ((2, 3),)
"""(Streams at once, requests)."""
INPUT_LEN, OUTPUT_LEN = 512, 128
MAX_STEP_TOKENS = 2048


def run_stage(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One stage's result, ready for JSON."""
    shape = TINY if options.tiny else LLAMA_8B
    folder = options.folder / shape.name
    if name == "model":
        if not (folder / "tokenizer_config.json").exists():  # written last
            make_model(folder, shape, options.device)
        return {"bytes": sum(file.stat().st_size for file in folder.iterdir())}
    if name == "server":
        return serve(folder, options)
    device = Device(options.device)
    if name == "steps":
        return measure_steps(device, folder, shape, options)
    return measure_kernels(device, name, shape, options)


def measure_kernels(
    device: Device, name: str, shape: ModelShape, options: argparse.Namespace
) -> dict[str, Any]:
    """Every case of one implementation; products belong to Triton's. A case that fails has an ``"error"``."""
    peaks = device.measure_peaks(options.seconds)
    sizes = gpu_cases.SMALL if options.tiny else gpu_cases.FULL
    maker = CaseMaker(device, find_kernels(name, device), shape, sizes)
    rows: list[dict[str, Any]] = []
    for source in [*maker.cases(), *(maker.products() if name == "triton" else ())]:
        row = {"kernel": _name_of(source), "shape": "", "rows": 0}
        try:
            case = source()
            row |= asdict(case.work)
            row["seconds"] = seconds = device.seconds(case.launches, options.seconds)
            row["share"] = peaks.floor(case.work.bytes, case.work.operations) / seconds
        except Exception as error:  # the others are worth knowing all the same
            row["error"] = f"{row['kernel']} {row['shape']}: {type(error).__name__}: {error}"
        rows.append(row)
    return {"device": device.describe(), "peaks": asdict(peaks), "rows": rows, **_failures(rows)}


def measure_steps(
    device: Device, folder: Path, shape: ModelShape, options: argparse.Namespace
) -> dict[str, Any]:
    """Steps with graphs and without, by the kernels that a server would use here."""
    peaks = device.measure_peaks(options.seconds)
    kernels = find_kernels("default", device)
    workloads = gpu_steps.SMALL if options.tiny else gpu_steps.FULL
    max_tokens = max(w.prompt_len for w in workloads) if options.tiny else MAX_STEP_TOKENS
    benchmark = StepBenchmark(resolve(str(folder)), device, kernels, max_tokens)
    found = {
        name: benchmark.run(workloads, graphs=graphs)
        for name, graphs in (("graphs", True), ("eager", False))
        if device.is_gpu or not graphs
    }
    rows = []
    for workload in workloads:
        tokens = max_tokens if workload.counts_prefill else workload.batch
        floor = step_floor(shape, peaks, tokens)
        measured = {name: asdict(figures[workload.name]) for name, figures in found.items()}
        rows.append({"step": workload.name, "tokens": tokens, "floor": floor, **measured})
    return {"device": device.describe(), "peaks": asdict(peaks), "kernels": kernels.name, "rows": rows}


def step_floor(shape: ModelShape, peaks: Peaks, tokens: int) -> float:
    """Seconds that a step's products take at least: its weights read once, its operations done."""
    return peaks.floor(shape.step_weights * gpu_cases.ITEM, 2.0 * shape.step_weights * tokens)


def serve(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Closed loops against a server of this model."""
    port, log = free_port(), options.folder / "streamllm.log"
    url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable, "-m", "streamllm.entrypoints.openai.api_server", "--model", str(folder),
        "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "4096",
        "--backend", "cuda" if options.device == "cuda" else "cpu",
    ]  # fmt: skip
    lengths = (16, 8) if options.tiny else (INPUT_LEN, OUTPUT_LEN)
    rows = []
    with server(command, log, f"{url}/health"):
        for number, (streams, requests) in enumerate(TINY_LOADS if options.tiny else LOADS):
            for seed, count in (
                (2 * number, min(streams, requests)),
                (2 * number + 1, requests),
            ):  # warm up first
                summary = _load(options.folder / "load.json", url, streams, count, lengths, seed)
            rows.append({"streams": streams, "requests": requests, **summary})
    return {"input_len": lengths[0], "output_len": lengths[1], "rows": rows, **_failures(rows)}


def find_kernels(name: str, device: Device) -> GpuKernels:
    """
    Args:
        name: ``"cuda"``, ``"triton"``, or ``"default"`` for what a server uses here. On a CPU all are the
            reference.
    """
    if not device.is_gpu:
        from streamllm.ops.gpu.reference import ReferenceKernels

        return ReferenceKernels()
    if name == "cuda":
        from streamllm.ops.gpu.cuda.library import library
        from streamllm.ops.gpu.cuda_kernels import CudaKernels

        return CudaKernels.on(device.device, library())
    if name == "triton":
        from streamllm.ops.gpu.triton_kernels.kernels import TritonKernels

        return TritonKernels()
    from streamllm.ops.gpu.dispatch import choose_kernels

    return choose_kernels(device.device).kernels


def _load(
    target: Path, url: str, streams: int, requests: int, lengths: tuple[int, int], seed: int
) -> dict[str, Any]:
    """A run of loadtest/run.py."""
    arguments = [
        "--base-url", url, "--concurrency", str(streams), "--requests", str(requests), "--seed", str(seed),
        "--input-len", str(lengths[0]), "--output-len", str(lengths[1]), "--json", str(target),
    ]  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        code = load_test.main(arguments)
    if not target.exists():
        return {"error": f"loadtest/run.py {' '.join(arguments)}: exit code {code}"}
    found = json.loads(target.read_text())
    target.unlink()
    kept = (
        "completed",
        "failed",
        "failures",
        "duration_s",
        "output_throughput",
        "total_token_throughput",
        "latency_ms",
    )
    summary = {name: found[name] for name in kept}
    return summary if code == 0 else {**summary, "error": f"{found['failed']} requests failed"}


def _name_of(source: Callable[[], Case]) -> str:
    """Of a case that may not come to be."""
    function = source.func if isinstance(source, partial) else source
    return str(function.__name__)


def _failures(rows: list[dict[str, Any]]) -> dict[str, str]:
    """What a stage's result says of rows that failed."""
    errors = [row["error"] for row in rows if "error" in row]
    return {"error": f"{len(errors)} of {len(rows)} failed, the first with: {errors[0]}"} if errors else {}
