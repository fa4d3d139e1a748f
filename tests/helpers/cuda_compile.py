"""What the CUDA kernels take: registers and spills, as ptxas says it for a target; threads and shared memory,
as the emulation sees them launched. It needs no GPU.

``PYTHONPATH=.:tests python -m helpers.cuda_compile`` writes the table that the tests hold the kernels to.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from helpers.cuda_emulation import EmulatedLibrary, emulated, with_includes
from helpers.decode_case import DecodeCase
from helpers.number_formats import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, INT8

from streamllm.ops.gpu.kernels import SPLIT_SIZE

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "csrc" / "cuda"
CACHE = ROOT / "build" / "cuda_compile"
TABLE = ROOT / "tests" / "ops" / "gpu" / "cuda_resources.json"
TARGETS = ("sm_80", "sm_90", "sm_100")

FLAGS = ("-std=c++17", "-O3", "-fmad=false", "-Xptxas=-v", '-DSTREAMLLM_ARCHITECTURES="test"')
"""As ``csrc/cuda/CMakeLists.txt`` has them."""

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Resources:
    """What one kernel takes: registers of a thread, and bytes.

    Attributes:
        stack: of local memory for a thread, spills included.
        spill_stores, spill_loads: that its code has instructions for.
        static_shared: shared memory besides what its launch asks for.
    """

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_shared: int


def nvcc() -> str | None:
    return shutil.which("nvcc")


@functools.cache
def nvcc_version() -> str:
    text = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return text[text.index("release ") :].split(",")[0].removeprefix("release ")


def kernel_sources() -> list[Path]:
    return sorted(SOURCES.glob("*.cu"))


def resources(target: str) -> dict[str, dict[str, Resources]]:
    """Every kernel of every source, compiled for a target as far as the cache has not got it.

    Raises:
        AssertionError: a source does not compile; the message has the compiler's.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(lambda source: _report(source, target), kernel_sources()))
    parsed = [(source.name, _parse(report)) for source, report in zip(kernel_sources(), reports, strict=True)]
    return {name: kernels for name, kernels in parsed if kernels}


def _report(source: Path, target: str) -> str:
    digest = hashlib.sha256(" ".join([nvcc_version(), target, *FLAGS, source.name]).encode())
    for file in with_includes(source):
        digest.update(file.read_bytes())
    cached = CACHE / f"{source.stem}-{target}-{digest.hexdigest()[:16]}.txt"
    if cached.exists():
        return cached.read_text()
    command = ["nvcc", *FLAGS, f"-arch={target}", "-cubin", "-o", os.devnull, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=lambda: os.nice(5))
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    unfinished = cached.with_suffix(f".{os.getpid()}")
    unfinished.write_text(done.stdout + done.stderr)
    unfinished.replace(cached)
    return cached.read_text()


def _parse(report: str) -> dict[str, Resources]:
    found = dict(_entries(report))
    names = subprocess.run(["c++filt"], input="\n".join(found), capture_output=True, text=True, check=True)
    kernels = zip(map(_short, names.stdout.splitlines()), found.values(), strict=True)
    return dict(sorted(kernels)) if found else {}


def _entries(report: str) -> Iterator[tuple[str, Resources]]:
    _, *parts = _ENTRY.split(report)
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        spills, used, shared = _SPILLS.search(text), _USED.search(text), _SHARED.search(text)
        assert spills and used, f"ptxas reports in another way than expected:\n{text}"
        stack, stores, loads = map(int, spills.groups())
        yield name, Resources(int(used[1]), stack, stores, loads, int(shared[1]) if shared else 0)


def _short(name: str) -> str:
    """``void streamllm::cuda::(anonymous namespace)::copy_kernel<float>(...)`` is ``copy_kernel<float>``."""
    for noise in ("void ", "streamllm::cuda::", "(anonymous namespace)::"):
        name = name.replace(noise, "")
    depth = 0
    for i, character in enumerate(name):
        depth += {"<": 1, ">": -1}.get(character, 0)
        if character == "(" and depth == 0:
            return name[:i]
    return name


def decode_launches(library: EmulatedLibrary) -> dict[str, dict[str, int]]:
    """Threads of a block and bytes of shared memory of the kernels of decode attention."""
    library.take_launches()
    for cache in (FLOAT32, FLOAT16, BFLOAT16, FLOAT8, INT8):
        dtype = FLOAT16 if cache in (FLOAT8, INT8) else cache
        for head_dim in (64, 128, 256):
            for group, matrix_units_from in ((1, 0), (4, 0), (8, 0), (8, 1)):
                DecodeCase(
                    [SPLIT_SIZE + 1],
                    1,
                    group,
                    head_dim,
                    dtype=dtype,
                    cache_dtype=cache,
                    matrix_units_from=matrix_units_from,
                ).run(library)
    launches = library.take_launches().items()
    return {
        _short(name): {"threads": threads, "shared": shared} for name, (threads, shared) in sorted(launches)
    }


def read_table() -> dict:
    """``{"nvcc": version, "decode_launches": …, "kernels": {target: {source: {kernel: resources}}}}``"""
    return json.loads(TABLE.read_text())


def write_table() -> None:
    kernels = {
        target: {
            source: {name: asdict(found) for name, found in of_source.items()}
            for source, of_source in resources(target).items()
        }
        for target in TARGETS
    }
    launches = decode_launches(emulated("attention_decode.cu"))
    text = json.dumps({"nvcc": nvcc_version(), "decode_launches": launches, "kernels": kernels}, indent=1)
    a_line_each = re.sub(r"\{[^{}]*\}", lambda match: " ".join(match[0].split()), text)
    TABLE.write_text(a_line_each + "\n")


if __name__ == "__main__":
    if nvcc() is None:
        sys.exit("nvcc is not installed")
    write_table()
