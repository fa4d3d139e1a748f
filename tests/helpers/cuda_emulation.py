"""The CUDA kernels built for this CPU against ``csrc/cuda/emulation``, with the interface that they have on a
GPU."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from streamllm.machine import cpu_flags
from streamllm.ops.gpu.cuda.library import CudaLibrary

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "csrc" / "cuda"
CACHE = ROOT / "build" / "cuda_emulation"

SANITIZED = "STREAMLLM_TEST_SANITIZED"
"""Environment variable: the kernels are built with sanitizers. Their runtime must come with the process:
:func:`sanitizer_environment`."""

_FLAGS = (
    "-std=c++17", "-fPIC", "-g", "-DSTREAMLLM_EMULATION", "-ffp-contract=off",
    "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-psabi",
)  # fmt: skip
_PLAIN = ("-O2",)
_SANITIZERS = (
    "-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined,float-cast-overflow",
    "-fno-sanitize-recover=all",
)  # fmt: skip


class EmulatedLibrary(CudaLibrary):
    """Kernels on this CPU; addresses are numpy's."""

    def set_seed(self, seed: int) -> None:
        """The order in which threads and blocks run: 0 ascending, 1 descending, else shuffled."""
        self._library.streamllm_emulation_set_seed(ctypes.c_uint64(seed))

    def take_traffic(self) -> tuple[int, int]:
        """Bytes that 16-byte accesses loaded from and stored to global memory since the last call."""
        loaded, stored = ctypes.c_uint64(), ctypes.c_uint64()
        self._library.streamllm_emulation_take_traffic(ctypes.byref(loaded), ctypes.byref(stored))
        return loaded.value, stored.value

    def take_launches(self) -> dict[str, tuple[int, int]]:
        """The kernels launched since the last call, by their names in C++: the most threads of a block and
        the most bytes of shared memory."""
        self._library.streamllm_emulation_take_launches.restype = ctypes.c_char_p
        lines = self._library.streamllm_emulation_take_launches().decode().splitlines()
        fields = (line.split(" ", 2) for line in lines)
        return {name: (int(threads), int(shared)) for threads, shared, name in fields}


def missing() -> str | None:
    """Why the emulation cannot be built here, or ``None``."""
    if shutil.which(compiler()) is None:
        return f"no C++ compiler ({compiler()})"
    return None if cuda_include() else "CUDA's headers (cuda_fp16.h) are not installed"


def compiler() -> str:
    return os.environ.get("CXX", "g++")


def cuda_include() -> Path | None:
    """The folder of CUDA's headers."""
    nvcc = shutil.which("nvcc")
    roots = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1], "/usr/local/cuda"]
    folders = (Path(root) / "include" for root in roots if root)
    return next((folder for folder in folders if (folder / "cuda_fp16.h").exists()), None)


def emulated(*names: str) -> EmulatedLibrary:
    """The kernels of the named sources (``"attention_decode.cu"``; paths for a test's own), with threads in
    ascending order; skips the test where they cannot be built."""
    if reason := missing():
        pytest.skip(f"CUDA kernels cannot be emulated: {reason}")
    library = _emulated(tuple(SOURCES / name for name in names), SANITIZED in os.environ)
    library.set_seed(0)
    library.take_traffic()
    return library


@functools.cache
def _emulated(sources: tuple[Path, ...], sanitized: bool) -> EmulatedLibrary:
    return build(sources, sanitized)


def build(sources: Sequence[Path], sanitized: bool = False) -> EmulatedLibrary:
    """Compiles what the cache has not got.

    Raises:
        AssertionError: a source does not compile; the message has the compiler's.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    common = [*_FLAGS, f"-I{SOURCES}", f"-isystem{cuda_include()}"]
    if "fma" in cpu_flags():
        common.append("-mfma")  # fmaf() is called so often
    flags = [*common, *(_SANITIZERS if sanitized else _PLAIN)]
    fiber_flags = [*common, *_PLAIN, *(["-DSTREAMLLM_SANITIZED"] if sanitized else [])]
    units = [(source, flags) for source in [*sources, SOURCES / "library.cu"]]
    units += [(source, fiber_flags) for source in sorted((SOURCES / "emulation").glob("*.cpp"))]
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda unit: _compile(*unit), units))
    name = hashlib.sha256(" ".join(map(str, [*objects, *flags])).encode()).hexdigest()[:16]
    library = CACHE / f"{name}.so"
    if not library.exists():
        _run([compiler(), "-shared", *flags, *map(str, objects), "-ldl"], library)
    _forget_old_files([*objects, library])
    return EmulatedLibrary(library)


def _forget_old_files(in_use: list[Path]) -> None:
    week = 7 * 24 * 3600
    for file in in_use:
        os.utime(file)
    for file in CACHE.iterdir():
        if file.stat().st_mtime < time.time() - week:
            file.unlink(missing_ok=True)


def _compile(source: Path, flags: list[str]) -> Path:
    digest = hashlib.sha256(" ".join([_compiler_version(), *flags, source.name]).encode())
    for file in with_includes(source):
        digest.update(file.read_bytes())
    target = CACHE / f"{source.stem}-{digest.hexdigest()[:16]}.o"
    if not target.exists():
        _run([compiler(), *flags, "-x", "c++", "-c", str(source)], target)
    return target


def _run(command: list[str], target: Path) -> None:
    unfinished = target.with_suffix(f".{os.getpid()}{target.suffix}")
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    unfinished.replace(target)


@functools.cache
def _compiler_version() -> str:
    return subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True).stdout


def with_includes(source: Path) -> list[Path]:
    """A source and the project's files that it includes."""
    files: dict[Path, None] = {}
    waiting = [source.resolve()]
    while waiting:
        file = waiting.pop()
        if file in files:
            continue
        files[file] = None
        waiting.extend(_includes(file))
    return list(files)


def _includes(file: Path) -> Iterator[Path]:
    for name in re.findall(r'^#include "([^"]+)"', file.read_text(), re.MULTILINE):
        for folder in (file.parent, SOURCES):
            if (folder / name).exists():
                yield (folder / name).resolve()
                break


def sanitizer_environment() -> dict[str, str]:
    """What a process needs in its environment to load sanitized kernels."""

    def runtime(name: str) -> str:
        command = [compiler(), f"-print-file-name={name}"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    return {
        SANITIZED: "1",
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
    }


def poison(start: int, size: int) -> None:
    """Makes bytes that kernels must not touch an error for AddressSanitizer, if it is there."""
    if SANITIZED in os.environ:
        ctypes.CDLL(None).__asan_poison_memory_region(ctypes.c_void_p(start), ctypes.c_size_t(size))


def address(array: np.ndarray | None) -> int | None:
    """For a struct's pointer. The caller keeps the array alive."""
    return None if array is None else array.ctypes.data
