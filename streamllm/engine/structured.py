"""Structured output: grammars compiled beside the loop, and the masks that they put on sampling.

A request with a constraint waits in :meth:`GrammarCompiler.compile` before it is queued: the constraint is
tried in a process of its own (:mod:`streamllm.engine.grammar_trial`), then compiled on a thread, and kept for
the next request that brings it. While a forward runs, :class:`GrammarMasks` fills one mask a constrained
output row, some 50 µs each.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceType
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from streamllm.engine.constraint import ConstraintSource, constraint_length, constraint_source, refused
from streamllm.errors import InvalidRequestError
from streamllm.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from streamllm.engine.grammar_compile import CompiledGrammar
    from streamllm.engine.grammar_trial import TrialProcess
    from streamllm.engine.request import Request, Sequence
    from streamllm.text.tokenizer import Tokenizer

logger = logging.getLogger("streamllm.engine")

WAIT_SECONDS = 5.0
"""For how long a request waits for its grammar, behind others and in its own compilation."""

NUM_COMPILERS = 2
"""Constraints that are tried at once: one that takes its whole time must not keep all others waiting."""

MAX_WAITING = 64
"""Different constraints that wait for a compiler or are in one."""

MAX_CACHED = 64
LONG_CONSTRAINT = 20_000
"""Characters from which reading a constraint leaves the event loop (a few milliseconds of work)."""

SLOW_STEP_SECONDS, SLOW_MASK_SECONDS = 0.1, 0.05
"""When the masks of a step take longer, those of the next are filled one by one, and a sequence whose mask
takes longer fails: every sequence of the step waits for it."""


class GrammarState:
    """Where one sequence stands in its grammar.

    Args:
        grammar: what its text must follow.
    """

    __slots__ = ("_grammar", "_matcher")

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar = grammar
        self._matcher: Any = None

    @property
    def matcher(self) -> Any:
        """The library's object; made when it is first needed, so that who waits in the queue has none."""
        if self._matcher is None:
            self._matcher = self._grammar.matcher.deep_copy()
        return self._matcher

    def accept(self, token_id: int) -> bool:
        """Take in the token just sampled; returns whether the text must end with it.

        A token that the grammar does not allow puts the state in error, which shows at the next mask.
        """
        return self.matcher.consume_token(token_id) and self._matcher.is_stopped()

    def error(self) -> str | None:
        """Why no mask could be filled, if so."""
        if not self.matcher.is_error():
            return None
        self._grammar.failed = True
        reason = self._matcher.get_error().partition("\n")[0]
        return f"the grammar failed: {reason}"


def constrain(request: Request, grammar: CompiledGrammar | None) -> None:
    """Let each of a request's sequences follow ``grammar`` from its beginning."""
    if grammar is not None:
        for sequence in request.sequences:
            sequence.grammar = GrammarState(grammar)


