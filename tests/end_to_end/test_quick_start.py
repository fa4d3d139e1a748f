"""vLLM's quick start on a folder like facebook/opt-125m on the hub: weights of torch.save in 16 bits, a
vocabulary that is padded, a tokenizer in vocab.json and merges.txt, a config of 2022."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.reference import assert_greedy
from helpers.tiny_models import new_tiny_model, save_tokenizer

PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
TOKENS, PADDED_VOCAB_SIZE = 321, 336
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")


def write_tokenizer(folder: Path) -> None:
    """The tiny models' byte-level BPE with OPT's special tokens, in the files of 2022."""
    save_tokenizer(folder)
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (folder / "tokenizer.json").unlink()
    ordinary = [token for token in sorted(model["vocab"], key=model["vocab"].get) if "<|" not in token]
    vocabulary = {token: number for number, token in enumerate([*_SPECIAL, *ordinary])}
    merges = [" ".join(merge) for merge in model["merges"]]
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
    end, pad = {"content": "</s>", **flags}, {"content": "<pad>", **flags}
    named = {"bos_token": end, "eos_token": end, "unk_token": end, "pad_token": pad}
    (folder / "special_tokens_map.json").write_text(json.dumps(named))
    config: dict[str, Any] = {
        **{name: {**token, "__type": "AddedToken"} for name, token in named.items()},
        "errors": "replace",
        "add_prefix_space": False,
        "add_bos_token": True,
        "special_tokens_map_file": None,
        "tokenizer_class": "GPT2Tokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("opt-tiny")
    torch.manual_seed(0)
    model = new_tiny_model("opt", tied=True, vocab_size=PADDED_VOCAB_SIZE, bos_token_id=2).half()
    # Logits of ids that are no tokens are 0, so that Transformers does not choose them either.
    with torch.no_grad():
        model.get_input_embeddings().weight[TOKENS:] = 0
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    fields = model.config.to_dict()
    known = {
        "_remove_final_layer_norm", "activation_function", "architectures", "attention_dropout",
        "bos_token_id", "do_layer_norm_before", "dropout", "eos_token_id", "ffn_dim", "hidden_size",
        "init_std", "layerdrop", "max_position_embeddings", "model_type", "num_attention_heads",
        "num_hidden_layers", "pad_token_id", "use_cache", "vocab_size", "word_embed_proj_dim",
    }  # fmt: skip
    config = {name: value for name, value in fields.items() if name in known}
    config |= {"architectures": ["OPTForCausalLM"], "prefix": "</s>", "torch_dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


def test_opt_from_a_folder(folder: Path) -> None:
    import transformers

    from streamllm import LLM, SamplingParams

    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == TOKENS
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    llm = LLM(model=str(folder), dtype="float32", max_model_len=512)
    outputs = llm.generate(PROMPTS, greedy)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids, (completion,) = output.prompt_token_ids, output.outputs
        assert output.prompt == prompt and ids == tokenizer(prompt).input_ids and ids[0] == 2
        assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert_greedy(reference, ids, list(completion.token_ids))
    # A prompt that begins like one before it finds blocks in the cache, learned positions and all.
    first, second = (llm.generate(" ".join(PROMPTS * 2), greedy)[0] for _ in range(2))
    assert second.num_cached_tokens > first.num_cached_tokens
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    assert_greedy(reference, second.prompt_token_ids, list(second.outputs[0].token_ids))
    llm.shutdown()


def test_as_the_quick_start_calls_it(folder: Path) -> None:
    from streamllm import LLM, SamplingParams

    llm = LLM(model=str(folder))
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95))
    assert [output.prompt for output in outputs] == PROMPTS
    assert all(output.outputs[0].token_ids for output in outputs)
    llm.shutdown()
