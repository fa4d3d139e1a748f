"""What a GPU makes of streamllm: kernels against their floors, a model's steps, and a server under load.

    python loadtest/gpu.py [--stages cuda triton steps server] [--folder DIR] [--json FILE] [--check]

- Kernels: a kernel cannot take less time than its bytes take at the bandwidth of a copy, nor than its
  operations take at the rate of a large bfloat16 product. Both are measured in the same run; the larger time
  is the floor, and "share" is floor / time. Shapes are those of Llama-3-8B, in bfloat16.
- Steps: the engine with a random model of that shape, with CUDA graphs and without. A period is the time from
  one step's results to the next one's; idle is the share of time in which no step was under way on the GPU.
- Server: the same model behind HTTP, closed loops by loadtest/run.py.

Every stage is a process of its own: what breaks in one does not reach the others. The exit code is 1 where a
stage failed, with --check also where a goal is missed, and without a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_report import goals, render

from streamllm import machine

STAGES = ("cuda", "triton", "steps", "server")
STAGE_TIMEOUT = 400.0
"""Seconds; far more than a stage should take on an H200."""


def main(argv: list[str] | None = None) -> int:
    options = parse_arguments(argv)
    if options.device == "cuda" and (missing := missing_gpu()):
        print(f"error: {missing}", file=sys.stderr)
        return 1
    if options.stage:
        from gpu_stages import run_stage

        options.json.write_text(json.dumps(run_stage(options.stage, options)), encoding="utf-8")
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        options.folder = options.folder or Path(temporary)
        result = run(options)
    print(render(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    failed = any("error" in stage for stage in result["stages"].values())
    missed = options.check and any(not goal["met"] for goal in result["goals"])
    return 1 if failed or missed else 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), help="default: all")
    parser.add_argument(
        "--folder", type=Path, help="keeps the model (16 GB) and logs, and finds the model there"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a goal is missed")
    parser.add_argument("--seconds", type=float, default=0.05, help="for one kernel in one shape")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda",
        help="cpu: a dry run with the reference kernels, whose figures mean nothing",
    )  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="a tiny model and small batches, for a dry run")
    parser.add_argument("--stage", choices=("model", *STAGES), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def missing_gpu() -> str | None:
    """Why nothing can be measured here."""
    if not machine.gpus():
        return "there is no GPU here: CUDA's driver shows none (nvidia-smi lists what it shows)"
    if not machine.has_cuda_torch():
        return "there is a GPU, but torch for CUDA is not installed: pip install 'streamllm[gpu]'"
    return None


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All stages; what failed has an ``"error"``."""
    options.folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    stages: dict[str, Any] = {}
    names = ["model", *options.stages] if {"steps", "server"} & {*options.stages} else options.stages
    for name in names:
        began = time.perf_counter()
        stages[name] = _run_apart(name, options)
        stages[name]["seconds"] = time.perf_counter() - began
        print(
            f"{name}: {stages[name].get('error', 'done')} ({stages[name]['seconds']:.0f} s)", file=sys.stderr
        )
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seconds": time.perf_counter() - start,
        "stages": stages,
    }
    result["goals"] = goals(result)
    return result


def _run_apart(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """A stage in a process of its own."""
    target, log = options.folder / f"{name}.json", options.folder / f"{name}.log"
    target.unlink(missing_ok=True)
    command = [
        sys.executable, __file__, "--stage", name, "--json", str(target), "--folder", str(options.folder),
        "--device", options.device, "--seconds", str(options.seconds), *(["--tiny"] if options.tiny else []),
    ]  # fmt: skip
    with log.open("w") as output:
        try:
            done = subprocess.run(command, stdout=output, stderr=output, timeout=STAGE_TIMEOUT)
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {STAGE_TIMEOUT:.0f} s"}
    if done.returncode != 0 or not target.exists():
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return {"error": f"exit code {done.returncode}: {' | '.join(lines[-3:])}"}
    found: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    sys.exit(main())
