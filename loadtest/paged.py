"""A workload through the engine's scheduler and block manager, ready-made tokens in the model's place."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from beams import Recording
from driver import Driver
from figures import Average, Figures, Window

from streamllm.bench.traces import MAX_LENGTH, Lengths, random_prompts
from streamllm.engine.beam_search import BeamSearch
from streamllm.engine.request import Request
from streamllm.engine.stats import memory_figures
from streamllm.engine.step import Limits
from streamllm.runner.messages import ScheduledBatch, StepOutput, TokenLogprobs
from streamllm.sampling_params import BeamSearchParams

BLOCK_SIZE = 16
LIMITS = Limits(max_num_seqs=1024, max_num_batched_tokens=4096)
"""Wide enough that memory alone bounds the batch."""
STEPS_PER_LOOK = 4
"""Counting every block takes longer than a step; neighbouring steps hardly differ."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """How the requests of a workload decode: ``width`` samples each, or one beam search of that width."""

    kind: str
    width: int

    @property
    def is_beam(self) -> bool:
        return self.kind == "beam"

    @property
    def label(self) -> str:
        if self.width == 1:
            return "one sample"
        return f"beam {self.width}" if self.is_beam else f"n = {self.width}"


class ReadyTokens:
    """Answers a step as a model would: samples get a token that nobody else gets, beams the candidates that
    make their search decide as it was recorded.

    Attributes:
        searches: the live beam searches, each with what it replays, by request id.
        num_tokens: tokens computed so far.
    """

    def __init__(self) -> None:
        self.searches: dict[str, tuple[Request, Recording]] = {}
        self.num_tokens = 0
        self._counter = itertools.count()

    def __call__(self, batch: ScheduledBatch) -> StepOutput:
        self.num_tokens += batch.num_tokens
        reports = self._beam_reports()
        output = StepOutput([], [], [])
        for row in batch.output_rows:
            report = reports.get(row.sequence_id)
            output.token_ids.append([next(self._counter)])
            output.logprobs.append(None if report is None else [report])
            output.errors.append(None)
        return output

    def _beam_reports(self) -> dict[int, TokenLogprobs]:
        """What each beam reports next, by sequence id."""
        reports = {}
        for request, recording in self.searches.values():
            for beam, sequence in enumerate(request.sequences):
                candidates = recording.candidates(sequence.num_output_tokens, beam)
                reports[sequence.sequence_id] = TokenLogprobs(
                    0.0, 1, [token for token, _ in candidates], [logprob for _, logprob in candidates]
                )
        return reports


def run_paged(
    requests: Seq[Lengths],
    decoding: Decoding,
    recordings: Seq[Recording],
    num_slots: int,
    window: Window,
    seed: int,
) -> Figures:
    """Serve all requests, queued at once, in a pool of ``num_slots`` slots; searches replay ``recordings`` in
    turn."""
    ready = ReadyTokens()
    driver = Driver(
        num_blocks=num_slots // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        limits=LIMITS,
        answer=ready,
        max_model_len=MAX_LENGTH,
    )
    prompts = random_prompts(list(requests), seed)
    for number, (lengths, prompt) in enumerate(zip(requests, prompts, strict=True)):
        if decoding.is_beam:
            params = BeamSearchParams(beam_width=decoding.width, max_tokens=lengths.output, ignore_eos=True)
            request = driver.add(
                prompt, lengths.output, beams=BeamSearch(params, frozenset(), lengths.output)
            )
            ready.searches[request.request_id] = request, recordings[number % len(recordings)]
        else:
            driver.add(prompt, lengths.output, n=decoding.width)

    average = Average()
    steps = itertools.count()

    def look() -> None:
        due = next(steps) % STEPS_PER_LOOK == 0
        if due and window.is_open(driver.num_finished, driver.scheduler.num_waiting):
            average.add(**_figures_now(driver))

    while driver.step(look):
        for request_id in ready.searches.keys() - driver.live.keys():
            del ready.searches[request_id]
    # The prompt once; of each output all but its last token.
    needed = sum(each.prompt + decoding.width * (each.output - 1) for each in requests)
    return average.figures(
        num_steps=next(steps),
        num_preemptions=driver.scheduler.num_preemptions,
        recomputed=1 - needed / ready.num_tokens,
    )


def _figures_now(driver: Driver) -> dict[str, float]:
    memory = memory_figures(driver.pool, driver.scheduler.sequences())
    running = [s for s in driver.scheduler.sequences() if s.slot >= 0]
    return {
        "waste": memory.waste,
        "used": memory.used_slots / (memory.num_blocks * BLOCK_SIZE),
        "requests": len({s.request.request_id for s in running}),
        "sequences": len(running),
        "sharing": memory.sharing,
    }
