"""An engine whose model costs nothing: what is left is everything around it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from streamllm.config import EngineConfig
from streamllm.engine.async_engine import AsyncEngine
from streamllm.models.model_config import ModelConfig
from streamllm.runner.messages import ScheduledBatch, StepOutput
from streamllm.runner.token_rules import LogitsProcessor
from streamllm.sources import resolve
from streamllm.text.tokenizer import Tokenizer

TEXT = "The sea is wide and blue, and those who live beside it know its moods by heart. " * 4
MAX_MODEL_LEN = 4096


class FreeExecutor:
    """The executor's interface: each sequence is given the tokens of a text, one a step, over and over.

    A step takes one turn of the event loop, in which the loop does what it would do during a forward.
    """

    queue_depth = 1

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

    def start(self, on_failure: Callable[[str], None]) -> None:
        pass

    def prepare_processors(self, processors: tuple[LogitsProcessor, ...]) -> tuple[LogitsProcessor, ...]:
        return processors

    def submit(self, batch: ScheduledBatch) -> FreeStep:
        return FreeStep(batch, self._token_ids)

    def close(self) -> None:
        pass


class FreeStep:
    """A step of :class:`FreeExecutor`."""

    exclusive = True

    def __init__(self, batch: ScheduledBatch, token_ids: list[int]) -> None:
        self._batch = batch
        self._token_ids = token_ids

    def sample(self, masks: object = None) -> None:
        pass

    async def output(self) -> StepOutput:
        await asyncio.sleep(0)
        batch, text, length = self._batch, self._token_ids, len(self._token_ids)
        tokens = []
        for output in batch.output_rows:
            row = batch.rows[output.row]
            tokens.append([text[(row.num_computed_tokens + row.num_tokens) % length]])
        return StepOutput(tokens, [None] * len(tokens), [None] * len(tokens))


def free_engine(max_num_seqs: int) -> AsyncEngine:
    """The engine with the default model's configuration and tokenizer, and blocks for ``max_num_seqs``
    sequences of ``MAX_MODEL_LEN`` tokens."""
    files = resolve(None, progress=False)
    tokenizer = Tokenizer.from_gguf(files.path)
    config = EngineConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=2048, disable_log_stats=True)
    return AsyncEngine(
        config=config,
        model_name="free",
        model_config=ModelConfig.from_files(files),
        tokenizer=tokenizer,
        chat_template=None,
        executor=FreeExecutor(tokenizer.encode(TEXT)),  # type: ignore[arg-type]
        num_blocks=max_num_seqs * MAX_MODEL_LEN // config.block_size,
        max_model_len=MAX_MODEL_LEN,
        default_sampling={},
    )
