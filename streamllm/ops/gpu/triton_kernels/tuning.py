"""How kernels are tiled: tables by architecture, this package's and one as measured on the user's GPU.

A table maps an architecture to kernels, a kernel to problems, a problem to a configuration::

    {"sm_90": {"prefill": {"16-bit head=128": {"block_m": 128, "block_n": 64, ...}}}}

A problem names what is fixed as a model is loaded: dtypes, head size, group. The batch has no part in it,
because the bits of a row's result depend on its configuration. Where a problem is not in the table as it
stands, its last words are dropped one by one: first the group, then the cache's dtype. ``streamllm tune-gpu``
measures and writes the user's table, in the cache folder, which wins.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import triton

from streamllm.ops.gpu.kernels import AttentionShape
from streamllm.sources.cache import cache_folder

logger = logging.getLogger(__name__)

Table = dict[str, dict[str, dict[str, dict[str, int]]]]

PACKAGE_TABLE = Path(__file__).with_name("tuning.json")
INTERPRETED = "sm_80"
"""The architecture whose configurations and conversions are taken where there is no GPU (the interpreter)."""


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Query rows and keys of a tile, warps of a program, and stages of its loops' software pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def user_table_path() -> Path:
    """Where ``streamllm tune-gpu`` writes."""
    return cache_folder() / "triton-tuning.json"


@functools.cache
def gpu_architecture(device: Any) -> str:
    """The architecture of a torch device: ``"sm_90"``."""
    import torch

    if device.type != "cuda":
        return INTERPRETED
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


@functools.cache
def multiprocessors(device: Any) -> int:
    """How many multiprocessors a torch device has."""
    import torch

    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def tuned_as(architecture: str) -> str:
    """The architecture in the package's table whose matrix instructions this one shares. Consumer GPUs
    (sm_86, sm_89, sm_120) have those of sm_80."""
    major = int(architecture.removeprefix("sm_")) // 10
    return {9: "sm_90", 10: "sm_100", 11: "sm_100"}.get(major, "sm_80")


def tile_width(head_dim: int) -> int:
    """The columns of a tile that holds whole heads: a power of two, 16 at least (a matrix unit's k)."""
    return max(triton.next_power_of_2(head_dim), 16)


def attention_problem(q: Any, keys: Any, shape: AttentionShape) -> str:
    """The name in a table of attention with queries ``q`` over a cache like ``keys`` (tensors). Head sizes
    count as the width of their tiles."""
    words = [f"{8 * q.element_size()}-bit", f"head={tile_width(shape.head_dim)}"]
    if shape.soft_cap:
        words.append("soft-cap")
    is_int8 = keys.element_size() == 1 and not keys.is_floating_point()
    cache = "int8" if is_int8 else f"{8 * keys.element_size()}-bit"
    words += [f"cache={cache}", f"group={shape.num_heads // shape.num_kv_heads}"]
    return " ".join(words)


def attention_config(
    kernel: Literal["prefill", "decode"], architecture: str, q: Any, keys: Any, shape: AttentionShape
) -> TileConfig:
    """The tiles of an attention kernel.

    Raises:
        ValueError: the head size or the dtype is in no table.
    """
    return TileConfig(**configuration(kernel, architecture, attention_problem(q, keys, shape)))


@functools.cache
def configuration(kernel: str, architecture: str, problem: str) -> dict[str, int]:
    """The configuration in the user's table, else in the package's; asked at every launch, so read once.

    Raises:
        ValueError: neither has one.
    """
    tables = ((_user_table(), architecture), (read_table(PACKAGE_TABLE), tuned_as(architecture)))
    for table, name in tables:
        problems = table.get(name, {}).get(kernel, {})
        for words in _ever_fewer(problem.split()):
            found = problems.get(" ".join(words))
            if found is not None:
                return found
    raise ValueError(f"Triton's {kernel} kernel has no configuration for {problem} on {architecture}.")


def _ever_fewer(words: list[str]) -> Iterable[list[str]]:
    return (words[:count] for count in range(len(words), 0, -1))


def _user_table() -> Table:
    """The user's table; empty, with a warning, if it cannot be used: it only makes things faster."""
    path = user_table_path()
    try:
        return read_table(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning(
            "The tuning table %s is passed over (%s); `streamllm tune-gpu` writes it.", path, error
        )
        return {}


def read_table(path: Path) -> Table:
    """A table from its file.

    Raises:
        OSError: there is none.
        ValueError: it is not such a table.
    """
    table = json.loads(path.read_text(encoding="utf-8"))
    _check(table, 4)
    return table


def _check(node: Any, depth: int) -> None:
    if depth == 0:
        if isinstance(node, bool) or not isinstance(node, int) or node < 1:
            raise ValueError(f"{node!r} is not a positive integer")
        return
    if not isinstance(node, dict):
        raise ValueError(f"{node!r} is not an object")
    for child in node.values():
        _check(child, depth - 1)


def write_user_table(architecture: str, found: Mapping[str, Mapping[str, Any]]) -> Path:
    """Adds configurations (of a kernel's problems; dataclasses of integers) to the user's table, which is
    replaced whole; gives its path."""
    path = user_table_path()
    table = _user_table()
    for kernel, problems in found.items():
        known = table.setdefault(architecture, {}).setdefault(kernel, {})
        known.update({problem: asdict(config) for problem, config in problems.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".part")
    written.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    written.replace(path)
    configuration.cache_clear()
    return path
