"""Cases that cover every pair of values of any two parameters."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

_Pair = tuple[int, int, int, int]
"""A parameter and which of its values, another one and its value."""


def pairwise_cover(parameters: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Few choices of a value for each parameter, such that any two values of any two parameters meet."""
    random_ = random.Random(seed)
    names = list(parameters)
    missing = {
        (a, i, b, j)
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(parameters[names[a]]))
        for j in range(len(parameters[names[b]]))
    }
    cases = []
    while missing:
        best: list[int] = []
        best_met: set[_Pair] = set()
        candidates = random_.choices(sorted(missing), k=20)
        for a, i, b, j in candidates:
            choice = [random_.randrange(len(parameters[name])) for name in names]
            choice[a], choice[b] = i, j
            met = missing & _pairs(choice)
            if len(met) > len(best_met):
                best, best_met = choice, met
        missing -= best_met
        cases.append({name: parameters[name][index] for name, index in zip(names, best, strict=True)})
    return cases


def _pairs(choice: Sequence[int]) -> set[_Pair]:
    return {(a, choice[a], b, choice[b]) for a, b in itertools.combinations(range(len(choice)), 2)}
