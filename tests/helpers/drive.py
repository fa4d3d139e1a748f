"""A tiny synchronous engine: feeds scheduled batches to a model runner until all prompts are done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from streamllm.ops.lora import NO_ADAPTER, LoraAdapter
from streamllm.runner.executor import Executor
from streamllm.runner.messages import (
    LoraLoad,
    NewSequence,
    OutputRow,
    ScheduledBatch,
    ScheduledRow,
    StepOutput,
    TokenLogprobs,
)
from streamllm.runner.model_runner import ModelRunner
from streamllm.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Generation:
    """One prompt's run. ``logits`` has one row an output token."""

    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    slot: int
    output: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_told_tokens: int = 0
    num_told_blocks: int = 0
    lora_slot: int = NO_ADAPTER

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def finished(self) -> bool:
        return len(self.output) >= self.max_tokens or bool(self.errors)


def schedule(
    runs: Sequence[Generation],
    free: Iterator[int],
    block_size: int,
    budget: int,
    finished: list[int],
    step: int,
) -> ScheduledBatch:
    """One step: every unfinished run in order, each with as many tokens as the budget leaves."""
    batch = ScheduledBatch(step=step, finished_slots=finished)
    for run in runs:
        length = min(len(run.tokens) - run.num_computed_tokens, budget)
        if run.finished or length == 0:
            continue
        budget -= length
        end = run.num_computed_tokens + length
        for blocks in run.blocks:
            while len(blocks) * block_size < end:
                blocks.append(next(free))
        tokens, told = run.tokens[run.num_told_tokens :], run.num_told_blocks
        updates = [(group, told, blocks[told:]) for group, blocks in enumerate(run.blocks)]
        if run.num_told_tokens == 0:
            seed = run.params.seed or 0
            batch.new_sequences.append(
                NewSequence(
                    run.slot,
                    1000 + run.slot,
                    tokens,
                    0,
                    [list(blocks) for blocks in run.blocks],
                    run.params,
                    run.params.logprobs,
                    seed,
                    0,
                    len(run.prompt),
                    lora_slot=run.lora_slot,
                )
            )
            tokens, updates = [], []
        batch.rows.append(ScheduledRow(run.slot, run.num_computed_tokens, length, tokens, updates))
        run.num_told_tokens, run.num_told_blocks = len(run.tokens), len(run.blocks[0])
        run.num_computed_tokens = end
        if end == len(run.tokens):
            batch.output_rows.append(OutputRow(len(batch.rows) - 1, 1000 + run.slot))
    return batch


def generate(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int = 8,
    params: Sequence[SamplingParams] | SamplingParams = GREEDY,
    budget: int = 64,
    block_size: int = 16,
    keep_logits: bool = True,
    first_block: int = 0,
    adapters: Sequence[LoraAdapter | None] = (),
) -> list[Generation]:
    """Runs all prompts together, slots in their order, blocks handed out from ``first_block`` on.

    Args:
        adapters: of each prompt, in slots of their own in the order of their appearance.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    runs = [
        Generation(list(prompt), own, max_tokens, slot)
        for slot, (prompt, own) in enumerate(zip(prompts, each, strict=True))
    ]
    for run in runs:
        run.blocks = [[] for _ in range(runner.num_groups)]
    loaded = list(dict.fromkeys(adapter for adapter in adapters if adapter is not None))
    for run, adapter in zip(runs, adapters, strict=False):
        run.lora_slot = NO_ADAPTER if adapter is None else loaded.index(adapter)
    free = iter(range(first_block, runner.num_blocks))
    finished: list[int] = []
    step = 0
    while any(not run.finished for run in runs):
        batch = schedule(runs, free, block_size, budget, finished, step)
        if step == 0:
            batch.lora_loads = [LoraLoad(slot, adapter) for slot, adapter in enumerate(loaded)]
        output = run_step(runner, batch)
        finished = []
        logits = runner.logits() if batch.output_rows and keep_logits else None
        for index, row in enumerate(batch.output_rows):
            run = runs[row.sequence_id - 1000]
            run.output.extend(output.token_ids[index])
            run.logprobs.extend(output.logprobs[index] or [])
            run.errors.extend([error] if (error := output.errors[index]) else [])
            if logits is not None:
                run.logits.append(logits[index])
            if run.finished:
                finished.append(run.slot)
        step += 1
    run_step(runner, ScheduledBatch(step=step, finished_slots=finished))
    return runs


def run_step(runner: ModelRunner, batch: ScheduledBatch) -> StepOutput:
    """One whole step, blocking."""
    return runner.step(batch)


async def run_step_on(executor: Executor, batch: ScheduledBatch) -> StepOutput:
    """One whole step on the running loop."""
    step = executor.submit(batch)
    step.sample()
    return await step.output()
