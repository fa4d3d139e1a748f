"""Which kernels a GPU runs on, and why; to be asked without torch."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, get_args

from streamllm.errors import ConfigError
from streamllm.ops.gpu.cuda import library
from streamllm.ops.gpu.cuda.library import CudaUnavailable

if TYPE_CHECKING:
    import torch

    from streamllm.ops.gpu.kernels import GpuKernels

KernelsName = Literal["cuda", "triton", "reference"]
VARIABLE = "STREAMLLM_GPU_KERNELS"
"""Environment variable: the kernels to use, whatever there is."""


@dataclass(frozen=True)
class KernelChoice:
    """
    Attributes:
        name: which kernels are in use.
        why: half a sentence.
    """

    name: KernelsName
    why: str


@dataclass(frozen=True)
class ChosenKernels:
    """A choice, and the kernels themselves."""

    choice: KernelChoice
    kernels: GpuKernels


def kernel_choice() -> KernelChoice:
    """CUDA's kernels where they were built and run on this machine's GPU, else Triton's.

    Raises:
        ConfigError: what ``STREAMLLM_GPU_KERNELS`` asks for does not exist or cannot run here, or Triton or
            the C compiler that it needs is not installed.
    """
    wanted = os.environ.get(VARIABLE) or None
    if wanted not in (None, *get_args(KernelsName)):
        raise ConfigError(f"{VARIABLE} must be one of {', '.join(get_args(KernelsName))}, not {wanted!r}.")
    if wanted == "reference":
        return KernelChoice("reference", f"{VARIABLE} asks for it")
    if find_spec("triton") is None:  # CUDA's kernels too leave prompts to it
        raise ConfigError("Triton is not installed: pip install 'streamllm[gpu]' installs it.")
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        raise ConfigError("Triton needs a C compiler to launch kernels: install gcc or clang, or set CC.")
    if wanted == "triton":
        return KernelChoice("triton", f"{VARIABLE} asks for it")
    try:
        found = library.library()
    except CudaUnavailable as unavailable:
        if wanted == "cuda":
            raise ConfigError(
                f"{VARIABLE} asks for CUDA kernels, but {unavailable}; without it Triton's are used."
            ) from unavailable
        return KernelChoice("triton", f"CUDA kernels are not used: {unavailable}")
    if wanted == "cuda":
        return KernelChoice("cuda", f"{VARIABLE} asks for it")
    why = f"{found.path.name} was built for this GPU; prompts' attention and experts are Triton's"
    return KernelChoice("cuda", why)


def choose_kernels(device: torch.device) -> ChosenKernels:
    """The kernels of :func:`kernel_choice`, for one device.

    Raises:
        ConfigError: as there.
    """
    choice = kernel_choice()
    return ChosenKernels(choice, _kernels(choice.name, device))


def _kernels(name: KernelsName, device: torch.device) -> GpuKernels:
    if name == "cuda":
        from streamllm.ops.gpu.cuda_kernels import CudaKernels

        return CudaKernels.on(device, library.library())
    if name == "triton":
        from streamllm.ops.gpu.triton_kernels.kernels import TritonKernels

        return TritonKernels()
    from streamllm.ops.gpu.reference import ReferenceKernels

    return ReferenceKernels()
