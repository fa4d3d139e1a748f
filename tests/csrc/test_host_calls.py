"""Python functions in native plans: their place, their rows, what they raise, and the interpreter's exit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from native_reference import address, padded_rows, stride

from streamllm import _native


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_call_has_its_place_among_the_operations(threads):
    """Between two additions, of enough rows for every thread to have tiles."""
    plan = _native.Plan(_native.ThreadPool(threads))
    rows, width = 600, 64
    one, total = padded_rows(rows, width), padded_rows(rows, width)
    one[:] = 1.0
    seen = []

    def double(num_rows: int) -> None:
        seen.append((num_rows, float(total.min()), float(total.max())))
        total[:num_rows] *= 2.0

    for _ in range(4):
        plan.add(address(one), stride(one), address(total), stride(total), width)
        plan.call(double)
    for _ in range(5):
        total[:], seen[:] = 0.0, []
        plan.run(rows, 1, 0)
        assert seen == [(rows, 1.0, 1.0), (rows, 3.0, 3.0), (rows, 7.0, 7.0), (rows, 15.0, 15.0)]
        assert (total == 30.0).all()


def test_a_call_has_the_rows_of_tokens_or_of_outputs_and_none_without():
    plan, seen = _native.Plan(_native.ThreadPool(2)), []
    plan.call(lambda rows: seen.append(("tokens", rows)))
    plan.call(lambda rows: seen.append(("outputs", rows)), on_outputs=True)
    plan.run(7, 3, 2)
    plan.run(4, 3, 0)
    assert seen == [("tokens", 7), ("outputs", 2), ("tokens", 4)]


def test_what_a_call_raises_ends_the_run_and_comes_out_of_wait():
    plan, seen, fails = _native.Plan(_native.ThreadPool(2)), [], True

    def fail(rows: int) -> None:
        seen.append("fail")
        if fails:
            raise LookupError("no peer")

    plan.call(fail)
    plan.call(lambda rows: seen.append("after"))
    with pytest.raises(LookupError, match="no peer"):
        plan.run(1, 1, 0)
    event = os.eventfd(0)
    plan.submit(1, 1, 0, event)
    assert os.eventfd_read(event) == 1
    with pytest.raises(LookupError, match="no peer"):
        plan.wait()
    os.close(event)
    plan.wait()
    fails = False
    plan.run(1, 1, 0)
    assert seen == ["fail", "fail", "fail", "after"]


def test_a_failure_nobody_waited_for_does_not_reach_the_next_run():
    plan, raised = _native.Plan(_native.ThreadPool(1)), [ValueError("former")]

    def fail_once(rows: int) -> None:
        if raised:
            raise raised.pop()

    plan.call(fail_once)
    other = _native.Plan(_native.ThreadPool(1))
    plan.submit(1, 1, 0, -1)
    other.run(1, 1, 0)
    while True:
        try:
            plan.submit(1, 1, 0, -1)
            break
        except RuntimeError:  # the former run has not ended
            time.sleep(0.001)
    plan.wait()


def test_plans_of_two_pools_can_wait_for_each_other():
    """Each call needs the interpreter lock while the other's waits."""
    barrier, counts = threading.Barrier(2, timeout=20), [0, 0]

    def meet(place: int) -> None:
        barrier.wait()
        counts[place] += 1

    plans = [_native.Plan(_native.ThreadPool(2)) for _ in range(2)]
    for place, plan in enumerate(plans):
        for _ in range(20):
            plan.call(lambda rows, place=place: meet(place))
        plan.submit(1, 1, 0, -1)
    for plan in plans:
        plan.wait()
    assert counts == [20, 20]


def test_two_plans_of_a_pool_run_one_after_the_other():
    pool, seen = _native.ThreadPool(2), []
    first, second = _native.Plan(pool), _native.Plan(pool)
    first.call(lambda rows: seen.append("first"))
    second.call(lambda rows: seen.append("second"))
    for _ in range(3):
        first.run(1, 1, 0)
        second.run(1, 1, 0)
    assert seen == ["first", "second"] * 3


def test_a_plan_that_is_let_go_ends_its_run_first():
    """Its end must not hold the interpreter lock, which the call needs to return."""
    plan, seen = _native.Plan(_native.ThreadPool(1)), []
    plan.call(lambda rows: (time.sleep(0.05), seen.append(rows)))
    plan.submit(3, 1, 0, -1)
    del plan
    assert seen == [3]


def test_a_plan_keeps_its_functions_and_lets_them_go():
    class Function:
        def __init__(self) -> None:
            self.ended = threading.Event()

        def __call__(self, rows: int) -> None: ...

    function = Function()
    references = sys.getrefcount(function)
    plan = _native.Plan(_native.ThreadPool(1))
    plan.call(function)
    plan.run(1, 1, 0)
    assert sys.getrefcount(function) == references + 1
    del plan
    assert sys.getrefcount(function) == references


def test_only_functions_can_be_called():
    plan = _native.Plan(_native.ThreadPool(1))
    with pytest.raises(TypeError):
        plan.call(3)
    plan.call(lambda: None)
    with pytest.raises(TypeError, match="positional argument"):
        plan.run(1, 1, 0)


EXITS = {
    "in a call": "time.sleep(0.2); print('call done', flush=True)",
    "between calls": "time.sleep(0.01)",
    "raising": "raise ValueError('nobody reads this')",
}


@pytest.mark.parametrize("body", EXITS.values(), ids=EXITS)
def test_the_interpreter_can_exit_while_a_plan_runs(body):
    """The call in progress is done, and no other begins in an interpreter that is gone."""
    script = f"""
import time
from streamllm import _native
def function(rows):
    {body}
pool = _native.ThreadPool(2)
plan = _native.Plan(pool)
for _ in range(100):
    plan.call(function)
plan.submit(1, 1, 0, -1)
time.sleep(0.05)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("call done") == ("call done" in body)


def test_an_embedding_of_some_tokens_has_zeros_for_the_others():
    weight = np.arange(40, dtype=np.float32).reshape(5, 8)
    matrix = _native.PackedMatrix(8)
    matrix.append_rows("float32", weight.ctypes.data, 5, 32)
    ids, out = np.array([9, 10, 14, 15, 0, -1, 2**31 - 1], np.int32), padded_rows(7, 8)
    plan = _native.Plan(_native.ThreadPool(1))
    plan.embedding(address(ids), matrix, address(out), stride(out), first_row=10)
    plan.run(7, 1, 0)
    np.testing.assert_array_equal(out[[1, 2]], weight[[0, 4]])
    assert not out[[0, 3, 4, 5, 6]].any()
