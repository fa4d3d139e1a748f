"""Models divided among ranks (threads of one process) compute what they do in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.drive import Generation, generate
from helpers.integer_checkpoints import gptq, quantise, save_quantised
from helpers.lora_adapters import save_adapter, save_merged
from helpers.sharded_runner import files_of, load_rank, on_ranks
from helpers.thread_collectives import ThreadCollectives, run_ranks
from helpers.tiny_gguf import save_tiny_gguf
from helpers.tiny_models import TINY, VOCAB_SIZE, WINDOW, make_tiny_model

from streamllm.errors import ConfigError
from streamllm.models.checkpoint import open_checkpoint
from streamllm.models.lora_adapter import read_adapter
from streamllm.models.model_config import ModelConfig
from streamllm.models.sharding_plan import make_sharding_plan
from streamllm.ops.lora import LoraLimits
from streamllm.runner.model_runner import ModelRunner

DIVISIBLE = [family for family in TINY if family not in ("olmo2", "olmo3")]
EXACT = 1e-5
"""How far float32 logits may be from those of one piece, as a part of the largest."""


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(20, VOCAB_SIZE, length).tolist() for length in lengths]


PROMPTS = prompts([1, 7, WINDOW + 10])


def run(runner: ModelRunner, rank: int = 0, **settings: Any) -> list[Generation]:
    return generate(runner, PROMPTS, max_tokens=3, budget=30, **settings)


def in_one_piece(path: Path, **changes: Any) -> list[Generation]:
    runner = load_rank(path, **changes)
    runs = run(runner)
    runner.close()
    return runs


def assert_same(runs: Sequence[Generation], expected: Sequence[Generation], tolerance: float = EXACT) -> None:
    for own, whole in zip(runs, expected, strict=True):
        logits = np.array(whole.logits)
        np.testing.assert_allclose(
            np.array(own.logits), logits, rtol=0, atol=tolerance * np.abs(logits).max()
        )
        assert own.output == whole.output


def check(path: Path, size: int, backend: str = "cpu", tolerance: float = EXACT, **changes: Any) -> None:
    """Every rank has the logits, and draws the tokens, of a model in one piece."""
    expected = in_one_piece(path, backend=backend, **changes)
    for runs in on_ranks(path, size, run, backend=backend, **changes):
        assert_same(runs, expected, tolerance)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = make_tiny_model(tmp_path_factory.mktemp(family), family)
        return made[family]

    return get


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("family", DIVISIBLE)
def test_two_ranks_compute_what_one_does(model, family, backend):
    check(model(family), 2, backend)


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt-post-norm", "gpt-oss"])
def test_two_ranks_on_gpus_compute_what_one_does(model, family):
    check(model(family), 2, "gpu")


@pytest.mark.parametrize(
    "family", ["gpt2", *(pytest.param(slow, marks=pytest.mark.slow) for slow in ("llama", "qwen2moe"))]
)
def test_captured_graphs_have_the_sums_in_them(model, family):
    check(model(family), 2, "gpu-graphs")


SIX_HEADS = {"num_attention_heads": 6, "hidden_size": 96}
SHAPES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "three ranks": ("llama", 3, {**SIX_HEADS, "num_key_value_heads": 3, "head_dim": 16}),
    "three ranks, fused": ("phi3", 3, {**SIX_HEADS, "num_key_value_heads": 3}),
    "three ranks, stacked": ("gpt2", 3, SIX_HEADS),
    "three ranks of experts": ("gpt-oss", 3, {"num_attention_heads": 6, "num_key_value_heads": 3}),
    "nine heads on two ranks": (
        "llama", 2, {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 8},
    ),
    "one key/value head on two ranks": ("llama", 2, {"num_key_value_heads": 1}),
    "two key/value heads on four ranks": ("qwen3", 4, {"num_key_value_heads": 2}),
    "tied and biased": ("llama", 2, {"tied": True, "attention_bias": True, "mlp_bias": True}),
    "odd sizes": ("llama", 2, {"intermediate_size": 77, "vocab_size": 321}),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("shape", SHAPES)
def test_uneven_and_shared_parts(tmp_path, shape, backend):
    family, size, fields = SHAPES[shape]
    check(make_tiny_model(tmp_path, family, **fields), size, backend)


def test_every_rank_keeps_only_its_heads_and_weights(model):
    whole = load_rank(model("llama"), backend="torch")
    sizes = on_ranks(
        model("llama"), 2, lambda runner, _: (runner.weight_bytes, runner.kv_cache_bytes), backend="torch"
    )
    assert all(2 * kv == whole.kv_cache_bytes for _, kv in sizes)
    norms = 4 * 64 * 5
    assert [weights for weights, _ in sizes] == [(whole.weight_bytes - norms) // 2 + norms] * 2


def test_a_sum_for_each_attention_mlp_and_embedding(model):
    def calls(collectives: ThreadCollectives) -> list[tuple[str, tuple[int, ...]]]:
        run(load_rank(model("llama"), collectives, backend="torch"))
        return collectives.calls

    first, second = run_ranks(2, calls)
    assert first == second
    assert [name for name, _ in first[:6]] == ["all_reduce"] * 5 + ["gather_columns"]
    assert first[5][1][1] == VOCAB_SIZE // 2


def save_gguf(folder: Path, family: str, quantization: str, **fields: Any) -> Path:
    save_tiny_gguf(folder / "m.gguf", family, quantization=quantization, **fields)
    return folder / "m.gguf"


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "mixtral"])
def test_a_gguf_in_float32(tmp_path, family):
    check(save_gguf(tmp_path, family, "Q8_0"), 2)


PACKED_TOLERANCE = 0.03
"""Products with quantised weights round what they are multiplied by to 8 bits: a sum's last bit, which its
order decides, can become a step of those."""


@pytest.mark.parametrize("quantization", ["Q4_1", "Q8_0", "F16"])
def test_packed_blocks_stay_packed(tmp_path, quantization, caplog):
    path = save_gguf(tmp_path, "llama", quantization, tied=True)
    whole = load_rank(path, weight_mode="packed")
    ranks = on_ranks(path, 2, lambda runner, _: runner.weight_bytes, weight_mode="packed")
    norms = 4 * 64 * 5
    # The MLP's three blocks of 32 columns are cut into two and one.
    assert sum(ranks) <= (whole.weight_bytes + norms) * 1.2
    assert not any("float32" in line for line in caplog.messages)
    check_packed(path)


def test_blocks_too_large_become_float32(tmp_path, caplog):
    path = save_gguf(
        tmp_path, "llama", "Q4_K", hidden_size=256, intermediate_size=512, num_attention_heads=4, head_dim=64
    )
    check_packed(path)
    (line,) = (line for line in caplog.messages if "float32" in line)
    assert "2 matrices such as model.layers.0.self_attn.o_proj.weight have blocks (q4_k)" in line


def test_gptq_stays_packed(tmp_path):
    made = save_quantised(
        tmp_path,
        gptq(4),
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        lambda weight: quantise(weight, 4, 32, symmetric=False),
    )
    check_packed(made.path)
    check_packed(made.path, "gpu")
    check(made.path, 2)


def check_packed(path: Path, backend: str = "cpu") -> None:
    """The first logits of each prompt, since a token that is drawn otherwise changes all that follow."""
    expected = in_one_piece(path, weight_mode="packed", backend=backend)
    for runs in on_ranks(path, 2, run, weight_mode="packed", backend=backend):
        for own, whole in zip(runs, expected, strict=True):
            scale = np.abs(whole.logits[0]).max()
            np.testing.assert_allclose(own.logits[0], whole.logits[0], rtol=0, atol=PACKED_TOLERANCE * scale)


@pytest.mark.parametrize(
    ("family", "backend"),
    [("llama", "torch"), ("llama", "cpu"), ("phi3", "cpu"), ("gpt2", "cpu"), ("phi3", "gpu")],
)
def test_adapters_add_to_every_ranks_part(model, tmp_path, family, backend):
    base = model(family)
    fields = {"target_modules": ["c_attn", "c_proj", "c_fc"]} if family == "gpt2" else {}
    adapter_path = save_adapter(tmp_path / "adapter", base, seed=1, rank=5, **fields)
    merged = in_one_piece(save_merged(tmp_path / "merged", base, adapter_path), backend=backend)
    plain = in_one_piece(base, backend=backend)
    files = files_of(base)
    config = ModelConfig.from_files(files)
    checkpoint = open_checkpoint(files, config)
    adapter = read_adapter("a", adapter_path, config, max_rank=8)

    def generate_with_adapter(runner: ModelRunner, rank: int) -> list[Generation]:
        plan = make_sharding_plan(config, checkpoint.format, rank=rank, size=2)
        own = plan.shard_adapter(adapter)
        return run(runner, adapters=[own, None, own])

    limits = LoraLimits(max_loras=2, max_rank=8)
    for runs in on_ranks(base, 2, generate_with_adapter, backend=backend, lora=limits):
        assert_same([runs[0], runs[2]], [merged[0], merged[2]], tolerance=2e-5)
        assert_same([runs[1]], [plain[1]])


def test_what_cannot_be_divided_is_refused(model):
    with pytest.raises(ConfigError, match="q_norm is over all heads together"):
        on_ranks(model("olmo2"), 2, run)
