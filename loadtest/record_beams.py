"""Records the decisions of the default model's beam searches, for :mod:`beams` to replay."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from driver import Driver

from streamllm.engine.beam_search import BeamSearch, Candidates, Continuation
from streamllm.engine.step import Limits
from streamllm.models.checkpoint import open_checkpoint
from streamllm.models.model_config import ModelConfig
from streamllm.runner.model_runner import ModelRunner
from streamllm.sampling_params import BeamSearchParams
from streamllm.sources import resolve
from streamllm.text.chat_template import ChatTemplate
from streamllm.text.tokenizer import Tokenizer

PROMPTS = (
    "Tell me a story about a lighthouse keeper who finds a map in a bottle.",
    "Explain to a child why the moon changes its shape during the month.",
    "Write a letter to a neighbour whose dog barks all night.",
    "Describe how bread is made, from the grain to the table.",
    "What should I look at when I buy a used bicycle?",
    "Summarise the life of a salmon in a few paragraphs.",
    "Compare living in a big city with living in a small village.",
    "Give me a plan for learning to play the piano in one year.",
)


BLOCK_SIZE = 16
NUM_BLOCKS = 1024
MAX_MODEL_LEN = 1024


class RecordingSearch(BeamSearch):
    """A search that notes what it decides: see :class:`beams.Recording`."""

    def __init__(self, params: BeamSearchParams, eos_token_ids: frozenset[int], max_tokens: int) -> None:
        super().__init__(params, eos_token_ids, max_tokens)
        self.parents: list[list[int]] = []
        self.tokens: list[list[int]] = []

    def advance(self, candidates: Sequence[Candidates]) -> list[Continuation]:
        continuations = super().advance(candidates)
        if continuations:
            self.parents.append([c.parent for c in continuations])
            self.tokens.append([c.token_id for c in continuations])
        return continuations


def record(
    path: Path, *, widths: Sequence[int], max_tokens: int = 128, prompts: Sequence[str] = PROMPTS
) -> None:
    """Run the default model's searches, all in one batch, and write them to ``path``.

    Args:
        widths: beam widths; each prompt is searched with each.
        max_tokens: longest output.
    """
    files = resolve(None)
    config = ModelConfig.from_files(files)
    tokenizer = Tokenizer.from_gguf(files.path)
    template = ChatTemplate(tokenizer.chat_template or "", tokenizer.special_token_strings)
    eos_token_ids = frozenset(tokenizer.eos_token_ids) | frozenset(config.eos_token_ids)
    limits = Limits(max_num_seqs=sum(widths) * len(prompts), max_num_batched_tokens=512)
    runner = ModelRunner(
        config,
        open_checkpoint(files, config),
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        kv_cache_dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        threads=os.cpu_count() or 1,
        sampled_vocab_size=tokenizer.vocab_size,
    )

    driver = Driver(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        limits=limits,
        answer=runner.step,
        max_model_len=MAX_MODEL_LEN,
    )
    searches = []
    for width in widths:
        for prompt in prompts:
            params = BeamSearchParams(beam_width=width, max_tokens=max_tokens)
            search = RecordingSearch(params, eos_token_ids, max_tokens)
            text = template.render([{"role": "user", "content": prompt}])
            driver.add(tokenizer.encode(text, add_special_tokens=False), max_tokens, beams=search)
            searches.append(search)
    while driver.step():
        pass
    runner.close()
    recorded = [{"width": s.width, "parents": s.parents, "tokens": s.tokens} for s in searches]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"model": files.served_name, "searches": recorded}, separators=(",", ":")) + "\n"
    )
