"""``streamllm collect-env``: what a bug report needs to know, in one page.

It neither loads a model nor imports torch, and says what is missing rather than fail.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib import metadata
from typing import Any

from streamllm import __version__, machine
from streamllm.config import EngineConfig

PACKAGES = (
    "numpy", "tokenizers", "jinja2", "gguf", "safetensors", "huggingface-hub", "starlette", "uvicorn",
    "uvloop", "httptools", "orjson", "msgspec", "torch", "transformers", "triton", "ray",
)  # fmt: skip

_HUGE_PAGES = {
    "always": "always: weights and KV cache lie in them",
    "madvise": "madvise: weights and KV cache ask for them",
    "never": "never: not used; `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled` allows them",
    None: "this kernel has no such setting",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(options: argparse.Namespace) -> int:
    """Print the report."""
    report = collect()
    print(json.dumps(report, indent=2) if options.json else render(report))
    return 0


def collect() -> dict[str, dict[str, Any]]:
    """The report: sections of named values (texts, numbers, lists)."""
    return {
        "streamllm": {
            "version": __version__,
            "python": f"{platform.python_version()} ({platform.python_implementation()})",
            "platform": platform.platform(),
        },
        "machine": _machine(),
        "GPU": _gpu(),
        "kernels": _kernels(),
        "weight formats": _weight_formats(),
        "KV cache": {
            "--dtype auto": EngineConfig().resolved_kv_cache_dtype,
            "--dtype float32": EngineConfig(dtype="float32").resolved_kv_cache_dtype,
        },
        "models": _models(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def render(report: dict[str, dict[str, Any]]) -> str:
    """The report as text: a block a section, names and values in two columns."""
    width = max(len(name) for section in report.values() for name in section)
    blocks = []
    for title, section in report.items():
        lines = [f"  {name:{width}}  {_shown(value)}" for name, value in section.items()]
        blocks.append("\n".join([title, *lines]))
    return "\n\n".join(blocks)


def _machine() -> dict[str, Any]:
    from streamllm.engine.memory import gib

    return {
        "CPU": machine.cpu_model() or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "cores in affinity": len(machine.allowed_cpus()),
        "CPU quota": machine.cpu_quota(),
        "cores available": machine.available_cores(),
        "NUMA nodes": _numa_nodes(),
        "memory": gib(machine.total_memory()),
        "memory available": gib(machine.available_memory()),
        "huge pages": _HUGE_PAGES.get(machine.huge_pages()),
    }


def _gpu() -> dict[str, Any]:
    from streamllm.engine.memory import gib
    from streamllm.errors import ConfigError
    from streamllm.ops.gpu.dispatch import kernel_choice

    gpus = [
        f"{gpu.name} (sm_{gpu.compute_capability[0]}{gpu.compute_capability[1]}, {gib(gpu.memory)})"
        for gpu in machine.gpus()
    ]
    driver = machine.cuda_driver_version()
    try:
        choice = kernel_choice()
        kernels = f"{choice.name}: {choice.why}"
    except ConfigError as error:
        kernels = f"none: {error}"
    return {
        "GPUs": gpus or "none that CUDA's driver shows",
        "CUDA of the driver": ".".join(map(str, driver)) if driver else "no driver that works",
        "extra gpu": _gpu_extra(),
        "GPU kernels": kernels,
    }


def _gpu_extra() -> str:
    torch, missing = _version("torch"), [name for name in ("torch", "triton") if not _version(name)]
    if missing:
        return f"not installed ({', '.join(missing)} missing): pip install 'streamllm[gpu]'"
    return "installed" if machine.has_cuda_torch() else f"torch {torch} is a build for CPUs"


def _numa_nodes() -> str:
    nodes, own = machine.numa_nodes(), machine.memory_nodes()
    if len(nodes) < 2:
        return "1"
    spread = "weights and KV cache are spread over all" if len(own) > 1 else "memory is taken there"
    return f"{len(nodes)}; this process uses {', '.join(map(str, own))}: {spread}"


def _kernels() -> dict[str, Any]:
    from streamllm.ops.instruction_set import instruction_set, native_module

    threads = {"threads": f"{machine.available_cores()}: the cores available (--threads changes it)"}
    try:
        native = native_module()
    except ImportError as error:
        return {"native module": f"not built: {error}; `pip install -e .` builds it"} | threads
    chosen = instruction_set()
    return {
        "native module": native.__file__,
        "instruction sets": list(chosen.supported),
        "in use": f"{chosen.name}: {chosen.why}",
    } | threads


def _weight_formats() -> dict[str, Any]:
    from streamllm.ops.instruction_set import instruction_set, weight_kernels

    try:
        kernels = weight_kernels(instruction_set().name)
    except ImportError:
        return {"all": "no kernels: the native module is not built"}
    return kernels | {"other GGUF types": "no kernel: dequantised to float32 as they load, with a warning"}


def _models() -> dict[str, Any]:
    from streamllm.models.registry import supported_architectures

    return {
        "as native plans": supported_architectures(),
        "eagerly, as a whole": "none (--backend torch runs any of them so, as the reference)",
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "none" if value is None else str(value)