class GrammarMasks:
    """The masks of the steps in flight, in memory that is used over and over.

    Args:
        max_num_seqs: output rows of a step at most.
        vocab_size: ids that can be sampled.
        num_steps: steps in flight at most.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, *, num_steps: int = 1) -> None:
        self._shape = num_steps, max_num_seqs, -(-vocab_size // 32)
        self._memory: np.ndarray | None = None
        self._num_filled = 0
        self._executor: Any = None
        self._one_by_one = False

    def fill(
        self, outputs: SequenceType[Sequence], fail: Callable[[Request, str], None]
    ) -> dict[int, np.ndarray] | None:
        """Masks of the constrained output rows: row -> uint32 ``[ceil(vocab_size / 32)]``, bit ``id % 32`` of
        word ``id // 32`` set for what may come next. They stay for ``num_steps`` calls, this one included.

        Args:
            outputs: the sequence of each output row.
            fail: called with a request whose grammar failed, and why.
        """
        constrained = [
            (index, sequence, sequence.grammar)
            for index, sequence in enumerate(outputs)
            if sequence.grammar is not None and not sequence.finished
        ]
        if not constrained:
            return None
        if self._memory is None:
            self._memory = np.zeros(self._shape, np.uint32)
        rows = self._memory[self._num_filled % len(self._memory)]
        self._num_filled += 1
        slow = self._compute([(state, index) for index, _, state in constrained], rows)
        masks = {}
        for index, sequence, state in constrained:
            error = slow.get(index) or state.error()
            if error is None:
                masks[index] = rows[index]
            else:
                fail(sequence.request, error)
        return masks

    def _compute(self, states: list[tuple[GrammarState, int]], rows: np.ndarray) -> dict[int, str]:
        """Fill the rows; returns why those took too long that did."""
        size = rows[0].nbytes
        began = time.perf_counter()
        slow = {}
        if len(states) == 1 or self._one_by_one:
            for state, index in states:
                # CPU time: a thread that does not get a core is not the grammar's fault.
                cpu_began = time.thread_time()
                state.matcher.unsafe_compute_mask_ptr(rows[index].ctypes.data, size)
                if time.thread_time() - cpu_began > SLOW_MASK_SECONDS:
                    slow[index] = f"the grammar is too complex: a mask takes over {SLOW_MASK_SECONDS:g} s"
        else:
            # One call, so that the interpreter's lock is given up and won back once.
            if self._executor is None:
                self._executor = _make_executor()
            matchers = [(state.matcher, index) for state, index in states]
            self._executor.unsafe_compute_mask_ptr(matchers, rows.ctypes.data, size, len(rows))
        self._one_by_one = time.perf_counter() - began > SLOW_STEP_SECONDS
        return slow


def _make_executor() -> Any:
    import llguidance

    # The cores belong to the model's kernels; what they leave over is enough for some masks.
    return llguidance.LLExecutor(num_threads=max(1, min(8, (os.cpu_count() or 1) // 4)))


@dataclass(slots=True)
class _Compilation:
    """A constraint that waits for a compiler or is in one, and how many requests wait for it."""

    task: asyncio.Task[CompiledGrammar]
    num_requests: int = 0


class GrammarCompiler:
    """Compiles constraints for the engine. Used on the loop's thread.

    Args:
        tokenizer: whose tokens grammars allow or forbid.
        eos_token_ids: all of them may end a text that its grammar accepts.
        vocab_size: ids that can be sampled.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Iterable[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = sorted(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self._vocab_size = vocab_size
        self._pool: ThreadPoolExecutor | None = None
        self._lltokenizer: Any = None
        self._idle: list[TrialProcess] = []
        self._trials: list[TrialProcess] = []
        self._waiting: dict[ConstraintSource, _Compilation] = {}
        self._cached: OrderedDict[ConstraintSource, CompiledGrammar] = OrderedDict()
        self._start: asyncio.Future[None] | None = None

    async def compile(self, params: SamplingParams | BeamSearchParams) -> CompiledGrammar | None:
        """The grammar that a request asks for, ``None`` if it asks for none.

        Raises:
            InvalidRequestError: it cannot be enforced, for a reason that the message gives. 503: too many
                others are being compiled.
        """
        if isinstance(params, BeamSearchParams) or not _needs_grammar(params):
            return None
        if not self._eos_token_ids:
            raise refused("the model has no EOS token, with which a text could end")
        source = await self._source(params)
        known = self._cached.get(source)
        if known is not None and not known.failed:
            self._cached.move_to_end(source)
            return known
        compilation = self._waiting.get(source)
        if compilation is None:
            if len(self._waiting) >= MAX_WAITING:
                raise _busy()
            compilation = self._waiting[source] = _Compilation(asyncio.create_task(self._compile(source)))
        compilation.num_requests += 1
        try:
            grammar = await asyncio.wait_for(asyncio.shield(compilation.task), WAIT_SECONDS)
        except asyncio.TimeoutError:
            raise _busy() from None
        finally:
            compilation.num_requests -= 1
            if not compilation.num_requests:
                # It is done, or leaves the queue since nobody waits any more.
                compilation.task.cancel()
                del self._waiting[source]
        self._cached[source] = grammar
        if len(self._cached) > MAX_CACHED:
            self._cached.popitem(last=False)
        return grammar

    def close(self) -> None:
        """End the processes. Constraints that wait are refused."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        for trial in self._trials:
            trial.close()

    # -- inside --------------------------------------------------------------------------------------------

    async def _source(self, params: SamplingParams) -> ConstraintSource:
        constraint = params.structured_outputs
        read = functools.partial(constraint_source, constraint, params.thinking, vocab_size=self._vocab_size)
        if constraint is None or constraint_length(constraint) < LONG_CONSTRAINT:
            return read()
        return await asyncio.to_thread(read)

    async def _compile(self, source: ConstraintSource) -> CompiledGrammar:
        loop = asyncio.get_running_loop()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(NUM_COMPILERS, "streamllm-grammar")
            self._start = loop.run_in_executor(self._pool, self._load)
        assert self._start is not None
        await asyncio.shield(self._start)
        return await loop.run_in_executor(self._pool, self._run, source)

    def _load(self) -> None:
        """Import the library and build its tokenizer; on a thread."""
        from streamllm.engine.grammar_compile import Vocabulary
        from streamllm.engine.grammar_trial import TrialProcess

        tokenizer = self._tokenizer
        ids = range(self._vocab_size)
        vocabulary = Vocabulary(
            token_bytes=[tokenizer.token_bytes(token_id) for token_id in ids],
            special_ids=[token_id for token_id in ids if tokenizer.is_special(token_id)],
            eos_ids=self._eos_token_ids,
        )
        self._lltokenizer = vocabulary.to_llguidance()
        encoded = msgspec.msgpack.encode(vocabulary)
        self._trials = [TrialProcess(encoded) for _ in range(NUM_COMPILERS)]
        self._idle = list(self._trials)

    def _run(self, source: ConstraintSource) -> CompiledGrammar:
        """Try, then compile; on a thread of a pool that has as many as there are processes."""
        from streamllm.engine.grammar_compile import ConstraintError, compile_grammar

        trial = self._idle.pop()
        try:
            verdict = trial.run(source)
        except OSError as error:
            logger.error("structured output is not available: %s", error)
            raise refused(str(error), status=503) from None
        finally:
            self._give_back(trial)
        if verdict.grammar is None:
            raise refused(verdict.error or "it failed")
        try:
            return compile_grammar(self._lltokenizer, verdict.grammar)
        except ConstraintError as error:
            raise refused(str(error)) from None

    def _give_back(self, trial: TrialProcess) -> None:
        """One that runs is taken next; one that has died is started again before somebody needs it."""
        self._idle.insert(len(self._idle) if trial.started else 0, trial)
        if not trial.started and self._pool is not None:
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._pool.submit(self._restart)

    def _restart(self) -> None:
        trial = self._idle.pop(0)
        try:
            trial.start()
        except OSError as error:
            logger.error("structured output is not available: %s", error)
        self._idle.insert(len(self._idle) if trial.started else 0, trial)


def _needs_grammar(params: SamplingParams) -> bool:
    """Thinking by itself needs one only to end it in time."""
    if params.structured_outputs is not None:
        return True
    return params.thinking is not None and params.thinking.is_limited


def _busy() -> InvalidRequestError:
    return InvalidRequestError(
        "structured_outputs: other constraints are being compiled; try again later.",
        param="structured_outputs",
        status=503,
    )
