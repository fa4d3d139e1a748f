"""Frequencies and tables against transformers' own functions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from streamllm.models.model_config import RopeConfig
from streamllm.models.rope import (
    RopeTable,
    attention_factor,
    dynamic_inverse_frequencies,
    inverse_frequencies,
    restart_length,
)

HEAD_DIM = 64
MAX_POSITIONS = 512

CASES = {
    "default": {"rope_type": "default", "theta": 10000.0},
    "default, large base": {"rope_type": "default", "theta": 1e6},
    "linear": {"rope_type": "linear", "theta": 10000.0, "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {
        "rope_type": "yarn",
        "theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn, all fields": {
        "rope_type": "yarn",
        "theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
        "truncate": False,
    },
    "yarn, attention factor": {
        "rope_type": "yarn",
        "theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.25,
    },
}
DYNAMIC = RopeConfig(
    rope_type="dynamic",
    theta=10000.0,
    rotary_dim=HEAD_DIM,
    factor=2.0,
    original_max_position_embeddings=MAX_POSITIONS,
)


LONGROPE_FIELDS = {
    "rope_type": "longrope",
    "theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "short_factor": [1.0 + 0.02 * i for i in range(HEAD_DIM // 2)],
    "long_factor": [1.3 + 0.4 * i for i in range(HEAD_DIM // 2)],
}
LONGROPE = RopeConfig(
    rope_type="longrope",
    theta=10000.0,
    rotary_dim=HEAD_DIM,
    factor=4.0,
    original_max_position_embeddings=128,
    short_factors=tuple(LONGROPE_FIELDS["short_factor"]),
    long_factors=tuple(LONGROPE_FIELDS["long_factor"]),
)


def transformers_config(fields: dict) -> transformers.LlamaConfig:
    parameters = {"rope_theta" if name == "theta" else name: value for name, value in fields.items()}
    return transformers.LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters=parameters,
    )


def in_ulps(actual: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, in units of the last place of the expected float32."""
    return float(np.max(np.abs(actual - expected) / np.spacing(np.abs(expected))))


