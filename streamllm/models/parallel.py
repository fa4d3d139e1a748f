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


def rows_in_parallel(
    function: Callable[[slice], None], rows: int, columns: int, *, elements: int = 1 << 20
) -> None:
    """Calls ``function`` with parts of ``rows`` rows of some ``elements`` elements each, on all cores."""
    in_parallel(function, parts_of(rows, max(elements // max(columns, 1), 1)))


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
