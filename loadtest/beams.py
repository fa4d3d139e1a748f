"""Decisions that beam searches of the default model took, and their replay.

A recording holds, for each step of a search, every new beam's parent and token. The replay gives the engine's
own :class:`BeamSearch` candidates among which exactly those win, so that forks, copies and dropped beams
come in the order in which the model caused them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

RECORDINGS = Path(__file__).parent / "data" / "beams.json"
_GAP = 1e-3
"""Score between one beam and the next worse one in a replay."""


@dataclass(frozen=True, slots=True)
class Recording:
    """One search.

    Attributes:
        width: beams.
        parents, tokens: ``[steps][width]``; the first step's parents are all 0, the prompt.
    """

    width: int
    parents: list[list[int]]
    tokens: list[list[int]]

    def decisions(self, step: int) -> list[tuple[int, int]]:
        """(parent, token) of each beam that step number ``step`` (0, 1, ...) leaves, best first. Searches
        longer than the recording go through it again from its second step on."""
        if step >= len(self.parents):
            step = 1 + (step - 1) % (len(self.parents) - 1)
        return list(zip(self.parents[step], self.tokens[step], strict=True))

    def candidates(self, step: int, beam: int) -> list[tuple[int, float]]:
        """(token, logprob) that beam number ``beam`` must report in a step for the search to decide so:
        after ``t`` steps the beam of rank ``r`` has the score ``-t - r * gap``."""
        return [
            (token, -1.0 - (rank - beam) * _GAP)
            for rank, (parent, token) in enumerate(self.decisions(step))
            if parent == beam
        ]


def load_recordings(path: Path = RECORDINGS) -> dict[int, list[Recording]]:
    """Recordings by width."""
    recordings: dict[int, list[Recording]] = {}
    for entry in json.loads(path.read_text())["searches"]:
        recording = Recording(entry["width"], entry["parents"], entry["tokens"])
        recordings.setdefault(recording.width, []).append(recording)
    return recordings
