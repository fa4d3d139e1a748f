"""Random traffic over random pools: every promise of memory manager and scheduler, in every step.

The harness runs in debug mode (each block's holders and generation are checked in every step), and the fake
model's KV memory finds any block that was shared, copied, reused or forgotten wrongly.
"""

from __future__ import annotations

import random

import pytest
from helpers.fake_model import continuation, expected_prompt_logprobs
from helpers.in_parts import InParts
from helpers.scheduler_harness import Harness, beam_search_alone, outputs_of
from hypothesis import given, settings
from hypothesis import strategies as st

from streamllm.engine.block_table import most_blocks
from streamllm.engine.request import Request

MAX_MODEL_LEN = 96
STOP_TOKEN_IDS = [ord("a"), ord("b")]


class Traffic:
    """Arrivals, forks, priorities, aborts and failures from one seed, over pools down to the smallest legal
    one.

    Args:
        queue_depth: steps in flight at once; now and then fewer.
        failures: whether steps may fail.
    """

    def __init__(self, seed: int, *, queue_depth: int = 1, failures: bool = False):
        self.failures = failures
        self.rng = rng = random.Random(seed)
        self.windows = rng.choice([(None,), (None,), (20,), (None, 20), (None, 40, 20)])
        block_size = rng.choice([16, 32])
        budget = rng.choice([1, 4, 16, 64])
        smallest = most_blocks(MAX_MODEL_LEN, block_size, self.windows, budget)
        self.beam_width = 2
        self.harness = Harness(
            num_blocks=rng.choice([smallest, rng.randint(smallest, 4 * smallest)]),
            block_size=block_size,
            max_num_seqs=min(rng.randint(1, 12), budget),
            budget=budget,
            max_model_len=MAX_MODEL_LEN,
            windows=self.windows,
            prefix_caching=rng.random() < 0.8,
            max_num_partial_prefills=rng.randint(1, 4),
            long_prefill_token_threshold=rng.choice([0, 0, 7]),
            queue_depth=queue_depth,
        )
        self.live: list[Request] = []
        self.stems = [[rng.randint(1, 200) for _ in range(MAX_MODEL_LEN)] for _ in range(3)]

    def disturb(self) -> None:
        while self.rng.random() < 0.3 and len(self.live) < 30:
            self.live.append(self._arrival())
        if self.live and self.rng.random() < 0.05:
            self.harness.abort(self.rng.choice(self.live))
        if self.rng.random() < 0.01:
            self.harness.pool.reset_cache()

    def _arrival(self) -> Request:
        rng = self.rng
        # Prompts begin alike, so that there is something to share.
        stem = rng.choice(self.stems)[: rng.randint(0, MAX_MODEL_LEN - 10)]
        prompt = stem + [rng.randint(1, 200) for _ in range(rng.randint(1, 8))]
        options = {"priority": rng.choice([0, 0, 1, -1]), "salt": rng.choice([None, None, "a"])}
        limits = self.harness.scheduler.limits
        needed = self.beam_width * most_blocks(
            min(len(prompt) + 12, MAX_MODEL_LEN),
            self.harness.pool.block_size,
            self.windows,
            limits.max_num_batched_tokens,
        )
        may_beam = needed <= self.harness.pool.num_blocks and limits.max_num_seqs >= self.beam_width
        if may_beam and rng.random() < 0.2:
            max_tokens = min(rng.randint(1, 12), MAX_MODEL_LEN - len(prompt))
            return self.harness.add(prompt, beam_width=self.beam_width, max_tokens=max_tokens, **options)
        return self.harness.add(
            prompt,
            n=rng.choice([1, 1, 1, 2, 5]),
            max_tokens=rng.choice([1, 2, 10, None]),
            stop_token_ids=rng.choice([None, None, STOP_TOKEN_IDS]),
            prompt_logprobs=rng.choice([None, None, 0, 2]),
            prompt_only=rng.random() < 0.1,
            **options,
        )

    def check_step(self) -> None:
        harness, scheduler = self.harness, self.harness.scheduler
        self.live = [r for r in self.live if not all(s.finished for s in r.sequences)]
        held = {b for s in scheduler._holders() for table in s.blocks.tables for b in table.held}
        assert len(held) == harness.pool.num_used
        assert harness.pool.num_used + harness.pool.num_free == harness.pool.num_blocks
        assert scheduler.num_running <= scheduler.limits.max_num_seqs
        for in_flight in scheduler._in_flight.values():
            assert all(s.slot >= 0 for s in in_flight.rows + in_flight.outputs)
        waiting = sum(s.num_uncomputed_tokens for s in scheduler.sequences() if s.slot < 0)
        assert scheduler.num_waiting_tokens == waiting

    def check_end(self) -> None:
        harness = self.harness
        assert harness.pool.num_free == harness.pool.num_blocks
        assert harness.scheduler.num_waiting == harness.scheduler.num_running == 0
        for request in harness.requests:
            reasons = {s.finish_reason for s in request.sequences}
            if request.beams is None:
                may_waste = self.harness.scheduler.limits.queue_depth
                if not reasons & {"abort", "error"}:
                    may_waste -= 1
                assert all(0 <= wasted <= may_waste for wasted in harness.num_wasted(request))
            if reasons & {"abort", "error"}:
                continue
            if request.beams is not None:
                hypotheses = [h.token_ids for h in request.beams.results()]
                length = len(hypotheses[0])
                alone = beam_search_alone(
                    request.prompt_token_ids, beam_width=self.beam_width, max_tokens=length
                )
                assert hypotheses == alone
                continue
            if request.prompt_logprobs is not None:
                assert request.prompt_logprobs.complete
                assert list(request.prompt_logprobs) == expected_prompt_logprobs(
                    request.prompt_token_ids, request.params.prompt_logprobs
                )
            if request.prompt_only:
                assert [s.finish_reason for s in request.sequences] == ["length"] * len(request.sequences)
                assert not any(outputs_of(request))
            for choice, output in enumerate(outputs_of(request)):
                assert request.sequences[choice].finished
                assert output == continuation(request.prompt_token_ids, len(output), choice)
                self.check_ending(request, output, request.sequences[choice].finish_reason)

    def check_ending(self, request: Request, output: list[int], reason: str | None) -> None:
        """A sequence ends with its first stop token, else by length."""
        params = request.params
        if request.prompt_only:
            return
        stops = [token in (params.stop_token_ids or ()) for token in output]
        assert not any(stops[:-1])
        assert reason == ("stop" if stops[-1] else "length")
        if reason == "length":
            longest = MAX_MODEL_LEN - len(request.prompt_token_ids)
            assert len(output) == min(params.max_tokens or longest, longest)

    def step(self) -> None:
        harness, rng = self.harness, self.rng
        if not harness.in_flight or rng.random() < 0.9:
            harness.submit()
            assert harness.in_flight or not harness.scheduler.has_work, "work, and no progress"
        self.disturb()
        if harness.in_flight and self.failures and rng.random() < 0.05:
            harness.fail()
        elif harness.in_flight:
            harness.land()

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.disturb()
            self.step()
            self.check_step()
            self.harness.runner.batches.clear()
        self.harness.run()
        self.check_end()


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.booleans())
def test_random_traffic_keeps_every_promise(seed, queue_depth, failures):
    """10,000 steps."""
    Traffic(seed, queue_depth=queue_depth, failures=failures).run(200)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 5))
def test_steps_cut_into_micro_batches_keep_every_promise(seed, num_parts):
    """What a row reads of the same step was written in its part or an earlier one."""
    traffic = Traffic(seed)
    cut = InParts(traffic.harness.runner, num_parts)
    traffic.harness.runner = cut
    traffic.run(200)


@pytest.mark.slow
@pytest.mark.parametrize("queue_depth", [1, 2])
@pytest.mark.parametrize("seed", range(50))
def test_random_traffic_for_a_million_steps(seed, queue_depth):
    Traffic(seed, queue_depth=queue_depth, failures=seed % 2 == 1).run(10_000)
