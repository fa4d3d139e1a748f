"""Adapters that the PEFT library writes, and the same merged into their models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def save_adapter(
    folder: Path, base: Path, *, seed: int, rank: int = 4, target_modules: str | Sequence[str] = "all-linear",
    **config: Any,
) -> Path:  # fmt: skip
    """Writes a random adapter of the model in ``base``, and returns ``folder``.

    Args:
        config: further fields of PEFT's ``LoraConfig``.
    """
    import peft
    import torch

    torch.manual_seed(seed)
    fields = {"r": rank, "lora_alpha": 8, "target_modules": target_modules, **config}
    model = peft.get_peft_model(_load(base), peft.LoraConfig(task_type="CAUSAL_LM", **fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(str(folder))
    return folder


def save_merged(folder: Path, base: Path, adapter: Path) -> Path:
    """Writes the model in ``base`` with the adapter in its weights, as PEFT merges it."""
    import peft
    from helpers.tiny_models import save_tokenizer

    merged = peft.PeftModel.from_pretrained(_load(base), str(adapter)).merge_and_unload()
    merged.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def _load(base: Path) -> Any:
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
