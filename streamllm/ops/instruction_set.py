"""Which of the compiled kernels run here, and why; to be asked without a model."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from streamllm.machine import cpu_flags

_DOT_PRODUCTS = {
    "avx512_vnni": "vpdpbusd on 512 bits",
    "avx512": "vpmaddubsw on 512 bits",
    "avx_vnni": "vpdpbusd on 256 bits",
    "avx2": "vpmaddubsw on 256 bits",
    "portable": "16-bit products, as the compiler vectorises them",
}
_MULTIPLY_ADDS = {
    "avx512_vnni": "float32 FMA on 512 bits",
    "avx512": "float32 FMA on 512 bits",
    "avx_vnni": "float32 FMA on 256 bits",
    "avx2": "float32 FMA on 256 bits",
    "portable": "float32 products and sums, as the compiler vectorises them",
}
_FLOATS = {
    "float32": "",
    "float16": "16 bits widened in registers, ",
    "bfloat16": "16 bits widened in registers, ",
    "float8_e4m3": "8 bits widened in the first-level cache, ",
}
"""Formats whose products take activations as float32, and how they become that themselves."""
_AVX2_FLAGS = ("avx2", "fma", "f16c")


@dataclass(frozen=True)
class InstructionSet:
    """The instruction set of the kernels.

    Attributes:
        name: of the one in use.
        supported: those that kernels were compiled for and this CPU has, best first.
        why: why it is the one in use.
    """

    name: str
    supported: tuple[str, ...]
    why: str


def native_module() -> ModuleType:
    """The compiled kernels.

    Raises:
        ImportError: they are not built for this Python.
    """
    from streamllm import _native

    return _native


def instruction_set() -> InstructionSet:
    """
    Raises:
        ImportError: the native module is not built.
    """
    native = native_module()
    name, supported = native.instruction_set(), tuple(native.instruction_sets())
    return InstructionSet(name, supported, _why(name, supported))


def weight_kernels(name: str) -> dict[str, str]:
    """How the instruction set ``name`` multiplies with each format of packed weights.

    Raises:
        ImportError: the native module is not built.
    """
    return {stored_as: _kernel(stored_as, name) for stored_as in native_module().weight_formats()}


def _why(name: str, supported: tuple[str, ...]) -> str:
    if name != supported[0]:
        return f"chosen by hand; {supported[0]} would be the best"
    if name != "portable":
        return "best of those this CPU supports"
    missing = [flag for flag in _AVX2_FLAGS if flag not in cpu_flags()]
    return f"this CPU lacks {', '.join(missing)}; slow" if missing else "the only one compiled here; slow"


def _kernel(stored_as: str, name: str) -> str:
    if stored_as not in _FLOATS:
        return f"packed; activations in 8 bits, {_DOT_PRODUCTS[name]}"
    return f"packed; {_FLOATS[stored_as]}{_MULTIPLY_ADDS[name]}"
