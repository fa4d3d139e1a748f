"""What a forward's trace says of its operations and of the borders of its layers."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.sharded_runner import files_of
from helpers.tiny_models import TINY, new_tiny_model

from streamllm.models.forward_trace import ForwardTrace, trace_forward
from streamllm.models.model_config import ModelConfig
from streamllm.models.tensor_shapes import expected_shapes


def config_of(folder: Path, family: str, **fields) -> ModelConfig:
    new_tiny_model(family, **fields).config.save_pretrained(folder)
    return ModelConfig.from_files(files_of(folder))


def operations(trace: ForwardTrace) -> list[str]:
    return [call.operation for call in trace.calls]


def test_a_llama_is_its_layers_between_embedding_and_norm(tmp_path):
    trace = trace_forward(config_of(tmp_path, "llama"))

    layer = [
        "rms_norm", "linear", "rotary_and_cache", "paged_attention", "linear",
        "rms_norm", "linear", "gate_and_mul", "linear",
    ]  # fmt: skip
    assert operations(trace) == ["embedding", *layer, *layer, "rms_norm"]
    assert trace.layer_starts == (1, 10) and trace.layers_end == 19
    assert trace.names_before == {"model.embed_tokens"}
    assert trace.names_after == {"model.norm", "lm_head"}
    assert trace.names_within(1) == {
        f"model.layers.1.{name}"
        for name in (
            "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
            "self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        )
    }  # fmt: skip


def test_inputs_lead_back_to_the_calls_that_made_them(tmp_path):
    trace = trace_forward(config_of(tmp_path, "llama"))
    down, activated = trace.calls[9], trace.calls[8]
    (input_,) = down.inputs
    assert input_.maker is activated and down.layer == 0 and activated.layer is None
    normed, residual = trace.calls[6].inputs
    assert normed.maker is trace.calls[5] and residual.maker is trace.calls[0]
    assert trace.head_calls[0].inputs[0].maker is None
    assert trace.logits.maker is trace.head_calls[-1]


@pytest.mark.parametrize(
    ("family", "fields", "before", "after", "starts", "end"),
    [
        # The scale of what a layer adds belongs to the layer that it follows.
        ("granite", {}, {"model.embed_tokens"}, {"model.norm", "lm_head"}, (2, 13), 24),
        # With tied embeddings the head reads the embedding again.
        ("gemma2", {"tied": True}, {"model.embed_tokens"}, {"model.norm", "model.embed_tokens"}, (2, 13), 24),
        ("gpt2", {}, {"transformer.wte", "transformer.wpe"}, {"transformer.ln_f", "lm_head"}, (3, 12), 21),
        # No norm behind the last layer, and a projection on either side.
        (
            "opt-post-norm",
            {},
            {f"model.decoder.{name}" for name in ("embed_tokens", "embed_positions", "project_in")},
            {"model.decoder.project_out", "lm_head"},
            (4, 13),
            22,
        ),
        ("qwen2moe", {}, {"model.embed_tokens"}, {"model.norm", "lm_head"}, (1, 15, 24), 38),
    ],
)
def test_borders_of_layers(tmp_path, family, fields, before, after, starts, end):
    trace = trace_forward(config_of(tmp_path, family, **fields))
    assert (trace.names_before, trace.names_after) == (before, after)
    assert (trace.layer_starts, trace.layers_end) == (starts, end)


@pytest.mark.parametrize("family", TINY)
def test_every_tensor_is_read_in_one_place(tmp_path, family):
    """Each tensor of the model, and no other, before, within one, or after the layers."""
    config = config_of(tmp_path, family)
    trace = trace_forward(config)
    places = [trace.names_before, *map(trace.names_within, range(config.num_layers)), trace.names_after]
    names = [name for place in places for name in place]
    assert len(names) == len(set(names))
    expected = {name.removesuffix(".weight").removesuffix(".bias") for name in expected_shapes(config)}
    assert set(names) == expected
