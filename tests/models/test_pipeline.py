"""Models in stages against whole ones, bit for bit, and what a stage has of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.drive import Generation, generate
from helpers.lora_adapters import save_adapter
from helpers.sharded_runner import files_of, load_rank
from helpers.staged_runner import staged
from helpers.thread_collectives import run_ranks
from helpers.tiny_gguf import save_tiny_gguf
from helpers.tiny_models import TINY, VOCAB_SIZE, make_tiny_model
from hypothesis import given
from hypothesis import strategies as st

from streamllm.errors import ConfigError
from streamllm.models.checkpoint import open_checkpoint
from streamllm.models.kv_layout import ELSEWHERE, kv_layout
from streamllm.models.lora_adapter import read_adapter
from streamllm.models.model_config import ModelConfig
from streamllm.models.pipeline import StageCheckpoint, StageOps, StagePlan, divide_layers, make_stage_plan
from streamllm.models.tensor_shapes import expected_shapes
from streamllm.ops.collectives import buffer_collectives
from streamllm.ops.lora import LoraLimits
from streamllm.ops.torch_ops import TorchOps
from streamllm.runner.model_runner import ModelRunner

PROMPTS = [
    [int(token) for token in np.random.default_rng(length).integers(0, VOCAB_SIZE, length)]
    for length in (70, 3, 40, 1, 17)
]
FULL, SLIDING = "full_attention", "sliding_attention"
SIX_LAYERS = {"num_hidden_layers": 6, "layer_types": [SLIDING, SLIDING, FULL] * 2}


def in_one_piece(path: Path, **settings: Any) -> list[Generation]:
    runner = load_rank(path, **settings)
    try:
        return generate(runner, PROMPTS, max_tokens=3)
    finally:
        runner.close()


def check(path: Path, num_stages: int, *, num_parts: int = 1, **settings: Any) -> None:
    expected = in_one_piece(path, **settings)
    with staged(path, num_stages, num_parts=num_parts, **settings) as runner:
        assert_same_bits(generate(runner, PROMPTS, max_tokens=3), expected)


def assert_same_bits(found: list[Generation], expected: list[Generation]) -> None:
    for own, whole in zip(found, expected, strict=True):
        assert own.output == whole.output
        np.testing.assert_array_equal(own.logits, whole.logits)


def opened(path: Path) -> tuple[ModelConfig, Any]:
    files = files_of(path)
    config = ModelConfig.from_files(files)
    return config, open_checkpoint(files, config)


def plans_of(path: Path, num_stages: int) -> list[StagePlan]:
    config, checkpoint = opened(path)
    return [
        make_stage_plan(config, checkpoint.num_bytes, stage=stage, num_stages=num_stages)
        for stage in range(num_stages)
    ]


@pytest.mark.parametrize("family", TINY)
def test_two_stages_compute_the_bits_of_one(family, tmp_path):
    check(make_tiny_model(tmp_path, family), 2, num_parts=2)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mixtral", "granite"])
def test_three_stages_with_layers_in_uneven_parts(family, tmp_path):
    check(make_tiny_model(tmp_path, family, num_hidden_layers=5), 3, num_parts=3)


@pytest.mark.parametrize("backend", ["torch", "gpu", pytest.param("gpu-graphs", marks=pytest.mark.slow)])
def test_on_every_backend(backend, tmp_path):
    check(make_tiny_model(tmp_path, "gemma3", **SIX_LAYERS), 3, backend=backend)


@pytest.mark.parametrize(
    ("family", "quantization", "fields"),
    [
        ("llama", "Q4_1", {"tied": True}),
        ("gemma3", "Q8_0", {}),
        ("mixtral", "Q4_1", {}),
        ("qwen2", "Q6_K", {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}),
    ],
)
def test_packed_weights(family, quantization, fields, tmp_path):
    """Also what products with quantised weights read, which one process may write quantised, is the same."""
    path = tmp_path / "m.gguf"
    save_tiny_gguf(path, family, quantization=quantization, **fields)
    check(path, 2, num_parts=2, weight_mode="packed")


def test_float16_weights(tmp_path):
    check(make_tiny_model(tmp_path, "qwen3", dtype="bfloat16", tied=True), 2, weight_mode="packed")


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss"])
def test_stages_of_several_ranks(family, tmp_path):
    """The sums of each stage's ranks are those of as many ranks without stages."""
    path = make_tiny_model(tmp_path, family, num_hidden_layers=3)
    with staged(path, 1, size=2) as runner:
        expected = generate(runner, PROMPTS, max_tokens=3)
    with staged(path, 2, size=2, num_parts=2) as runner:
        assert_same_bits(generate(runner, PROMPTS, max_tokens=3), expected)
    whole = in_one_piece(path)
    for own, one in zip(expected, whole, strict=True):
        np.testing.assert_allclose(own.logits, one.logits, rtol=0, atol=1e-3)


