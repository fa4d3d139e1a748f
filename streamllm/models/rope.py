"""Rotary position embeddings: frequencies, and the table of cosines and sines that kernels read.

Sources: RoFormer (arXiv:2104.09864); linear scaling, dynamic NTK and Llama 3.1's scaling as in Hugging Face
transformers; YaRN (arXiv:2309.00071); LongRoPE (arXiv:2402.13753). Arithmetic is float32 in transformers'
order, so that positions in the thousands, which amplify a frequency's last bit, give the same angles. Powers,
cosines and sines are taken in float64 and rounded, which is where two float32 libraries agree most.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from streamllm.models.model_config import RopeConfig

Float32Array = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.integer]


def inverse_frequencies(rope: RopeConfig) -> Float32Array:
    """Radians per position of each rotated pair, float32 [rotary_dim / 2].

    For ``"dynamic"`` and ``"longrope"`` these are the frequencies up to the trained length; see
    :func:`frequencies_at`.
    """
    if rope.rope_type == "longrope":
        return _longrope(rope, rope.short_factors)
    if rope.rope_type == "yarn":
        frequencies = _yarn(rope)
    elif rope.rope_type == "llama3":
        frequencies = _llama3(rope)
    else:
        frequencies = np.reciprocal(_powers(rope.theta, rope.rotary_dim))
        if rope.rope_type == "linear":
            frequencies /= np.float32(rope.factor)
    if rope.frequency_factors is not None:
        frequencies /= np.asarray(rope.frequency_factors, dtype=np.float32)
    return frequencies


def dynamic_inverse_frequencies(rope: RopeConfig, sequence_length: int) -> Float32Array:
    """Frequencies of a ``"dynamic"`` (NTK-aware) embedding for a sequence of this many tokens.

    The base grows once the sequence is longer than ``original_max_position_embeddings``. It is
    computed in float32, as transformers does.

    Returns:
        float32 [rotary_dim / 2].
    """
    trained = rope.original_max_position_embeddings
    if sequence_length <= trained:
        return inverse_frequencies(rope)
    stretch = np.float32(rope.factor) * np.float32(sequence_length) / np.float32(trained)
    stretch = stretch - np.float32(rope.factor - 1)
    exponent = rope.rotary_dim / (rope.rotary_dim - 2)
    base = np.float32(rope.theta) * np.float32(float(stretch) ** float(np.float32(exponent)))
    return np.reciprocal(_powers(float(base), rope.rotary_dim))


def depends_on_length(rope: RopeConfig, sequence_length: int) -> bool:
    """Whether the angles of a sequence of so many tokens are others than those of a short one."""
    scaled = rope.rope_type in ("dynamic", "longrope")
    return scaled and sequence_length > rope.original_max_position_embeddings


def restart_length(ropes: Sequence[RopeConfig]) -> int:
    """The longest sequence whose keys are no use to a longer one, in tokens; 0 where there is none.

    A ``"longrope"`` sequence that grows beyond it is computed anew with its other angles, as transformers'
    ``generate`` does for Phi-3.
    """
    trained = [rope.original_max_position_embeddings for rope in ropes if rope.rope_type == "longrope"]
    return min(trained, default=0)


def frequencies_at(rope: RopeConfig, sequence_length: int) -> Float32Array:
    """The frequencies for a sequence of so many tokens, float32 [rotary_dim / 2]."""
    if rope.rope_type == "dynamic":
        return dynamic_inverse_frequencies(rope, sequence_length)
    if rope.rope_type == "longrope" and depends_on_length(rope, sequence_length):
        return _longrope(rope, rope.long_factors)
    return inverse_frequencies(rope)


def attention_factor(rope: RopeConfig) -> float:
    """What cosines and sines are multiplied by: YaRN's and LongRoPE's temperature, 1 for other types."""
    if rope.rope_type not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.rope_type == "longrope":
        trained = rope.original_max_position_embeddings
        return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(trained))
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_mscale(rope.factor, rope.mscale) / _yarn_mscale(rope.factor, rope.mscale_all_dim)
    return _yarn_mscale(rope.factor, 1.0)


def _yarn_mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _powers(base: float, dim: int) -> Float32Array:
    """base ** (2i / dim) for each pair i, float32 [dim / 2]."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.power(float(np.float32(base)), exponents.astype(np.float64)).astype(np.float32)


