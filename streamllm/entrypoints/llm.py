"""``from streamllm.entrypoints.llm import LLM``: :class:`streamllm.llm.LLM` under vLLM's module path."""

from __future__ import annotations

from streamllm.llm import LLM

__all__ = ["LLM"]