def test_adapters_add_to_the_layers_of_each_stage(tmp_path):
    path = make_tiny_model(tmp_path / "base", "llama", num_hidden_layers=3)
    save_adapter(tmp_path / "adapter", path, seed=1)
    adapter = read_adapter("a", tmp_path / "adapter", opened(path)[0], max_rank=8)
    settings = {"lora": LoraLimits(max_loras=2, max_rank=8)}
    adapters = [adapter, None, adapter, None, None]
    whole = load_rank(path, **settings)
    expected = generate(whole, PROMPTS, max_tokens=3, adapters=adapters)
    whole.close()
    plain = in_one_piece(path)
    assert not np.array_equal(expected[0].logits[0], plain[0].logits[0])
    with staged(path, 2, num_parts=2, **settings) as runner:
        assert_same_bits(generate(runner, PROMPTS, max_tokens=3, adapters=adapters), expected)
        own = [set(shard.shard_adapter(adapter).updates) for shard in runner.shards]
    assert own[0] | own[1] == set(adapter.updates)
    assert not own[0] & own[1]


# -- what a stage has --------------------------------------------------------------------------------------


@given(
    st.integers(0, 100), st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(0, 100), st.data()
)
def test_layers_are_divided_by_their_bytes(before, layers, behind, data):
    num_stages = data.draw(st.integers(1, len(layers)))
    parts = divide_layers(before, layers, behind, num_stages)
    assert [layer for part in parts for layer in part] == list(range(len(layers)))
    assert len(parts) == num_stages
    assert all(parts)
    ends = [before, *[0] * (num_stages - 2), behind] if num_stages > 1 else [before + behind]
    sizes = [end + sum(layers[layer] for layer in part) for end, part in zip(ends, parts, strict=True)]
    fair = (before + sum(layers) + behind) / num_stages
    assert max(sizes) <= max(fair + max(layers), *ends) + max(layers)


def test_a_large_head_counts():
    assert divide_layers(0, [10] * 8, 0, 2) == (range(4), range(4, 8))
    assert divide_layers(0, [10] * 8, 40, 2) == (range(6), range(6, 8))
    assert divide_layers(40, [10] * 8, 40, 2) == (range(4), range(4, 8))
    assert divide_layers(0, [10] * 4, 500, 2) == (range(3), range(3, 4))


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_reads_its_own_tensors_and_no_others(tied, tmp_path):
    path = make_tiny_model(tmp_path, "llama", num_hidden_layers=6, tied=tied)
    config, checkpoint = opened(path)
    plans = plans_of(path, 3)
    seen = [StageCheckpoint(checkpoint, plan).names() & expected_shapes(config).keys() for plan in plans]
    assert set.union(*seen) == expected_shapes(config).keys()
    assert seen[0] & seen[2] == ({"model.embed_tokens.weight"} if tied else set())
    assert not seen[1] & (seen[0] | seen[2])
    assert "model.embed_tokens.weight" in seen[0]
    assert "model.norm.weight" in seen[2]
    for plan, names in zip(plans, seen, strict=True):
        layers = {int(name.split(".")[2]) for name in names if ".layers." in name}
        assert layers == set(plan.layers[plan.stage])


def test_memory_of_a_stage(tmp_path):
    """Weights and planes of the KV cache: those of its layers."""
    path = make_tiny_model(tmp_path, "gemma3", **SIX_LAYERS)
    whole = load_rank(path)
    with staged(path, 3) as runner:
        weights = [rank.weight_bytes for rank in runner.ranks]
        # Two layers a group, of which no stage has more than one.
        assert runner.num_groups == whole.num_groups == 3
        assert [2 * rank.kv_cache_bytes for rank in runner.ranks] == [whole.kv_cache_bytes] * 3
        per_block = [
            2 * ModelRunner.kv_bytes_per_block(shard.config, 16, "float32") for shard in runner.shards
        ]
    embedding = 4 * VOCAB_SIZE * 64
    assert sum(weights) == whole.weight_bytes
    assert max(weights) < whole.weight_bytes - embedding
    assert per_block == [ModelRunner.kv_bytes_per_block(opened(path)[0], 16, "float32")] * 3
    whole.close()


