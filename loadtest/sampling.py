"""What sampling costs: the decode step of a full batch with each kind of parameters, against the greedy step.

Every kind has a batch of its own in one model runner, and they take turns step by step, so that noise of the
machine meets all of them. A step is everything but the scheduler: the batch's news, forward, logits,
sampling, results. The second model is the same with a random output matrix of another vocabulary.

    python loadtest/sampling.py [--batch 32] [--vocabularies 49152 151936] [--threads 2] [--check] [--json F]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from streamllm.engine.token_rules import TokenRuleMaker
from streamllm.models.checkpoint import Checkpoint, open_checkpoint
from streamllm.models.model_config import ModelConfig
from streamllm.ops.lora import NO_ADAPTER
from streamllm.ops.stored_rows import StoredRows
from streamllm.runner.messages import NewSequence, OutputRow, ScheduledBatch, ScheduledRow, StepOutput
from streamllm.runner.model_runner import ModelRunner
from streamllm.sampling_params import SamplingParams
from streamllm.sources import resolve
from streamllm.sources.model_files import ModelFiles
from streamllm.text.tokenizer import Tokenizer

BLOCK = 16
EMBEDDING = "model.embed_tokens.weight"
BAD_WORDS = ["very bad", "worse", "the worst of all", "unspeakable", "Lorem ipsum"]


@dataclass(frozen=True)
class Kind:
    """One way to sample: its parameters, and how many greedy steps its step may take (``None``: no goal)."""

    name: str
    goal: float | None
    params: dict = field(default_factory=dict)


def kinds(num_ids: int) -> list[Kind]:
    """
    Args:
        num_ids: of the tokenizer: ids below this can be named.
    """
    filters = {"temperature": 0.8, "top_p": 0.95, "top_k": 50}
    penalties = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1}
    allowed = list(range(0, num_ids, 2))
    return [
        Kind("greedy", None, {"temperature": 0.0}),
        Kind("temperature", None, {"temperature": 0.8}),
        Kind("temperature, top-p", None, {"temperature": 0.8, "top_p": 0.95}),
        Kind("temperature, top-p, top-k", 1.15, filters),
        Kind("... with penalties and 5 logprobs", 1.25, {**filters, **penalties, "logprobs": 5}),
        Kind("... with half of the ids allowed", 1.15, {**filters, "allowed_token_ids": allowed}),
        Kind(
            "everything",
            None,
            {**filters, **penalties, "logprobs": 20, "min_p": 0.01, "allowed_token_ids": allowed,
             "logit_bias": dict.fromkeys(range(0, 3000, 10), 1.0), "bad_words": BAD_WORDS},
        ),
    ]  # fmt: skip


class OtherVocabulary:
    """A checkpoint whose (tied) embedding is random, of 8 bits, with another number of rows."""

    def __init__(self, checkpoint: Checkpoint, rows: int, columns: int) -> None:
        self._checkpoint = checkpoint
        self._shape = (rows, columns)

    def __getattr__(self, name: str):
        return getattr(self._checkpoint, name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shape if name == EMBEDDING else self._checkpoint.shape(name)

    def format(self, name: str) -> str:
        return "q8_0" if name == EMBEDDING else self._checkpoint.format(name)

    def num_bytes(self, name: str) -> int:
        rows, columns = self._shape
        return rows * columns // 32 * 34 if name == EMBEDDING else self._checkpoint.num_bytes(name)

    def read_stored(self, name: str) -> StoredRows:
        if name != EMBEDDING:
            return self._checkpoint.read_stored(name)
        rows, columns = self._shape
        groups = np.empty((rows, columns // 32), np.dtype([("scale", "<f2"), ("values", "i1", 32)]))
        groups["scale"] = 0.0003
        groups["values"] = np.random.default_rng(0).integers(-127, 128, (*groups.shape, 32), np.int8)
        return StoredRows("q8_0", groups.view(np.uint8).reshape(rows, -1))


class DecodingBatch:
    """Sequences of one kind that decode together.

    Args:
        first_slot: the first of its slots in the runner.
        blocks: where its K and V may go.
        lora_slots: each sequence's, if they have adapters.
    """

    def __init__(
        self,
        runner: ModelRunner,
        kind: Kind,
        maker: TokenRuleMaker,
        prompts: np.ndarray,
        first_slot: int,
        blocks: Iterator[int],
        lora_slots: Sequence[int] | None = None,
    ) -> None:
        self.seconds: list[float] = []
        self._runner = runner
        self._length = prompts.shape[1]
        self._slots = range(first_slot, first_slot + len(prompts))
        self._blocks = blocks
        params = SamplingParams(max_tokens=None, seed=1, **kind.params)
        rules = asyncio.run(maker.make(params))
        self._last: list[list[int]] = []
        for slot, prompt in zip(self._slots, prompts.tolist(), strict=True):
            held = list(itertools.islice(blocks, -(-self._length // BLOCK)))
            new = NewSequence(
                slot,
                slot,
                prompt,
                0,
                [held],
                params,
                params.logprobs,
                1,
                slot - first_slot,
                self._length,
                rules,
                lora_slot=lora_slots[slot - first_slot] if lora_slots else NO_ADAPTER,
            )
            batch = ScheduledBatch(
                0, [new], [ScheduledRow(slot, 0, self._length, [], [])], [OutputRow(0, slot)]
            )
            self._last += runner.step(batch).token_ids

    def run(self, batch: ScheduledBatch) -> StepOutput:
        """What is timed."""
        return self._runner.step(batch)

    def step(self) -> None:
        """One timed decode step."""
        position = self._length
        batch = ScheduledBatch(0)
        for row, slot in enumerate(self._slots):
            updates = [(0, position // BLOCK, [next(self._blocks)])] if position % BLOCK == 0 else []
            batch.rows.append(ScheduledRow(slot, position, 1, self._last[row], updates))
            batch.output_rows.append(OutputRow(row, slot))
        began = time.perf_counter()
        output = self.run(batch)
        self.seconds.append(time.perf_counter() - began)
        assert not any(output.errors), output.errors
        self._last = output.token_ids
        self._length += 1


def make_runner(
    options: argparse.Namespace, files: ModelFiles, vocab_size: int, num_kinds: int
) -> ModelRunner:
    config = ModelConfig.from_files(files)
    checkpoint = open_checkpoint(files, config)
    if vocab_size != config.vocab_size:
        checkpoint = OtherVocabulary(checkpoint, vocab_size, config.hidden_size)
        config = replace(config, vocab_size=vocab_size, tie_word_embeddings=True)
    length = options.prompt + options.steps + 1
    return ModelRunner(
        config,
        checkpoint,
        block_size=BLOCK,
        num_blocks=num_kinds * options.batch * -(-length // BLOCK),
        max_num_batched_tokens=max(256, options.batch, options.prompt),
        max_num_seqs=num_kinds * options.batch,
        kv_cache_dtype="float16",
        max_model_len=length,
        threads=options.threads,
        weight_mode="packed",
    )


def measure(options: argparse.Namespace, vocab_size: int) -> list[dict[str, object]]:
    """Median step of each kind, and the median over rounds of its ratio to the greedy step."""
    files = resolve(options.model)
    tokenizer = Tokenizer.from_gguf(files.path) if files.kind == "gguf" else Tokenizer.from_folder(files.path)
    num_ids = min(tokenizer.vocab_size, vocab_size)
    every = kinds(num_ids)
    runner = make_runner(options, files, vocab_size, len(every))
    maker = TokenRuleMaker(tokenizer, vocab_size, tokenizer.eos_token_ids)
    prompts = np.random.default_rng(1).integers(num_ids // 2, num_ids, (options.batch, options.prompt))
    blocks = iter(range(runner.num_blocks))
    batches = [
        DecodingBatch(runner, kind, maker, prompts, index * options.batch, blocks)
        for index, kind in enumerate(every)
    ]
    for number in range(options.steps):
        for index in range(len(batches)):
            batches[(index + number) % len(batches)].step()
    runner.close()
    greedy = batches[0].seconds
    return [
        {
            "kind": kind.name,
            "step_ms": 1e3 * statistics.median(batch.seconds),
            "ratio": statistics.median(a / b for a, b in zip(batch.seconds, greedy, strict=True)),
            "goal": kind.goal,
        }
        for kind, batch in zip(every, batches, strict=True)
    ]


def parse_options(description: str | None, *, check: str) -> argparse.Namespace:
    """The command line of a benchmark of decode steps; ``check`` is the help of ``--check``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="as of streamllm serve; the default model if left out")
    parser.add_argument("--batch", type=int, default=32, help="sequences in a batch")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--prompt", type=int, default=128, help="tokens before the first step")
    parser.add_argument("--steps", type=int, default=60, help="steps of each kind")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--check", action="store_true", help=check)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parse_options(__doc__, check="exit with 1 where a goal is missed")
    results = {}
    missed = False
    for vocab_size in options.vocabularies:
        rows = results[vocab_size] = measure(options, vocab_size)
        print(f"batch {options.batch}, vocabulary {vocab_size}, {options.threads} threads")
        for row in rows:
            goal = row["goal"]
            missed |= goal is not None and row["ratio"] > goal
            shown = "" if goal is None else f"   (goal {goal})"
            print(f"  {row['kind']:36}{row['step_ms']:8.2f} ms   x {row['ratio']:.3f}{shown}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))
    if options.check and missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