@pytest.mark.parametrize("case", CASES)
def test_frequencies_equal_those_of_transformers(case: str) -> None:
    fields = CASES[case]
    rope = RopeConfig(rotary_dim=HEAD_DIM, **fields)
    config = transformers_config(fields)
    if fields["rope_type"] == "default":
        expected, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[fields["rope_type"]](config)

    actual = inverse_frequencies(rope)

    assert actual.dtype == np.float32
    assert in_ulps(actual, expected.numpy()) <= 1
    assert attention_factor(rope) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_table_equals_the_rotary_module_of_transformers(case: str) -> None:
    fields = CASES[case]
    module = LlamaRotaryEmbedding(transformers_config(fields))
    positions = np.array([0, 1, 2, 127, 128, 511, 3000])
    cos, sin = module(torch.zeros(1), torch.from_numpy(positions)[None])

    table = RopeTable([RopeConfig(rotary_dim=HEAD_DIM, **fields)], 3001)
    rows = table.rows(positions, positions + 1)

    assert not table.is_dynamic
    assert np.array_equal(rows, positions)
    assert table.cos[0].shape == (3001, HEAD_DIM // 2)
    # One last place of a frequency is an angle of 3000 * 2**-24 at the last position.
    np.testing.assert_allclose(table.cos[0][rows], cos[0, :, : HEAD_DIM // 2].numpy(), atol=3e-4, rtol=0)
    np.testing.assert_allclose(table.sin[0][rows], sin[0, :, : HEAD_DIM // 2].numpy(), atol=3e-4, rtol=0)
    np.testing.assert_allclose(table.cos[0][rows[:3]], cos[0, :3, : HEAD_DIM // 2].numpy(), atol=3e-7, rtol=0)


@pytest.mark.parametrize("length", [1, 511, 512, 513, 700, 1500, 4096])
def test_dynamic_frequencies_equal_those_of_transformers(length: int) -> None:
    config = transformers_config({"rope_type": "dynamic", "theta": 10000.0, "factor": 2.0})
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=torch.tensor(length))

    actual = dynamic_inverse_frequencies(DYNAMIC, length)

    assert in_ulps(actual, expected.numpy()) <= 2


def test_a_dynamic_table_follows_generate_through_prompt_and_decode() -> None:
    """A prompt of 600 tokens at once, then two tokens, on a model trained for 512 positions."""
    module = LlamaRotaryEmbedding(
        transformers_config({"rope_type": "dynamic", "theta": 10000.0, "factor": 2.0})
    )
    prompt_length, table = 600, RopeTable([DYNAMIC], 1024)
    for positions in (np.arange(prompt_length), np.array([600]), np.array([601])):
        cos, sin = module(torch.zeros(1), torch.from_numpy(positions)[None])
        rows = table.rows(positions, np.maximum(prompt_length, positions + 1))
        np.testing.assert_allclose(table.cos[0][rows], cos[0, :, : HEAD_DIM // 2].numpy(), atol=2e-4, rtol=0)
        np.testing.assert_allclose(table.sin[0][rows], sin[0, :, : HEAD_DIM // 2].numpy(), atol=2e-4, rtol=0)


def test_dynamic_rows_do_not_depend_on_chunks_or_on_what_was_asked_before() -> None:
    lengths = np.full(600, 600, dtype=np.int32)
    positions = np.arange(600, dtype=np.int32)
    whole, chunked = RopeTable([DYNAMIC], 1024), RopeTable([DYNAMIC], 1024, max_dynamic_rows=700)
    expected = whole.cos[0][whole.rows(positions, lengths)]
    chunked.rows(np.arange(50) + 700, np.full(50, 800))
    for start in range(0, 600, 100):
        chunk = slice(start, start + 100)
        rows = chunked.rows(positions[chunk], lengths[chunk])
        assert rows.dtype == np.int32
        assert np.array_equal(chunked.cos[0][rows], expected[chunk])


def test_dynamic_rows_are_bounded_and_their_addresses_fixed() -> None:
    table = RopeTable([DYNAMIC], 4096, max_dynamic_rows=64)
    address, num_rows = table.cos[0].ctypes.data, len(table.cos[0])
    for position in range(600, 1000):
        row = table.rows(np.array([position]), np.array([position + 1]))
        angles = np.float32(position) * dynamic_inverse_frequencies(DYNAMIC, position + 1)
        np.testing.assert_allclose(table.cos[0][row[0]], np.cos(angles), atol=1e-6)
    assert (table.cos[0].ctypes.data, len(table.cos[0])) == (address, num_rows)
    assert num_rows == MAX_POSITIONS + 64
    with pytest.raises(ValueError, match="65 dynamic rotary rows"):
        table.rows(np.arange(65), np.full(65, 700))


def test_a_short_dynamic_model_needs_no_dynamic_rows() -> None:
    table = RopeTable([DYNAMIC], MAX_POSITIONS)
    assert not table.is_dynamic
    assert len(table.cos[0]) == MAX_POSITIONS


def test_a_longrope_table_has_rows_for_short_and_for_long_sequences() -> None:
    module = LlamaRotaryEmbedding(transformers_config(LONGROPE_FIELDS))
    table = RopeTable([LONGROPE], 400)
    assert table.is_dynamic
    for length in (1, 127, 128, 129, 400):
        positions = np.arange(length, dtype=np.int32)
        rows = table.rows(positions, np.full(length, length, dtype=np.int32))
        cos, sin = module(torch.zeros(1), torch.from_numpy(positions)[None])
        assert rows.dtype == np.int32
        for actual, expected in ((table.cos, cos), (table.sin, sin)):
            np.testing.assert_allclose(actual[0][rows], expected[0, :, : HEAD_DIM // 2].numpy(), atol=3e-5)
    assert table.version == 0
    assert attention_factor(LONGROPE) == pytest.approx(module.attention_scaling, rel=1e-12)


def test_a_longrope_table_of_short_sequences_alone_has_no_other_rows() -> None:
    table = RopeTable([LONGROPE], 128)
    assert not table.is_dynamic
    assert len(table.cos[0]) == 128


def test_sequences_start_over_where_a_longrope_embedding_changes() -> None:
    assert restart_length([]) == restart_length([DYNAMIC]) == 0
    assert restart_length([DYNAMIC, LONGROPE]) == 128


def test_frequency_factors_divide_the_frequencies() -> None:
    factors = tuple(float(i + 1) for i in range(HEAD_DIM // 2))
    plain = RopeConfig(rope_type="default", theta=10000.0, rotary_dim=HEAD_DIM)
    scaled = RopeConfig(rope_type="default", theta=10000.0, rotary_dim=HEAD_DIM, frequency_factors=factors)
    np.testing.assert_allclose(inverse_frequencies(scaled) * factors, inverse_frequencies(plain), rtol=1e-6)