def test_planes_of_the_kv_cache_are_those_of_its_layers(tmp_path):
    path = make_tiny_model(tmp_path, "llama", num_hidden_layers=6)
    whole = load_rank(path)
    with staged(path, 3) as runner:
        assert [3 * rank.kv_cache_bytes for rank in runner.ranks] == [whole.kv_cache_bytes] * 3
    whole.close()


@pytest.mark.parametrize(
    ("windows", "num_stages", "planes"),
    [
        ((None,) * 8, 2, [4, 4]),
        ((None,) * 8, 3, [3, 2, 3]),
        ((24, None) * 13, 2, [7, 7]),
        ((24, 24, 24, 24, 24, None) * 4 + (24, 24), 2, [2, 2]),
        ((24, 24, 24, 24, 24, None) * 8, 4, [2, 2, 2, 2]),
        ((None, 24, 24, 24), 2, [1, 1]),
    ],
)
def test_a_block_holds_its_share_of_the_layers(windows, num_stages, planes):
    """Whatever the layers of a stage, the groups are the model's, and each of its places is one layer's."""
    whole = kv_layout(windows)
    parts = divide_layers(0, [1] * len(windows), 0, num_stages)
    layouts = [kv_layout(windows, part) for part in parts]
    assert [layout.layers_per_block for layout in layouts] == planes
    for part, layout in zip(parts, layouts, strict=True):
        assert layout.windows == whole.windows
        own = [layout.places[layer] for layer in part]
        assert len(set(own)) == len(own)
        assert all(place < layout.layers_per_block for _, place in own)
        assert all(
            whole.windows[group] == windows[layer] for layer, (group, _) in zip(part, own, strict=True)
        )
        assert all(layout.places[layer] == ELSEWHERE for layer in range(len(windows)) if layer not in part)
    assert kv_layout(windows, range(len(windows))) == whole


def test_what_cannot_be_staged_is_refused(tmp_path):
    path = make_tiny_model(tmp_path / "tiny", "llama")
    with pytest.raises(ConfigError, match="--pipeline-parallel-size 3 is more than the model's 2 layers"):
        plans_of(path, 3)
    foreign: Any = SimpleNamespace(through_transformers=True, architecture="CohereForCausalLM")
    with pytest.raises(ConfigError, match="CohereForCausalLM, which runs through Transformers"):
        make_stage_plan(foreign, len, stage=0, num_stages=2)


# -- what crosses borders ----------------------------------------------------------------------------------


def test_hidden_states_and_residuals_cross_once(tmp_path):
    path = make_tiny_model(tmp_path, "llama", num_hidden_layers=3)
    with staged(path, 3, backend="torch") as runner:
        generate(runner, [PROMPTS[1]], max_tokens=1)
        sent = [group.mail for group in runner.groups]
        first, second, third = (shard.parallel.neighbours.calls for shard in runner.shards)
    shape = (3, 64)
    assert first == [("send", shape)] * 2
    assert second == [("receive", shape), ("receive", shape), ("send", shape), ("send", shape)]
    assert third == [("receive", shape)] * 2
    assert all(box.empty() for mail in sent for box in mail.values())


def test_a_value_that_a_later_stage_reads_is_handed_on():
    """``a`` of the first stage is read by the third alone, ``b`` by the second and by the third."""
    import torch

    def run(collectives: Any) -> Any:
        plan = StagePlan(collectives.rank, (range(1),) * 3, (0, 2, 3), frozenset(), 4)
        ops = TorchOps()

        class Batch:
            num_tokens = 2

        values = iter([torch.full((2, 4), 1.0), torch.full((2, 4), 10.0)])
        ops.embedding = lambda batch, weight: next(values)  # type: ignore[method-assign]
        stage = StageOps(ops, plan, buffer_collectives(ops, collectives), Batch())
        a, b = stage.embedding(None, None), stage.embedding(None, None)
        c = stage.scale(b, 3.0)
        d = stage.add(stage.add(a, b), c)
        return stage.result(d)

    first, second, third = run_ranks(3, run)
    assert third.tolist() == [[41.0] * 4] * 2
    assert second is not None
    assert first is not None
