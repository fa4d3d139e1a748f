"""loadtest/gpu.py without a GPU: its cases and stages on CPU tensors, its table, its goals."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import gpu
import gpu_cases
import gpu_report
import gpu_stages
import gpu_steps
import pytest
from gpu_cases import CaseMaker
from gpu_device import Device, Peaks
from gpu_model import LLAMA_8B, TINY
from gpu_steps import StepTimes, Workload
from helpers.cuda_emulation import emulated

from streamllm.ops.gpu.cuda_kernels import CudaKernels

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> argparse.Namespace:
    """A dry run's, with the model in its folder."""
    folder = tmp_path_factory.mktemp("gpu")
    arguments = ["--device", "cpu", "--tiny", "--seconds", "0.0001", "--folder", str(folder)]
    options = gpu.parse_arguments(arguments)
    assert gpu_stages.run_stage("model", options)["bytes"] > 100_000
    return options


def test_without_a_gpu_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr(gpu.machine, "gpus", lambda: [])
    assert gpu.main([]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and re.fullmatch(r"error: there is no GPU here: .*\n", printed.err)
    monkeypatch.setattr(gpu.machine, "gpus", lambda: ["a GPU"])
    monkeypatch.setattr(gpu.machine, "has_cuda_torch", lambda: False)
    assert gpu.main([]) == 1
    assert "torch for CUDA is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["cuda", "triton"])
def test_every_kernel_is_measured(options, name):
    result = gpu_stages.run_stage(name, options)
    assert "error" not in result
    kernels = {row["kernel"] for row in result["rows"]}
    assert {"rms_norm", "act_and_mul", "rotary_and_cache", "paged_decode", "paged_prefill"} <= kernels
    assert {"copy_blocks", "sample", "experts"} <= kernels
    quantised = {"linear, torch", "linear q4_0", "linear q8_0", "linear int8", "linear float8_e4m3"}
    assert (quantised & kernels) == (quantised if name == "triton" else set())
    for row in result["rows"]:
        assert row["seconds"] > 0 and row["share"] > 0 and row["bytes"] > 0
    assert all(rate > 0 for rate in result["peaks"].values())


@pytest.mark.slow
def test_cuda_kernels_take_what_is_measured():
    """The calls of every case whose kernel is CUDA's own, with the kernels emulated."""
    names = ("elementwise.cu", "rotary_cache.cu", "copy_blocks.cu", "attention_decode.cu", "sampling.cu")
    kernels = CudaKernels(emulated(*names), num_multiprocessors=4, device_index=None)
    maker = CaseMaker(Device("cpu"), kernels, TINY, gpu_cases.SMALL)
    done = set()
    for source in maker.cases():
        case = source()
        if case.work.kernel not in ("paged_prefill", "experts"):  # Triton's
            for launch in case.launches:
                launch()
            done.add(case.work.kernel)
    assert {"rms_norm", "rotary_and_cache", "paged_decode", "copy_blocks", "sample"} <= done


def test_work_is_counted_as_it_is():
    maker = CaseMaker(Device("cpu"), gpu_stages.find_kernels("cuda", Device("cpu")), TINY, gpu_cases.SMALL)
    norm, gated = maker.rms_norm(3).work, maker.act_and_mul(3).work
    assert (norm.bytes, gated.bytes) == (4 * 3 * 64 * 2, 3 * 3 * 96 * 2)
    decode = maker.decode(3, 300).work
    assert decode.bytes == 3 * (300 * 2 * 2 * 16 * 2 + 2 * 4 * 16 * 2)
    assert decode.operations == 4 * 3 * 300 * 4 * 16
    prefill = maker.prefill(5, 30, 2).work
    assert prefill.operations == 4 * 2 * (26 + 27 + 28 + 29 + 30) * 4 * 16
    assert maker.copy_blocks().work.bytes == 2 * 2 * 4 * (2 * 16 * 16 * 2)
    experts = maker.experts(1).work
    assert experts.bytes == (2 * 3 * 24 * 64 + 2 * 64) * 2 and experts.operations == 2 * 2 * 3 * 24 * 64
    product = maker.product("bfloat16", 3).work
    assert product.bytes == (192 * 64 + 3 * (192 + 64)) * 2 and product.operations == 2 * 3 * 192 * 64
    assert LLAMA_8B.step_weights + 128256 * 4096 == pytest.approx(8.03e9, rel=1e-3)


def test_a_case_that_fails_is_told_and_the_others_are_measured(options, monkeypatch):
    monkeypatch.setattr(CaseMaker, "act_and_mul", lambda self, rows: 1 / 0)
    result = gpu_stages.run_stage("cuda", options)
    failed = [row for row in result["rows"] if "error" in row]
    assert len(failed) == len(gpu_cases.SMALL.rows) and "ZeroDivisionError" in result["error"]
    assert sum("share" in row for row in result["rows"]) == len(result["rows"]) - len(failed) > 5


@pytest.mark.slow
def test_steps_are_measured_in_the_engine(options):
    result = gpu_stages.run_stage("steps", options)
    assert [row["tokens"] for row in result["rows"]] == [1, 3, 32]
    for row in result["rows"]:
        assert "graphs" not in row
        eager = row["eager"]
        assert eager["num_steps"] >= 3 and row["floor"] > 0
        assert 0 < eager["busy"] < 10 * eager["period"] and 0 <= eager["idle"] < 1


def test_only_full_steps_count():
    workload = Workload("decode", batch=2, prompt_len=4, output_len=9)
    steps = [StepTimes(8, 2, 0.0, 1.0)]
    steps += [StepTimes(2, 2, begin, begin + 0.75) for begin in range(1, 11)]
    steps += [StepTimes(1, 1, 20.0, 30.0)]
    figures = gpu_steps.figures(steps, workload, max_tokens=8)
    assert figures.num_steps == 10 - 2 * gpu_steps.EDGE_STEPS
    assert (figures.period, figures.busy, figures.idle) == pytest.approx((1.0, 0.75, 0.25))
    with pytest.raises(ValueError, match="decode: only 0 of 4 steps were full"):
        gpu_steps.figures(steps[:4], workload, max_tokens=8)
    prefill = Workload("prefill", batch=2, prompt_len=4, output_len=1, counts_prefill=True)
    steps = [StepTimes(tokens, 2, begin, begin + 0.5) for begin, tokens in enumerate((8, 7, 8, 3))]
    assert gpu_steps.figures(steps, prefill, max_tokens=8).num_steps == 3


def test_the_floor_is_the_larger_of_the_two_times():
    peaks = Peaks(bandwidth=4e12, matrix_rate=8e14)
    assert peaks.floor(8e9, 8e9) == pytest.approx(2e-3)
    assert peaks.floor(8e6, 8e12) == pytest.approx(1e-2)


def test_table_and_goals():
    def kernel(share: float, shape: str = "32 x context 4096") -> dict:
        return {"kernel": "paged_decode", "shape": shape, "rows": 32, "bytes": 5e8, "operations": 1e9,
                "seconds": 1e-4, "share": share}  # fmt: skip

    def step(period: float, idle: float) -> dict:
        return {"num_steps": 9, "period": period, "busy": 0.9 * period, "idle": idle}

    described = {"device": {"name": "H200", "torch": "2.11.0", "cuda": "13.0"},
                 "peaks": {"bandwidth": 4e12, "matrix_rate": 7e14}}  # fmt: skip
    latency = {"mean": 1.0, "median": 2.0, "p90": 3.0, "p99": 4.0}
    stages = {
        "cuda": {**described, "rows": [kernel(0.85), kernel(0.5, "1 x context 1024")]},
        "triton": {"rows": [kernel(0.7), {"kernel": "sample", "shape": "", "rows": 0, "error": "no"}],
                   "error": "1 of 2 failed"},
        "steps": {"kernels": "cuda", "rows": [
            {"step": "decode", "tokens": 1, "floor": 4e-3,
             "graphs": step(4.6e-3, 0.01), "eager": step(9e-3, 0.2)},
            {"step": "prefill", "tokens": 2048, "floor": 5e-2,
             "graphs": step(7e-2, 0.04), "eager": step(8e-2, 0.1)},
        ]},
        "server": {"input_len": 512, "output_len": 128, "rows": [
            {"streams": 32, "requests": 128, "failed": 0, "output_throughput": 3000.0,
             "latency_ms": {"ttft": latency, "itl": None}},
        ]},
    }  # fmt: skip
    result = {"seconds": 200.0, "stages": stages}
    result["goals"] = gpu_report.goals(result)
    assert [(goal["value"], goal["met"]) for goal in result["goals"]] == [
        (0.85, True), (pytest.approx(1.15), True), (0.04, False)
    ]  # fmt: skip
    table = gpu_report.render(result)
    sizes = "32    500.00      1.0"
    assert f"32 x context 4096            {sizes}        100.0    85%        100.0    70%" in table
    assert re.search(r"sample .*failed", table) and "triton: 1 of 2 failed" in table
    assert "4.600    4.140   1.0%    1.15x        9.000    8.100  20.0%    2.25x" in table
    assert "3,000       2.00     4.00         -        -" in table
    assert "goal at most 0.03, measured 0.040: MISSED" in table
    assert "goal at least 0.8, not measured" in gpu_report.render(
        {"seconds": 1.0, "stages": {}, "goals": gpu_report.goals({"stages": {}})}
    )


def test_the_wheels_cover_what_the_package_needs():
    def names(lines: list[str]) -> set[str]:
        return {re.split(r"[^\w.-]", line)[0].lower() for line in lines if line and line[0] not in "#"}

    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    declared = re.findall(r'^  "(.+)",$', project.split("dependencies = [")[1].split("]")[0], re.MULTILINE)
    carried = names((ROOT / "loadtest" / "gpu_wheels.txt").read_text(encoding="utf-8").splitlines())
    assert len(declared) > 10 and names(declared) <= carried


@pytest.mark.slow
def test_the_whole_dry_run(tmp_path, capsys):
    target = tmp_path / "gpu.json"
    arguments = ["--device", "cpu", "--tiny", "--seconds", "0.0001", "--json", str(target)]
    assert gpu.main(arguments) == 0
    assert gpu.main([*arguments, "--stages", "cuda", "--check"]) == 1
    printed = capsys.readouterr().out
    assert "server, 16 tokens in" in printed and "step (reference kernels)" in printed
    assert json.loads(target.read_text())["stages"].keys() == {"cuda"}


def test_the_server_stage(options):
    result = gpu_stages.run_stage("server", options)
    assert "error" not in result
    (row,) = result["rows"]
    assert (row["completed"], row["failed"], row["streams"]) == (3, 0, 2)


def test_a_stage_that_breaks_is_told(options, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert gpu._run_apart("cuda", options) == {"error": "exit code 1: "}
