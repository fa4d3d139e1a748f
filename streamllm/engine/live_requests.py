"""The requests that wait or run, in a table that people read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from streamllm.engine.request import Request, Sequence, SequenceStatus

LiveState = Literal["queued", "prefill", "decoding", "preempted"]


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """One request now.

    Attributes:
        state: ``queued``: it has not begun; ``prefill``: its prompt is being computed (after a preemption:
            again, with what had been generated); ``decoding``; ``preempted``: it waits to be recomputed.
        num_prompt_tokens: length of its prompt.
        num_cached_tokens: of them, found in the prefix cache at admission.
        num_computed_tokens: of the prompt, in the KV cache now.
        num_output_tokens: generated so far, by all its sequences.
        num_blocks: KV blocks that it holds, shared ones counted once.
        num_sequences: choices or beams that are not finished.
        num_preemptions: how often it was preempted.
        age: seconds since its arrival.
        adapter: the LoRA adapter that answers it.
    """

    request_id: str
    state: LiveState
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    num_blocks: int
    num_sequences: int
    num_preemptions: int
    age: float
    adapter: str | None


def live_requests(requests: Iterable[Request], now: float) -> Iterator[LiveRequest]:
    """What there is to say of each request.

    Args:
        now: ``time.monotonic()``.
    """
    for request in requests:
        live = [sequence for sequence in request.sequences if not sequence.finished]
        num_prompt_tokens = len(request.prompt_token_ids)
        computed = max((sequence.num_computed_tokens for sequence in live), default=0)
        lora_request = request.stream.lora_request
        yield LiveRequest(
            request_id=request.request_id,
            state=_state(request, live),
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_computed_tokens=min(computed, num_prompt_tokens),
            num_output_tokens=sum(sequence.num_output_tokens for sequence in request.sequences),
            num_blocks=_num_blocks(live),
            num_sequences=len(live),
            num_preemptions=request.metrics.num_preemptions,
            age=now - request.metrics.arrival_time,
            adapter=None if lora_request is None else lora_request.lora_name,
        )


def _num_blocks(live: list[Sequence]) -> int:
    tables = [table for sequence in live for table in sequence.blocks.tables]
    if len(live) == 1:
        return sum(len(table.block_ids) - table.num_dropped for table in tables)
    return len(set().union(*(table.held for table in tables)))


def _state(request: Request, live: list[Sequence]) -> LiveState:
    running = [sequence for sequence in live if sequence.status is SequenceStatus.RUNNING]
    if running:
        # All tokens but the one that the next step computes.
        decoding = any(sequence.num_uncomputed_tokens <= 1 for sequence in running)
        return "decoding" if decoding else "prefill"
    return "preempted" if request.metrics.num_preemptions else "queued"
