"""A model runner over a small model with random weights, and the batches to feed it."""

from __future__ import annotations

import numpy as np
from helpers.cpu_as_gpu import new_runner
from helpers.drive import GREEDY

from streamllm.models.llama import LlamaConfig
from streamllm.models.model_config import RopeConfig
from streamllm.runner.messages import NewSequence, OutputRow, ScheduledBatch, ScheduledRow
from streamllm.runner.model_runner import ModelRunner

CONFIG = LlamaConfig(
    architecture="LlamaForCausalLM",
    vocab_size=70,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    rms_norm_eps=1e-5,
    max_position_embeddings=256,
    ropes=(RopeConfig(rope_type="default", theta=10000.0, rotary_dim=16),),
    tie_word_embeddings=True,
    qkv_bias=False,
    attention_out_bias=False,
    mlp_bias=False,
    qk_norm=False,
    layer_windows=(None, None),
    eos_token_ids=(),
    bos_token_id=None,
)


class RandomCheckpoint:
    """Random weights of whatever shape the config asks for."""

    def __init__(self, config: LlamaConfig, seed: int = 0):
        kv_width = config.num_kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        shapes = {"model.embed_tokens": (config.vocab_size, hidden), "model.norm": (hidden,)}
        for layer in range(config.num_layers):
            prefix = f"model.layers.{layer}"
            shapes |= {
                f"{prefix}.input_layernorm": (hidden,),
                f"{prefix}.post_attention_layernorm": (hidden,),
                f"{prefix}.self_attn.q_proj": (config.num_heads * config.head_dim, hidden),
                f"{prefix}.self_attn.k_proj": (kv_width, hidden),
                f"{prefix}.self_attn.v_proj": (kv_width, hidden),
                f"{prefix}.self_attn.o_proj": (hidden, config.num_heads * config.head_dim),
                f"{prefix}.mlp.gate_proj": (inner, hidden),
                f"{prefix}.mlp.up_proj": (inner, hidden),
                f"{prefix}.mlp.down_proj": (hidden, inner),
            }
        rng = np.random.default_rng(seed)
        self.tensors = {
            f"{name}.weight": (rng.standard_normal(shape) * 0.3).astype(np.float32)
            for name, shape in shapes.items()
        }

    def names(self) -> set[str]:
        return set(self.tensors)

    def read(self, name: str) -> np.ndarray:
        return self.tensors[name]

    def num_bytes(self, name: str) -> int:
        return self.tensors[name].nbytes

    def release(self, name: str) -> None:
        pass


def make_runner(checkpoint=None, config: LlamaConfig = CONFIG, **changes) -> ModelRunner:
    settings = {
        "block_size": 16,
        "num_blocks": 32,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
        "kv_cache_dtype": "float32",
        "max_model_len": 256,
        "threads": 2,
        "progress": False,
        **changes,
    }
    return new_runner(config, checkpoint or RandomCheckpoint(config), **settings)


def new_sequence(slot: int, tokens: list[int], blocks: list[int], params=GREEDY, **changes) -> NewSequence:
    fields = {
        "num_computed_tokens": 0,
        "seed": 0,
        "choice_index": 0,
        "num_prompt_tokens": len(tokens),
        "num_logprobs": params.logprobs,
    }
    return NewSequence(
        slot=slot,
        sequence_id=slot,
        token_ids=tokens,
        block_ids=[blocks],
        params=params,
        **{**fields, **changes},
    )


def step_of(*sequences: NewSequence, step: int = 0) -> ScheduledBatch:
    """A step that computes all of each new sequence that is not computed, and samples."""
    rows = [
        ScheduledRow(s.slot, s.num_computed_tokens, len(s.token_ids) - s.num_computed_tokens, [], [])
        for s in sequences
    ]
    outputs = [OutputRow(index, s.sequence_id) for index, s in enumerate(sequences)]
    return ScheduledBatch(step, new_sequences=list(sequences), rows=rows, output_rows=outputs)
