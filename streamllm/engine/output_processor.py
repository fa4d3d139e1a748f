"""From token ids to text deltas: detokenise, look for stop strings, push to the requests' streams."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from streamllm.engine.beam_search import BeamSearch
from streamllm.engine.events import EventLog
from streamllm.engine.request import Request, Sequence, SequenceUpdate
from streamllm.engine.sequence_text import SequenceText
from streamllm.engine.stats import Counters, RequestRecord, request_record
from streamllm.engine.step_history import Delivery
from streamllm.errors import StreamLLMError
from streamllm.outputs import CompletionOutput, Logprob
from streamllm.runner.messages import TokenLogprobs
from streamllm.text.tokenizer import Tokenizer

logger = logging.getLogger("streamllm.engine")


class OutputProcessor:
    """Turns a step's updates into deltas on the requests' streams.

    Args:
        tokenizer: turns ids into text.
        finish: the scheduler's ``finish(sequence, reason, stop_reason)``, for endings found in the text.
        on_finished: called with the record of each request that has ended.
        events: where first tokens and endings are noted.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        finish: Callable[[Sequence, str, str | int | None], None],
        on_finished: Callable[[RequestRecord], None],
        events: EventLog,
    ) -> None:
        self._events = events
        self._delivery = Delivery(0.0)
        self._gaps = self._delivery.gaps
        self.counters = Counters()
        self._tokenizer = tokenizer
        self._finish = finish
        self._on_finished = on_finished

    def process(self, updates: list[SequenceUpdate]) -> Delivery:
        """Deliver a step's updates. A sequence aborted since then gets nothing more."""
        now = time.monotonic()
        delivery = self._delivery = Delivery(now)
        self._gaps = delivery.gaps
        for update in updates:
            if update.sequence.finish_reason == "abort":
                continue
            try:
                if update.error is not None:
                    self._fail(update.sequence.request, update.error, now)
                elif update.sequence.request.beams is not None:
                    self._deliver_beams(update.sequence.request, update.sequence.request.beams, now)
                else:
                    self._deliver(update, now)
            except Exception as error:
                # One request's text must not end the others.
                logger.exception("delivering to request %s failed", update.sequence.request.request_id)
                self._fail(update.sequence.request, f"delivering its output failed: {error}", now)
        return delivery

    def fail(self, request: Request, error: str) -> None:
        """End a request with an error, at any time."""
        self._fail(request, error, time.monotonic())

    def abort(self, request: Request) -> None:
        """Tell the reader that a request was aborted (the scheduler has already let its sequences go)."""
        request.stream.abort_unfinished()
        self._request_finished(request, "abort", time.monotonic())

    # -- inside --------------------------------------------------------------------------------------------

    def _deliver(self, update: SequenceUpdate, now: float) -> None:
        sequence, request = update.sequence, update.sequence.request
        self._count_prompt(request)
        if not request.prompt_only:
            self._note_times(request, now)
            if last := sequence.last_token_time:
                self._gaps[last] += 1
            sequence.last_token_time = now
        delta = CompletionOutput(
            index=sequence.choice_index,
            finish_reason=update.finish_reason,
            stop_reason=update.stop_reason,
            ended_by_id=update.ended_by_id,
        )
        pieces = []
        stop = None
        for position, token_id in enumerate(update.token_ids):
            # The token that ends a sequence by id (EOS, a stop token) is not text, unless asked for.
            silent = self._ends_by_id(update, position)
            if silent:
                sequence.text.num_tokens += 1
            else:
                text, stop = sequence.text.push(token_id, stops_armed=self._stops_armed(sequence))
                pieces.append(text)
            delta.token_ids.append(token_id)
            if update.logprobs is not None:
                self._add_logprobs(delta, sequence, token_id, update.logprobs[position])
            if stop is not None:
                delta.ended_by_id = False
                break
        self.counters.generation_tokens += len(delta.token_ids)
        if stop is None and update.finish_reason is not None:
            text, stop = sequence.text.finish()
            pieces.append(text)
        if stop is not None:
            delta.finish_reason, delta.stop_reason = "stop", stop
            self._finish(sequence, "stop", stop)
        delta.text = "".join(pieces)
        if update.logprobs is not None:
            delta.cumulative_logprob = sequence.text.cumulative_logprob
        request.stream.push(delta)
        if delta.finish_reason is not None:
            self._request_finished(request, delta.finish_reason, now)

    def _deliver_beams(self, request: Request, beams: BeamSearch, now: float) -> None:
        """A beam search is over: its hypotheses become the request's choices, best first."""
        self._count_prompt(request)
        self._note_times(request, now)
        for index, hypothesis in enumerate(beams.results()):
            text = SequenceText(self._tokenizer, request.params)
            shown = hypothesis.token_ids[:-1] if hypothesis.stopped else hypothesis.token_ids
            pieces = [text.push(token_id, stops_armed=False)[0] for token_id in shown]
            pieces.append(text.finish()[0])
            self.counters.generation_tokens += len(hypothesis.token_ids)
            request.stream.push(
                CompletionOutput(
                    index=index,
                    text="".join(pieces),
                    token_ids=hypothesis.token_ids,
                    cumulative_logprob=hypothesis.cumulative_logprob,
                    finish_reason="stop" if hypothesis.stopped else "length",
                )
            )
        self._request_finished(request, "stop", now)

    def _count_prompt(self, request: Request) -> None:
        """Once a request: its prompt has been processed."""
        if not request.prompt_counted:
            request.prompt_counted = True
            request.stream.num_cached_tokens = request.num_cached_tokens
            self.counters.prompt_tokens += len(request.prompt_token_ids)
            self.counters.cached_prompt_tokens += request.num_cached_tokens

    def _note_times(self, request: Request, now: float) -> None:
        metrics = request.metrics
        if metrics.first_token_time is None:
            metrics.first_token_time = now
            self._delivery.first_tokens.append(now - metrics.arrival_time)
            self._events.record("first_token", request.request_id)
        metrics.last_token_time = now

    @staticmethod
    def _stops_armed(sequence: Sequence) -> bool:
        return sequence.text.num_tokens + 1 >= sequence.request.params.min_tokens

    @staticmethod
    def _ends_by_id(update: SequenceUpdate, position: int) -> bool:
        """Whether the token at ``position`` ended the sequence as EOS or as a stop token."""
        params = update.sequence.request.params
        return (
            update.ended_by_id
            and position == len(update.token_ids) - 1
            and not (params.include_stop_str_in_output and update.stop_reason is not None)
        )

    def _add_logprobs(
        self, delta: CompletionOutput, sequence: Sequence, token_id: int, logprobs: TokenLogprobs
    ) -> None:
        sequence.text.cumulative_logprob += logprobs.logprob
        text_of = self._tokenizer.token_text
        entry = {token_id: Logprob(logprobs.logprob, logprobs.rank, text_of(token_id))}
        for rank, (other, logprob) in enumerate(
            zip(logprobs.top_ids, logprobs.top_logprobs, strict=True), start=1
        ):
            entry.setdefault(other, Logprob(logprob, rank, text_of(other)))
        delta.logprobs = [*(delta.logprobs or []), entry]

    def _fail(self, request: Request, error: str | StreamLLMError, now: float) -> None:
        for sequence in request.sequences:
            self._finish(sequence, "error", None)
        request.stream.fail(error)
        self._request_finished(request, "error", now)

    def _request_finished(self, request: Request, reason: str, now: float) -> None:
        """Count a request once, when its last choice has ended."""
        metrics = request.metrics
        if metrics.finished_time is not None or not request.stream.finished:
            return
        metrics.finished_time = now
        num_tokens = request.stream.num_pushed_tokens
        self._events.record("finished", request.request_id, num_tokens, reason)
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1
        self._on_finished(request_record(request, reason, now))
