"""Which layers share a KV block.

Layers of one attention kind (full, or one sliding window) need K and V of the same positions, so they share
block tables. Where a model mixes kinds, each kind is cut into groups of equally many layers; then every block
of the pool has the same size, any group can use any block, and a group with a window gives back what left it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ELSEWHERE = (-1, -1)
"""The place of a layer whose K and V are not here."""


@dataclass(frozen=True)
class KVLayout:
    """The KV groups of a model.

    Attributes:
        windows: per group, the positions that a row sees (its own included); ``None`` for all.
        layers_per_block: layers that one block holds K and V for.
        places: per layer, (its group, its place among the group's layers); :data:`ELSEWHERE` for those that
            another process has.
    """

    windows: tuple[int | None, ...]
    layers_per_block: int
    places: tuple[tuple[int, int], ...]

    @property
    def num_groups(self) -> int:
        return len(self.windows)


def kv_layout(layer_windows: Sequence[int | None], own_layers: range | None = None) -> KVLayout:
    """The layout for layers with these windows (``None``: full attention).

    Args:
        own_layers: those whose K and V this process keeps; ``None``: all. The groups are the same whatever
            they are, so that processes with different layers share block tables: each of them spreads the
            layers that it has over all groups of their kind.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(layer_windows):
        kinds.setdefault(window, []).append(layer)
    fewest = min(map(len, kinds.values()))
    num_groups = {window: -(-len(layers) // fewest) for window, layers in kinds.items()}
    own = {
        window: [layer for layer in layers if own_layers is None or layer in own_layers]
        for window, layers in kinds.items()
    }
    layers_per_block = max(-(-len(layers) // num_groups[window]) for window, layers in own.items())
    windows: list[int | None] = []
    places = [ELSEWHERE] * len(layer_windows)
    # Full attention first: its groups decide how long a prefix hit can be.
    for window in sorted(kinds, key=lambda window: (window is not None, window)):
        for index, layer in enumerate(own[window]):
            group, place = divmod(index, layers_per_block)
            places[layer] = (len(windows) + group, place)
        windows += [window] * num_groups[window]
    return KVLayout(tuple(windows), layers_per_block, tuple(places))
