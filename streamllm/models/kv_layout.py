"""Which layers share a KV block.

Layers of one attention kind (full, or one sliding window) need K and V of the same positions, so they share
block tables. Where a model mixes kinds, each kind is cut into groups of equally many layers; then every block
of the pool has the same size, any group can use any block, and a group with a window gives back what left it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class KVLayout:
    """The KV groups of a model.

    Attributes:
        windows: per group, the positions that a row sees (its own included); ``None`` for all.
        layers_per_block: layers that one block holds K and V for.
        places: per layer, (its group, its place among the group's layers).
    """

    windows: tuple[int | None, ...]
    layers_per_block: int
    places: tuple[tuple[int, int], ...]

    @property
    def num_groups(self) -> int:
        return len(self.windows)


def kv_layout(layer_windows: Sequence[int | None]) -> KVLayout:
    """The layout for layers with these windows (``None``: full attention)."""
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(layer_windows):
        kinds.setdefault(window, []).append(layer)
    layers_per_block = min(len(layers) for layers in kinds.values())
    windows: list[int | None] = []
    places: dict[int, tuple[int, int]] = {}
    # Full attention first: its groups decide how long a prefix hit can be.
    for window in sorted(kinds, key=lambda window: (window is not None, window)):
        layers = kinds[window]
        for start in range(0, len(layers), layers_per_block):
            for place, layer in enumerate(layers[start : start + layers_per_block]):
                places[layer] = (len(windows), place)
            windows.append(window)
    return KVLayout(tuple(windows), layers_per_block, tuple(places[i] for i in range(len(layer_windows))))
