"""What each rank has: written out for some families, the partitions, adapters, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.sharded_runner import files_of
from helpers.tiny_models import new_tiny_model
from hypothesis import given
from hypothesis import strategies as st

from streamllm.errors import ConfigError
from streamllm.models.lora_targets import AdaptableMatrix
from streamllm.models.model_config import ModelConfig
from streamllm.models.sharding import ShardingPlan
from streamllm.models.sharding_plan import divide, divide_heads, make_sharding_plan
from streamllm.ops.lora import LoraAdapter, LoraUpdate


def config_of(folder: Path, family: str, **fields) -> ModelConfig:
    new_tiny_model(family, **fields).config.save_pretrained(folder)
    return ModelConfig.from_files(files_of(folder))


def plan_of(folder: Path, family: str, *, rank: int = 1, size: int = 2, stored="float32", **fields):
    return make_sharding_plan(config_of(folder, family, **fields), lambda name: stored, rank=rank, size=size)


def shards(plan: ShardingPlan, layer: str) -> dict[str, str]:
    """Tensors of one layer and those outside of layers, with their rows or, after a comma, columns."""
    found = {}
    for name, shard in plan.tensors.items():
        if name.startswith(layer) or (".0." not in name and ".1." not in name):
            own = ":" if shard.rows is None else " ".join(f"{r.start}:{r.stop}" for r in shard.rows)
            columns = shard.columns
            found[name.removeprefix(layer)] = own + (f", {columns.start}:{columns.stop}" if columns else "")
    return found


def test_a_llama(tmp_path):
    """4 heads of 16 and 2 of keys and values, 96 in the MLP, 320 tokens; biases of sums are rank 0's."""
    plan = plan_of(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    assert shards(plan, "model.layers.1.") == {
        "model.embed_tokens.weight": "160:320",
        "self_attn.q_proj.weight": "32:64",
        "self_attn.q_proj.bias": "32:64",
        "self_attn.k_proj.weight": "16:32",
        "self_attn.k_proj.bias": "16:32",
        "self_attn.v_proj.weight": "16:32",
        "self_attn.v_proj.bias": "16:32",
        "self_attn.o_proj.weight": ":, 32:64",
        "self_attn.o_proj.bias": "",
        "mlp.gate_proj.weight": "48:96",
        "mlp.gate_proj.bias": "48:96",
        "mlp.up_proj.weight": "48:96",
        "mlp.up_proj.bias": "48:96",
        "mlp.down_proj.weight": ":, 48:96",
        "mlp.down_proj.bias": "",
        "lm_head.weight": "160:320",
    }
    first = plan_of(tmp_path, "llama", rank=0, attention_bias=True, mlp_bias=True)
    assert "model.layers.1.self_attn.o_proj.bias" not in first.tensors
    assert (plan.num_heads, plan.num_kv_heads) == (2, 1)


def test_a_gpt2_whose_queries_keys_and_values_are_one_tensor(tmp_path):
    assert shards(plan_of(tmp_path, "gpt2"), "transformer.h.0.") == {
        "transformer.wte.weight": "160:320",
        "attn.c_attn.weight": "32:64 96:128 160:192",
        "attn.c_attn.bias": "32:64 96:128 160:192",
        "attn.c_proj.weight": ":, 32:64",
        "attn.c_proj.bias": "",
        "mlp.c_fc.weight": "48:96",
        "mlp.c_fc.bias": "48:96",
        "mlp.c_proj.weight": ":, 48:96",
        "mlp.c_proj.bias": "",
        "lm_head.weight": "160:320",
    }


def test_a_phi3_whose_gates_are_fused_too(tmp_path):
    assert shards(plan_of(tmp_path, "phi3"), "model.layers.0.") == {
        "model.embed_tokens.weight": "160:320",
        "self_attn.qkv_proj.weight": "32:64 80:96 112:128",
        "self_attn.o_proj.weight": ":, 32:64",
        "mlp.gate_up_proj.weight": "48:96 144:192",
        "mlp.down_proj.weight": ":, 48:96",
        "lm_head.weight": "160:320",
    }


def test_a_mixtral_has_some_of_every_expert_and_the_whole_router(tmp_path):
    experts = {
        f"block_sparse_moe.experts.{expert}.{name}.weight": own
        for expert in range(4)
        for name, own in (("w1", "48:96"), ("w3", "48:96"), ("w2", ":, 48:96"))
    }
    assert shards(plan_of(tmp_path, "mixtral"), "model.layers.0.") == experts | {
        "model.embed_tokens.weight": "160:320",
        "self_attn.q_proj.weight": "32:64",
        "self_attn.k_proj.weight": "16:32",
        "self_attn.v_proj.weight": "16:32",
        "self_attn.o_proj.weight": ":, 32:64",
        "lm_head.weight": "160:320",
    }


def test_a_gemma2_with_tied_embeddings(tmp_path):
    """Norms are whole."""
    assert shards(plan_of(tmp_path, "gemma2", tied=True), "model.layers.0.") == {
        "model.embed_tokens.weight": "160:320",
        "self_attn.q_proj.weight": "64:128",
        "self_attn.k_proj.weight": "32:64",
        "self_attn.v_proj.weight": "32:64",
        "self_attn.o_proj.weight": ":, 64:128",
        "mlp.gate_proj.weight": "48:96",
        "mlp.up_proj.weight": "48:96",
        "mlp.down_proj.weight": ":, 48:96",
    }


def test_an_opt_keeps_positions_and_projections_whole(tmp_path):
    own = shards(plan_of(tmp_path, "opt-post-norm"), "model.decoder.layers.0.")
    assert own == {
        "model.decoder.embed_tokens.weight": "160:320",
        **{
            f"self_attn.{name}.{kind}": "32:64"
            for name in ("q_proj", "k_proj", "v_proj")
            for kind in ("weight", "bias")
        },
        "self_attn.out_proj.weight": ":, 32:64",
        "self_attn.out_proj.bias": "",
        "fc1.weight": "48:96",
        "fc1.bias": "48:96",
        "fc2.weight": ":, 48:96",
        "fc2.bias": "",
        "lm_head.weight": "160:320",
    }


def test_sinks_and_experts_biases_of_a_gpt_oss(tmp_path):
    own = shards(plan_of(tmp_path, "gpt-oss"), "model.layers.0.")
    assert own["self_attn.sinks"] == "2:4"
    assert own["mlp.experts.3.gate_proj.bias"] == own["mlp.experts.3.up_proj.bias"] == "48:96"
    assert own["mlp.experts.3.down_proj.bias"] == ""
    assert not any("router" in name for name in own)


def test_a_qwen2_moes_shared_expert_is_divided_and_its_gate_is_not(tmp_path):
    own = shards(plan_of(tmp_path, "qwen2moe"), "model.layers.0.")
    assert own["mlp.shared_expert.up_proj.weight"] == "32:64"
    assert own["mlp.shared_expert.down_proj.weight"] == ":, 32:64"
    assert not any("shared_expert_gate" in name for name in own)


def test_one_rank_has_everything(tmp_path):
    plan = plan_of(tmp_path, "olmo2", rank=0, size=1)
    assert not plan.tensors and not plan.matrices and plan.num_heads == 4


@pytest.mark.parametrize(
    ("stored", "columns", "dequantised"),
    [
        ("float32", [48, 48], False),
        ("q4_1", [64, 32], False),  # three blocks of 32
        ("int4_32", [64, 32], False),
        ("int8_64", [64, 32], False),  # two blocks, and the second is not whole
        ("q4_k", [48, 48], True),  # no block for each
        ("float8_e4m3", [48, 48], True),
    ],
)
def test_inner_columns_are_cut_between_blocks(tmp_path, stored, columns, dequantised):
    config = config_of(tmp_path, "llama")
    for rank, width in enumerate(columns):
        plan = make_sharding_plan(config, lambda name: stored, rank=rank, size=2)
        down = plan.tensors["model.layers.0.mlp.down_proj.weight"]
        assert (len(down.columns or ()), down.dequantised) == (width, dequantised)
        (gate,) = plan.tensors["model.layers.0.mlp.gate_proj.weight"].rows or ()
        assert gate == down.columns


@pytest.mark.parametrize(
    ("stored", "head_dim", "dequantised"),
    [
        ("q8_0", 16, False),
        ("q8_0", 24, True),
        ("q4_k", 128, False),
        ("q4_k", 64, True),
        ("bfloat16", 24, False),
    ],
)
def test_heads_that_end_inside_of_blocks_have_float32_projections(tmp_path, stored, head_dim, dequantised):
    plan = plan_of(tmp_path, "llama", stored=stored, head_dim=head_dim, intermediate_size=512)
    assert plan.tensors["model.layers.0.self_attn.o_proj.weight"].dequantised == dequantised
    assert not plan.tensors["model.layers.0.mlp.down_proj.weight"].dequantised


@given(st.integers(1, 5000), st.integers(1, 9), st.sampled_from([1, 32, 64, 256]))
def test_ranges_are_the_whole_in_units_that_differ_by_one(total, size, unit):
    ranges = divide(total, size, unit)
    assert [index for part in ranges for index in part] == list(range(total))
    assert len(ranges) == size and all(part.start % unit == 0 or not part for part in ranges)
    units = [-(-len(part) // unit) for part in ranges]
    assert max(units) - min(units) <= 1


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 16))
def test_each_query_head_is_somewhere_beside_its_keys(num_kv_heads, group, size):
    num_heads = num_kv_heads * group
    try:
        shards = divide_heads(num_heads, num_kv_heads, size)
    except ConfigError as error:
        assert num_kv_heads < size and (size % num_kv_heads or num_heads % size)
        assert f"--tensor-parallel-size {size}" in str(error) and f"{num_heads} query heads" in str(error)
        return
    assert [head for shard in shards for head in shard.query] == list(range(num_heads))
    for shard in shards:
        assert len(shard.query) % len(shard.kv) == 0
        local_group = len(shard.query) // len(shard.kv)
        for place, head in enumerate(shard.query):
            assert shard.kv[place // local_group] == head // group


def test_the_default_models_heads_on_two_ranks():
    first, second = divide_heads(9, 3, 2)
    assert (first.query, first.kv) == (range(6), range(2))
    assert (second.query, second.kv) == (range(6, 9), range(2, 3))


def test_the_local_config_has_the_ranks_heads(tmp_path):
    config = config_of(tmp_path, "llama")
    plan = make_sharding_plan(config, lambda name: "float32", rank=0, size=2)
    assert plan.local_config(config) == replace(config, num_heads=2, num_kv_heads=1)


@pytest.mark.parametrize(
    ("family", "fields", "size", "message"),
    [
        (
            "llama",
            {},
            3,
            "--tensor-parallel-size 3 does not divide the model's 4 query heads, .* 2 key/value",
        ),
        ("llama", {}, 8, "does not divide the model's 4 query heads"),
        ("llama", {"intermediate_size": 1}, 2, "is more than the 1 columns of model.layers.0.mlp.down_proj"),
        ("llama", {"vocab_size": 3, "num_key_value_heads": 4, "bos_token_id": 0}, 4, "the vocabulary of 3"),
        ("olmo2", {}, 2, "its norm model.layers.0.self_attn.q_norm is over all heads together.*--pipeline-p"),
    ],
)
def test_what_cannot_be_divided_is_said_in_a_line(tmp_path, family, fields, size, message):
    with pytest.raises(ConfigError, match=message) as raised:
        plan_of(tmp_path, family, rank=0, size=size, **fields)
    assert "\n" not in str(raised.value)


def test_models_of_transformers_own_code_are_refused():
    config = SimpleNamespace(through_transformers=True, architecture="GPTNeoXForCausalLM")
    with pytest.raises(
        ConfigError, match=r"--tensor-parallel-size 2 .* GPTNeoXForCausalLM, which runs through"
    ):
        make_sharding_plan(config, str, rank=0, size=2)  # type: ignore[arg-type]


def test_the_parts_of_an_adapter_add_up_to_it(tmp_path):
    """Rows of the updated matrix that a rank has, or summands of all its rows."""
    rng = np.random.default_rng(0)

    def update(first_row: int, rows: int, columns: int) -> LoraUpdate:
        a, b = rng.standard_normal((3, columns)), rng.standard_normal((rows, 3))
        return LoraUpdate(first_row, a.astype(np.float32), b.astype(np.float32))

    layer = "model.layers.0"
    qkv, gate_up, down = f"{layer}.self_attn.q_proj", f"{layer}.mlp.gate_proj", f"{layer}.mlp.down_proj"
    adapter = LoraAdapter(
        "a",
        b"content",
        3,
        {
            qkv: (update(64, 32, 64), update(0, 64, 64)),
            gate_up: (update(96, 96, 64),),
            down: (update(0, 64, 96),),
        },
    )
    x, inner = rng.standard_normal((5, 64)), rng.standard_normal((5, 96))
    plans = [plan_of(tmp_path, "llama", rank=rank) for rank in range(2)]
    own = [plan.shard_adapter(adapter) for plan in plans]
    assert {(part.content, part.rank, part.name) for part in own} == {(b"content", 3, "a")}

    k, q = adapter.updates[qkv]
    for rank in range(2):
        own_k, own_q = own[rank].updates[qkv]
        assert (own_k.first_row, own_q.first_row) == (32, 0)
        heads = slice(32 * rank, 32 * rank + 32)
        np.testing.assert_allclose(own_q.b @ own_q.a @ x.T, (q.b @ q.a @ x.T)[heads], rtol=1e-5)
        kv = slice(16 * rank, 16 * rank + 16)
        np.testing.assert_allclose(own_k.b @ own_k.a @ x.T, (k.b @ k.a @ x.T)[kv], rtol=1e-5)
        (up,), (own_up,) = adapter.updates[gate_up], own[rank].updates[gate_up]
        assert own_up.first_row == 48 and np.array_equal(own_up.b, up.b[48 * rank : 48 * rank + 48])
    ((whole,), (low,), (high,)) = (each.updates[down] for each in (adapter, *own))
    parts = low.b @ low.a @ inner[:, :48].T + high.b @ high.a @ inner[:, 48:].T
    np.testing.assert_allclose(parts, whole.b @ whole.a @ inner.T, rtol=1e-4, atol=1e-5)

    matrix = AdaptableMatrix(qkv, ((qkv, 64), ("k", 32), ("v", 32)), 64)
    assert plans[0].local_matrix(matrix).parts == ((qkv, 32), ("k", 16), ("v", 16))
    matrix = AdaptableMatrix(down, ((down, 64),), 96)
    assert plans[0].local_matrix(matrix).columns == 48
