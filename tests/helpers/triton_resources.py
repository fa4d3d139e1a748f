"""What Triton's kernels take on each architecture, and the committed table of it. It needs no GPU.

``PYTHONPATH=.:tests python -m helpers.triton_resources`` writes the table anew, whose differences are then
there to be looked at.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "streamllm" / "ops" / "gpu" / "triton_kernels"
TABLE = ROOT / "tests" / "ops" / "gpu" / "triton_resources.json"
CACHE = ROOT / "build" / "triton_compile"
ARCHITECTURES = ("sm_90", "sm_80", "sm_100")
COMPILERS = ("helpers.triton_compile", "helpers.matmul_compile")
"""Programs that compile kernels and print what they take."""

SHARED_MEMORY = {"sm_80": 99 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
"""Bytes that a program may have; sm_86, sm_89 and sm_120, which have less than sm_80, use its
configurations."""

Resources = dict[str, dict[str, int]]
"""By ``"label: kernel"``: registers and bytes of spills of a thread, shared memory of a program."""


def triton_version() -> str:
    return metadata.version("triton")


def compiled(compiler: str, architecture: str) -> Resources:
    """What kernels take, as one of COMPILERS finds it."""
    numbers = ("registers", "spills", "shared")
    found = report(compiler, architecture)
    return {label: {name: taken[name] for name in numbers} for label, taken in found.items()}


def report(compiler: str, architecture: str) -> dict[str, dict[str, Any]]:
    """All that one of COMPILERS prints, in a process of its own: one in which Triton interprets cannot
    compile.

    Raises:
        subprocess.CalledProcessError: a kernel does not compile; Triton has said why.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "TRITON_CACHE_DIR": str(CACHE),
        "TRITON_DUMP_PTXAS_LOG": "1",
        "TRITON_INTERPRET": "0",
        "STREAMLLM_CACHE": str(CACHE / "no-tuning"),
    }
    command = [sys.executable, "-W", "ignore", "-m", compiler, architecture]
    printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
    found: dict[str, dict[str, Any]] = json.loads(printed)
    return found


def read_table() -> dict[str, Any]:
    return json.loads(TABLE.read_text())


def kernel_names() -> set[str]:
    """All kernels of the package: device functions that are launched are named ``*_kernel``."""
    return {
        name
        for source in KERNELS.glob("*.py")
        for name in re.findall(r"^def (\w+_kernel)\(", source.read_text(), re.MULTILINE)
    }


def main() -> None:
    lines = [f'{{\n "triton": "{triton_version()}",\n "kernels": {{']
    for architecture in sorted(ARCHITECTURES):
        rows: Resources = {}
        for compiler in COMPILERS:
            rows |= compiled(compiler, architecture)
        written = ",\n".join(f"   {json.dumps(name)}: {json.dumps(taken)}" for name, taken in rows.items())
        lines.append(f'  "{architecture}": {{\n{written}\n  }},')
    lines[-1] = lines[-1].removesuffix(",")
    TABLE.write_text("\n".join([*lines, " }", "}"]) + "\n")


if __name__ == "__main__":
    main()
