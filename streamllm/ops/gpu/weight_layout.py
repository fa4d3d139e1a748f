"""How quantised weights lie on a device: one layout for all formats, and what each of them fills in.

A row is cut into tiles of 16 lanes. A lane holds 8 values (of 8-bit formats 4): the low bits of their codes
in one word, the first value's lowest, and the high bits, if the format has more than its low plane takes, in
a word of another plane. Value i of lane j in tile t is element ``(t * values_per_lane + i) * 16 + j`` of its
row, so that the i-th values of all lanes are neighbours along k, one step of a matrix instruction, and share
their factors. A tile's words of all rows lie side by side: what a program reads at a time is contiguous.

An element is ``scale * value + minimum``. ``value`` is the code less an offset, or what the code stands for
in a table or as a small float. ``scale`` is one number for ``block`` elements; or, where a block has groups,
its factor times the group's integer, and ``minimum`` likewise. Nothing of what a file holds is rounded.

Factors lie along k in 32-bit words (two float16, four bytes), a word's of all rows side by side: four bytes
are the least that a GPU's asynchronous copy moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LANES = 16
"""Lanes of a tile: a step along k of one matrix instruction."""


@dataclass(frozen=True)
class WeightLayout:
    """A quantised format on a device.

    Attributes:
        low_bits, high_bits: of a code, in either plane; without ``high_bits`` there is one plane.
        codes: what a code is: an integer; one of the 16 values of :data:`IQ4_POLYNOMIAL`; a float of 4 bits
            (twice its value is what counts, under half of its scale) or 8.
        offset: what is subtracted from integers.
        factor: how a block's scale, and its minimum, are stored: ``"e8m0"`` is a power of two's exponent.
        block: elements that share those; 0: there is one float32 scale a row, multiplied in at the very end.
        minima: whether there are minima.
        group: elements that share an integer, a factor of their block's.
        group_bits: of those integers; 0: blocks have no groups; 4: a group's minimum is in the same byte,
            above its scale.
        group_offset: what is subtracted from a group's scale.
    """

    low_bits: int
    high_bits: int = 0
    codes: Literal["integer", "iq4", "e2m1", "e4m3"] = "integer"
    offset: int = 0
    factor: Literal["float16", "float32", "e8m0"] = "float16"
    block: int = 32
    minima: bool = False
    group: int = 0
    group_bits: int = 0
    group_offset: int = 0

    @property
    def bits(self) -> int:
        """Of a code."""
        return self.low_bits + self.high_bits

    @property
    def values_per_lane(self) -> int:
        return 4 if self.low_bits == 8 else 8

    @property
    def tile(self) -> int:
        """Elements of a row in a tile."""
        return LANES * self.values_per_lane

    @property
    def factors_per_word(self) -> int:
        return {"float32": 1, "float16": 2, "e8m0": 4}[self.factor]

    @property
    def span(self) -> int:
        """Elements that share a scale."""
        return self.group or self.block

    @property
    def is_row_scaled(self) -> bool:
        return self.block == 0

    @property
    def has_group_minima(self) -> bool:
        """Whether groups' minima lie in a tensor of their own."""
        return self.minima and self.group_bits == 8


def _k_quant(low_bits: int, high_bits: int = 0, *, group: int, **rest: object) -> WeightLayout:
    """A block of 256 elements whose groups have integers."""
    return WeightLayout(low_bits, high_bits, block=256, group=group, **{"group_bits": 8, **rest})  # type: ignore[arg-type]


def _integers(bits: int, block: int) -> WeightLayout:
    return WeightLayout(bits, offset=1 << (bits - 1), factor="float32", block=block, minima=True)


IQ4_POLYNOMIAL = (103.943, -288.442, -109.546, 1055.426, -887.949)
"""What codes of ``iq4_nl`` and ``iq4_xs`` stand for (``kvalues_iq4nl`` in GGML): the integer nearest to this
polynomial of ``1 + code / 16``, highest power first. It is never farther off than 0.436, and four
multiply-adds cost less than a table that no register holds."""

LAYOUTS = {
    "q4_0": WeightLayout(4, offset=8),
    "q4_1": WeightLayout(4, minima=True),
    "q5_0": WeightLayout(4, 1, offset=16),
    "q5_1": WeightLayout(4, 1, minima=True),
    "q8_0": WeightLayout(8, offset=128),
    "q2_k": _k_quant(2, group=16, minima=True, group_bits=4),
    "q3_k": _k_quant(2, 1, group=16, offset=4, group_offset=128),
    "q4_k": _k_quant(4, group=32, minima=True),
    "q5_k": _k_quant(4, 1, group=32, minima=True),
    "q6_k": _k_quant(4, 2, group=16, offset=32, group_offset=128),
    "iq4_nl": WeightLayout(4, codes="iq4"),
    "iq4_xs": _k_quant(4, group=32, codes="iq4", group_offset=128),
    "mxfp4": WeightLayout(4, codes="e2m1", factor="e8m0"),
    **{f"int{bits}_{block}": _integers(bits, block) for bits in (4, 8) for block in (32, 64, 128)},
    "float8_e4m3": WeightLayout(8, codes="e4m3", factor="float32", block=128),
    "int8_row": WeightLayout(8, offset=128, block=0),
    "float8_row": WeightLayout(8, codes="e4m3", block=0),
}
"""By format: those of :class:`streamllm.ops.stored_rows.StoredRows`, and two with one scale a row. A dense
weight (``"dense"``) has no layout."""

PACKED_FORMATS = frozenset(name for name, layout in LAYOUTS.items() if not layout.is_row_scaled)
"""Formats of a file that stay quantised."""
