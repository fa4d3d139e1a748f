"""The compiled CUDA kernels as a shared library: where it is, whether it runs here, and calls into it.

The library knows nothing of Python or torch (``csrc/cuda/api.hpp``): an operation takes a struct of addresses
and numbers, whose mirror is a ``ctypes.Structure``, and a stream.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamllm import machine

NAME = "libstreamllm_cuda.so"
NOT_BUILT = "cuda_not_built.txt"
"""What the build leaves instead of the library: a line that says why."""

FLOAT32, FLOAT16, BFLOAT16, FLOAT8_E4M3, INT8 = range(5)
"""The kernels' codes for dtypes."""


class CudaUnavailable(RuntimeError):
    """The CUDA kernels cannot run here; the message says why, as half a sentence."""


class CudaError(RuntimeError):
    """CUDA refused or failed an operation."""


class CudaLibrary:
    """A loaded library.

    Attributes:
        path: the file.
        cuda_version: what it was built with, e.g. ``(13, 0)``.
        architectures: what it was built for, as CMake names it: ``("80-real", "90")``.
    """

    def __init__(self, path: Path) -> None:
        """
        Raises:
            OSError: it cannot be loaded.
        """
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._operations: dict[str, Callable[[Any, int], int]] = {}
        for name in ("streamllm_error_text", "streamllm_cuda_architectures"):
            getattr(self._library, name).restype = ctypes.c_char_p
        version = self._library.streamllm_cuda_version()
        self.cuda_version = (version // 1000, version % 1000 // 10)
        self.architectures = tuple(self._library.streamllm_cuda_architectures().decode().split(","))

    def call(self, operation: str, arguments: ctypes.Structure, stream: int = 0) -> None:
        """Puts an operation on a stream.

        Args:
            operation: the function's name without ``streamllm_``.
            arguments: its struct; the kernels have copied it when this returns.
            stream: a ``cudaStream_t``; 0: the default stream.

        Raises:
            ValueError: there is no kernel for these arguments; nothing was done.
            CudaError: CUDA refused the launch, or an earlier kernel has failed.
        """
        function = self._operations.get(operation) or self._operation(operation)
        code = function(ctypes.byref(arguments), stream)
        if code != 0:
            error = ValueError if code < 0 else CudaError
            raise error(f"{operation}: {self.error_text(code)}")

    def error_text(self, code: int) -> str:
        """What a code that an operation returned means."""
        return self._library.streamllm_error_text(code).decode()

    def _operation(self, name: str) -> Callable[[Any, int], int]:
        function = getattr(self._library, f"streamllm_{name}")
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._operations[name] = function
        return function


@functools.cache
def library() -> CudaLibrary:
    """The library that was built with the package.

    Raises:
        CudaUnavailable: it was not built, or cannot run on this machine's GPU.
    """
    loaded = _load(_folders())
    gpus = machine.gpus()
    if not gpus:
        raise CudaUnavailable("there is no GPU that CUDA's driver knows")
    check_driver(loaded.cuda_version, machine.cuda_driver_version())
    check_architecture(loaded.architectures, gpus[0].compute_capability)
    return loaded


def check_driver(built_with: tuple[int, int], driver: tuple[int, int] | None) -> None:
    """
    Args:
        driver: the newest CUDA that the driver supports.

    Raises:
        CudaUnavailable: it is older than what the library was built with.
    """
    if driver is None or driver[0] < built_with[0]:
        supported = "no CUDA" if driver is None else f"CUDA {driver[0]}.{driver[1]} at most"
        raise CudaUnavailable(
            f"they were built with CUDA {built_with[0]}.{built_with[1]}, and the driver supports {supported}"
        )


def check_architecture(built_for: tuple[str, ...], capability: tuple[int, int]) -> None:
    """
    Args:
        built_for: architectures as CMake names them; ``"90"`` and ``"90-virtual"`` have code that later GPUs
            compile as they load it, ``"90-real"`` runs on 9.x from 9.0 on.
        capability: the GPU's, e.g. ``(9, 0)``.

    Raises:
        CudaUnavailable: none of them runs there.
    """
    for architecture in built_for:
        number, _, kind = architecture.partition("-")
        built = divmod(int(number), 10)
        same_major = kind != "virtual" and built[0] == capability[0] and built[1] <= capability[1]
        if same_major or (kind != "real" and built <= capability):
            return
    names = ", ".join(f"sm_{name.partition('-')[0]}" for name in built_for)
    raise CudaUnavailable(
        f"they were built for {names}, and the GPU is sm_{capability[0]}{capability[1]}; reinstalling "
        "streamllm here builds them for it"
    )


def _load(folders: list[Path]) -> CudaLibrary:
    for folder in folders:
        if (folder / NAME).exists():
            try:
                return CudaLibrary(folder / NAME)
            except OSError as error:
                raise CudaUnavailable(f"{NAME} does not load: {error}") from error
    for folder in folders:
        if (folder / NOT_BUILT).exists():
            raise CudaUnavailable(f"they were not built: {(folder / NOT_BUILT).read_text().strip()}")
    raise CudaUnavailable("they were not built")


def _folders() -> list[Path]:
    """Where the build puts its files: beside the native module, which an editable install has elsewhere than
    the package's sources."""
    package = Path(__file__).parents[3]
    try:
        from streamllm import _native
    except ImportError:
        return [package]
    return list(dict.fromkeys([Path(_native.__file__).parent, package]))
