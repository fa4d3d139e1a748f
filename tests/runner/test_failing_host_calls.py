"""Steps whose plan calls a function that raises, as a collective does when a rank has gone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.drive import run_step, run_step_on
from helpers.random_runner import make_runner, new_sequence, step_of

from streamllm.ops.cpu_plan import CpuOps
from streamllm.runner.executor import Executor
from streamllm.runner.messages import ScheduledBatch


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """What the next attention layers of plans raise."""
    raised: list[Exception] = []
    attend = CpuOps.paged_attention

    def attend_and_call(self: CpuOps, *args: Any) -> Any:
        out = attend(self, *args)
        self.host_call([out], fail)
        return out

    def fail(rows: np.ndarray) -> None:
        if raised:
            raise raised.pop()

    monkeypatch.setattr(CpuOps, "paged_attention", attend_and_call)
    return raised


async def test_the_error_is_the_steps_and_the_next_step_is_right(errors):
    first = step_of(new_sequence(0, [1, 2, 3], [0]))
    expected = run_step(make_runner(backend="cpu"), first)
    executor = Executor(make_runner(backend="cpu"))
    errors.append(ConnectionError("rank 1 has gone"))
    with pytest.raises(ConnectionError, match="rank 1"):
        await run_step_on(executor, first)
    assert not errors
    again = ScheduledBatch(
        1,
        finished_slots=[0],
        new_sequences=first.new_sequences,
        rows=first.rows,
        output_rows=first.output_rows,
    )
    assert await run_step_on(executor, again) == expected
    executor.close()


def test_a_runner_closes_while_a_step_fails(errors):
    runner = make_runner(backend="cpu")
    errors.append(ConnectionError("rank 1 has gone"))
    runner.start(step_of(new_sequence(0, [1, 2, 3], [0])))
    runner.close()
    assert runner.event_fd is None and not errors
