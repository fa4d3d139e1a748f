"""Rotary position embeddings: frequencies, and the table of cosines and sines that kernels read.

Sources: RoFormer (arXiv:2104.09864); linear scaling, dynamic NTK and Llama 3.1's scaling as in Hugging Face
transformers; YaRN (arXiv:2309.00071). Arithmetic is float32 in transformers' order, so that positions in the
thousands, which amplify a frequency's last bit, give the same angles. Powers, cosines and sines are taken in
float64 and rounded, which is where two float32 libraries agree most.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt

from streamllm.models.model_config import RopeConfig

Float32Array = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.integer]


def inverse_frequencies(rope: RopeConfig) -> Float32Array:
    """Radians per position of each rotated pair, float32 [rotary_dim / 2].

    For ``"dynamic"`` these are the frequencies up to the trained length; see
    :func:`dynamic_inverse_frequencies`.
    """
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


def attention_factor(rope: RopeConfig) -> float:
    """What cosines and sines are multiplied by: YaRN's attention temperature, 1 for the other types."""
    if rope.rope_type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
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


class RopeTable:
    """Cosines and sines by row, in arrays that never move: a recorded plan keeps their addresses.

    For every type but ``"dynamic"`` a row's number is the position. A dynamic embedding's angles depend on
    the sequence's length too: a token at position ``p`` of a sequence whose prompt has ``L`` tokens uses the
    base for length ``max(L, p + 1)``, which is what transformers' ``generate`` does without chunking its
    prompt. Up to the trained length its rows are positions as well; beyond, they are made on demand behind
    those, and forgotten all together when ``max_dynamic_rows`` are in use.

    Not thread-safe.

    Args:
        rope: the embedding.
        num_positions: the longest sequence, in tokens.
        max_dynamic_rows: how many rows beyond the trained length are kept; at least the tokens of a batch.

    Attributes:
        cos: float32 [rows, rotary_dim / 2], the attention factor multiplied in.
        sin: the same for sines.
        is_dynamic: whether rows depend on the sequence's length, so that :meth:`rows` must be asked.
        version: how often rows have been made.
    """

    def __init__(self, rope: RopeConfig, num_positions: int, *, max_dynamic_rows: int = 16384) -> None:
        self.rope = rope
        self._scale = np.float32(attention_factor(rope))
        self._static_rows = num_positions
        self._dynamic_rows: dict[tuple[int, int], int] = {}
        self.is_dynamic = (
            rope.rope_type == "dynamic" and num_positions > rope.original_max_position_embeddings
        )
        if self.is_dynamic:
            self._static_rows = rope.original_max_position_embeddings
        self._capacity = max_dynamic_rows if self.is_dynamic else 0
        shape = (self._static_rows + self._capacity, rope.rotary_dim // 2)
        self.cos: Float32Array = np.zeros(shape, dtype=np.float32)
        self.sin: Float32Array = np.zeros(shape, dtype=np.float32)
        self.version = 0
        static = np.arange(self._static_rows)
        self._fill(static, static, inverse_frequencies(rope))

    def rows(self, positions: IntArray, sequence_lengths: IntArray) -> IntArray:
        """The row of each token; dynamic ones are made if they are not there yet.

        Args:
            positions: int [tokens].
            sequence_lengths: int [tokens]: ``max(prompt length, position + 1)`` of each token's sequence.
                Only a dynamic embedding looks at them.

        Returns:
            int [tokens], valid until the next call.

        Raises:
            ValueError: more than ``max_dynamic_rows`` different rows in one call.
        """
        if not self.is_dynamic:
            return positions
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
            self._fill(rows, positions, dynamic_inverse_frequencies(self.rope, length))

    def _fill(self, rows: IntArray, positions: IntArray, frequencies: Float32Array) -> None:
        angles = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
        self.cos[rows] = np.cos(angles).astype(np.float32) * self._scale
        self.sin[rows] = np.sin(angles).astype(np.float32) * self._scale