def _llama3(rope: RopeConfig) -> Float32Array:
    plain = 1 / _powers(rope.theta, rope.rotary_dim)
    trained, factor = np.float32(rope.original_max_position_embeddings), np.float32(rope.factor)
    low, high = np.float32(rope.low_freq_factor), np.float32(rope.high_freq_factor)
    # torch divides a scalar by a tensor as reciprocal times scalar: two roundings, kept here.
    wavelengths = (1 / plain) * np.float32(2 * math.pi)
    scaled = np.where(wavelengths > trained / low, plain / factor, plain)
    smooth = ((1 / wavelengths) * trained - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    is_medium = ~(wavelengths < trained / high) & ~(wavelengths > trained / low)
    return np.where(is_medium, smoothed, scaled).astype(np.float32)


def _yarn(rope: RopeConfig) -> Float32Array:
    dim = rope.rotary_dim

    def correction_dim(rotations: float) -> float:
        """The dimension that turns this many times over the trained length."""
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # transformers' guard against 0 / 0
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = 1 - np.clip(ramp, 0, 1).astype(np.float32)
    powers = _powers(rope.theta, dim)
    return (1 / (np.float32(rope.factor) * powers)) * (1 - keep) + (1 / powers) * keep


def _longrope(rope: RopeConfig, factors: tuple[float, ...] | None) -> Float32Array:
    return np.reciprocal(np.asarray(factors, dtype=np.float32) * _powers(rope.theta, rope.rotary_dim))


class RopeTable:
    """Cosines and sines by row, in arrays that never move: a recorded plan keeps their addresses.

    A model may have several embeddings (Gemma 3's layers with and without a window); each has its own arrays
    and all have the same rows.

    For most types a row's number is the position. Two depend on the sequence's length too. A token at
    position ``p`` of a sequence whose prompt has ``L`` tokens uses the base that ``"dynamic"`` has for length
    ``max(L, p + 1)``, which is what transformers' ``generate`` does without chunking its prompt. Up to the
    trained length its rows are positions as well; beyond, they are made on demand behind those, and forgotten
    all together when ``max_dynamic_rows`` are in use. ``"longrope"`` has a second set of rows, for lengths
    beyond the trained one, made at once.

    Not thread-safe.

    Args:
        ropes: the embeddings.
        num_positions: the longest sequence, in tokens.
        max_dynamic_rows: how many rows beyond the trained length are kept; at least the tokens of a batch.

    Attributes:
        cos: float32 [rows, rotary_dim / 2] for each embedding, the attention factor multiplied in.
        sin: the same for sines.
        is_dynamic: whether rows depend on the sequence's length, so that :meth:`rows` must be asked.
        version: how often rows have been made.
    """

    def __init__(
        self, ropes: Sequence[RopeConfig], num_positions: int, *, max_dynamic_rows: int = 16384
    ) -> None:
        self.ropes = tuple(ropes)
        trained = [
            rope.original_max_position_embeddings for rope in ropes if depends_on_length(rope, num_positions)
        ]
        self.is_dynamic = bool(trained)
        self._static_rows = min(trained, default=num_positions)
        self._dynamic_rows: dict[tuple[int, int], int] = {}
        self._capacity = max_dynamic_rows if self.is_dynamic else 0
        types = {rope.rope_type for rope in ropes if depends_on_length(rope, num_positions)}
        self._has_second_set = types == {"longrope"} and len(set(trained)) == 1
        if self._has_second_set:
            self._capacity = num_positions
        shapes = [(self._static_rows + self._capacity, rope.rotary_dim // 2) for rope in ropes]
        self.cos: tuple[Float32Array, ...] = tuple(np.zeros(shape, np.float32) for shape in shapes)
        self.sin: tuple[Float32Array, ...] = tuple(np.zeros(shape, np.float32) for shape in shapes)
        self.version = 0
        static = np.arange(self._static_rows)
        self._fill(static, static, sequence_length=0)
        if self._has_second_set:
            positions = np.arange(num_positions)
            self._fill(self._static_rows + positions, positions, sequence_length=num_positions)

    def rows(self, positions: IntArray, sequence_lengths: IntArray) -> IntArray:
        """The row of each token; dynamic ones are made if they are not there yet.

        Args:
            positions: int [tokens].
            sequence_lengths: int [tokens]: ``max(prompt length, position + 1)`` of each token's sequence.
                Only embeddings that depend on them look at them.

        Returns:
            int [tokens], valid until the next call.

        Raises:
            ValueError: more than ``max_dynamic_rows`` different rows in one call.
        """
        if not self.is_dynamic:
            return positions
        if self._has_second_set:
            offsets = (sequence_lengths > self._static_rows) * self._static_rows
            return positions + offsets.astype(positions.dtype)
        beyond = np.flatnonzero(sequence_lengths > self._static_rows)
        if not len(beyond):
            return positions
        keys = [(int(sequence_lengths[i]), int(positions[i])) for i in beyond]
        self._make_dynamic_rows(set(keys))
        rows = positions.copy()
        rows[beyond] = [self._dynamic_rows[key] for key in keys]
        return rows

    def _make_dynamic_rows(self, keys: set[tuple[int, int]]) -> None:
        """``keys`` are (sequence length, position)."""
        if len(keys) > self._capacity:
            raise ValueError(
                f"{len(keys)} dynamic rotary rows are needed at once; there are {self._capacity}"
            )
        missing = sorted(key for key in keys if key not in self._dynamic_rows)
        if len(self._dynamic_rows) + len(missing) > self._capacity:
            self._dynamic_rows.clear()
            missing = sorted(keys)
        if missing:
            self.version += 1
        start = self._static_rows + len(self._dynamic_rows)
        self._dynamic_rows.update((key, start + i) for i, key in enumerate(missing))
        for length, group in itertools.groupby(missing, key=lambda key: key[0]):
            positions = np.array([position for _, position in group])
            first = self._dynamic_rows[length, int(positions[0])]
            rows = np.arange(first, first + len(positions))
            self._fill(rows, positions, sequence_length=length)

    def _fill(self, rows: IntArray, positions: IntArray, *, sequence_length: int) -> None:
        for rope, cos, sin in zip(self.ropes, self.cos, self.sin, strict=True):
            frequencies = frequencies_at(rope, sequence_length)
            scale = np.float32(attention_factor(rope))
            angles = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
            cos[rows] = np.cos(angles).astype(np.float32) * scale
            sin[rows] = np.sin(angles).astype(np.float32) * scale
