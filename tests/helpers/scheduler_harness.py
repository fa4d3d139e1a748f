"""The real scheduler and block manager over the fake model, stepped by hand."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

from helpers.byte_tokenizer import ByteTokenizer
from helpers.fake_model import FakeRunner, ranked_tokens

from streamllm.engine.beam_search import BeamSearch
from streamllm.engine.block_pool import BlockPool
from streamllm.engine.block_table import BlockTables
from streamllm.engine.prefix_hash import block_hashes, chain_seed
from streamllm.engine.prompt_logprobs import PromptLogprobs
from streamllm.engine.request import Request, Sequence
from streamllm.engine.scheduler import Scheduler
from streamllm.engine.step import Limits
from streamllm.ops.lora import LoraAdapter
from streamllm.outputs import RequestMetrics
from streamllm.runner.messages import ScheduledBatch, StepOutput
from streamllm.runner.token_rules import TokenRules
from streamllm.sampling_params import BeamSearchParams, SamplingParams

EOS = 0


class Harness:
    """Every step is checked by the scheduler's debug mode and by the fake model's KV memory."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        max_num_seqs: int = 8,
        budget: int = 32,
        max_model_len: int = 96,
        windows: tuple[int | None, ...] = (None,),
        prefix_caching: bool = True,
        debug: bool = True,
        queue_depth: int = 1,
        **limits,
    ):
        self.pool = BlockPool(num_blocks, block_size, debug=debug)
        self.scheduler = Scheduler(
            self.pool,
            Limits(max_num_seqs, budget, queue_depth=queue_depth, **{"watermark": 0.01, **limits}),
            debug=debug,
        )
        self.in_flight: deque[tuple[ScheduledBatch, StepOutput]] = deque()
        self.doomed: set[int] = set()
        self.runner = FakeRunner(block_size=block_size, max_num_batched_tokens=budget, windows=windows)
        self.windows = windows
        self.max_model_len = max_model_len
        self.prefix_caching = prefix_caching
        self.requests: list[Request] = []
        self.events: list = []

    def add(
        self,
        prompt: list[int],
        *,
        priority: int = 0,
        salt: str | None = None,
        prompt_only: bool = False,
        rules: TokenRules | None = None,
        adapter: LoraAdapter | None = None,
        **params,
    ) -> Request:
        """Queue a request; ``beam_width`` among ``params`` makes it a beam search."""
        content = None if adapter is None else adapter.content
        seed = chain_seed(salt=salt, adapter=content) if self.prefix_caching else None
        hashes = block_hashes(prompt, self.pool.block_size, seed) if seed else []
        beams = None
        num_choices = params.get("n", 1)
        if "beam_width" in params:
            search = BeamSearchParams(**params)
            beams = BeamSearch(search, frozenset(), search.max_tokens)
            params = {"max_tokens": None, "temperature": 0}
            num_choices = 1
        request = Request(
            request_id=str(len(self.requests)),
            prompt=None,
            prompt_token_ids=prompt,
            params=SamplingParams(**params),
            eos_token_ids=frozenset({EOS}),
            max_total_tokens=self.max_model_len,
            metrics=RequestMetrics(arrival_time=0.0),
            stream=SimpleNamespace(),
            num_logprobs=beams.num_candidates if beams else params.get("logprobs"),
            hash_seed=seed,
            beams=beams,
            prompt_only=prompt_only,
            rules=rules,
            adapter=adapter,
        )
        if request.params.prompt_logprobs is not None:
            request.prompt_logprobs = PromptLogprobs(prompt, request.params.prompt_logprobs, ByteTokenizer())
        request.sequences = [
            Sequence(
                key=(priority, len(self.requests), self.scheduler.new_sequence_id()),
                request=request,
                choice_index=choice,
                seed=0,
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                blocks=BlockTables(self.pool, self.windows),
                text=None,
                block_hashes=hashes if choice == 0 else [],
            )
            for choice in range(num_choices)
        ]
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def abort(self, request: Request) -> None:
        for sequence in request.sequences:
            self.scheduler.finish(sequence, "abort")

    def step(self, between=lambda: None) -> bool:
        """Submits as many steps as the queue takes; ``between`` runs while they are in flight; then the
        oldest returns. False when there is nothing to do."""
        self.submit()
        if not self.in_flight:
            return False
        between()
        self.land()
        return True

    def submit(self) -> None:
        """Submits as many steps as the queue takes."""
        depth = self.scheduler.limits.queue_depth
        while len(self.in_flight) < depth and (batch := self.scheduler.schedule()) is not None:
            self.in_flight.append((batch, self.runner.step(batch)))

    def land(self) -> None:
        """The oldest step returns."""
        batch, output = self.in_flight.popleft()
        if batch.step in self.doomed:
            self.scheduler.drop_step(batch)
        else:
            self.events.append(self.scheduler.update(batch, output))

    def fail(self) -> None:
        """The oldest step raises, and with it all that are in flight."""
        batch, _ = self.in_flight.popleft()
        if batch.step in self.doomed:
            self.scheduler.drop_step(batch)
            return
        self.events.append(self.scheduler.fail_step(batch, "it broke"))
        for update in self.events[-1]:
            for sequence in update.sequence.request.sequences:
                self.scheduler.finish(sequence, "error")
        self.doomed.update(later.step for later, _ in self.in_flight)

    def num_wasted(self, request: Request) -> list[int]:
        """Tokens of each sequence that were drawn and dropped."""
        drawn = self.runner.num_drawn
        return [drawn[s.sequence_id] - s.num_output_tokens for s in request.sequences]

    def run(self) -> None:
        steps = 0
        while self.step():
            steps += 1
            assert steps < 20_000, "livelock"


def outputs_of(request: Request) -> list[list[int]]:
    """Generated tokens of each sequence."""
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in request.sequences]


def beam_search_alone(prompt: list[int], **params) -> list[list[int]]:
    """The hypotheses of a search over the fake model, without scheduler, blocks or batch."""
    search_params = BeamSearchParams(**params)
    search = BeamSearch(search_params, frozenset(), search_params.max_tokens)
    live = [list(prompt)]
    while live:
        continuations = search.advance([ranked_tokens(beam, search.num_candidates) for beam in live])
        live = [[*live[c.parent], c.token_id] for c in continuations]
    return [hypothesis.token_ids for hypothesis in search.results()]
