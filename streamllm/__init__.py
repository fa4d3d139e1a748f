"""streamllm: an LLM server for many users at once, and the same engine offline.

Public names load lazily (PEP 562), so that ``import streamllm`` costs milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_PUBLIC = {
    "LLM": "streamllm.llm",
    "AsyncEngine": "streamllm.engine.async_engine",
    "SamplingParams": "streamllm.sampling_params",
    "BeamSearchParams": "streamllm.sampling_params",
    "StructuredOutputsParams": "streamllm.structured_outputs",
    "RequestOutput": "streamllm.outputs",
    "CompletionOutput": "streamllm.outputs",
    "BeamSearchOutput": "streamllm.outputs",
    "PoolingParams": "streamllm.pooling_params",
    "EmbeddingRequestOutput": "streamllm.outputs",
    "ScoringRequestOutput": "streamllm.outputs",
    "LoRARequest": "streamllm.lora.request",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "LoRARequest",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "__version__",
]

if TYPE_CHECKING:
    from streamllm.engine.async_engine import AsyncEngine
    from streamllm.llm import LLM
    from streamllm.lora.request import LoRARequest
    from streamllm.outputs import (
        BeamSearchOutput,
        CompletionOutput,
        EmbeddingRequestOutput,
        RequestOutput,
        ScoringRequestOutput,
    )
    from streamllm.pooling_params import PoolingParams
    from streamllm.sampling_params import BeamSearchParams, SamplingParams
    from streamllm.structured_outputs import StructuredOutputsParams


def __getattr__(name: str) -> object:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'streamllm' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
