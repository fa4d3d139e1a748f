"""Conversions of large tensors on all cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from streamllm.machine import available_cores

T = TypeVar("T")


def parts_of(count: int, size: int) -> list[slice]:
    """``count`` entries cut into parts of ``size``."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def in_parallel(function: Callable[[T], None], items: Sequence[T]) -> None:
    """Calls ``function`` with every item, on all cores; it should release the interpreter's lock."""
    threads = min(available_cores(), len(items))
    if threads <= 1:
        for item in items:
            function(item)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(function, items):
            pass
