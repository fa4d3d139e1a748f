from __future__ import annotations

import gc
import os
import select
import threading
import time

import numpy as np
import pytest
from native_reference import address, pack, padded_rows, stride

from streamllm import _native


@pytest.fixture
def event_fd():
    fd = os.eventfd(0)
    yield fd
    os.close(fd)


pytestmark = pytest.mark.skipif(not hasattr(os, "eventfd"), reason="os.eventfd is Linux's")


class Chain:
    """A plan of many dependent products: x0 @ W -> x1 @ W -> ..."""

    def __init__(self, pool: _native.ThreadPool, length: int, rows: int = 16, dim: int = 96) -> None:
        rng = np.random.default_rng(0)
        weight = np.linalg.qr(rng.standard_normal((dim, dim)))[0].astype(np.float32)
        self.matrix = pack(weight)
        self.buffers = [padded_rows(rows, dim) for _ in range(length + 1)]
        self.buffers[0][:] = rng.standard_normal((rows, dim))
        self.plan = _native.Plan(pool)
        for x, out in zip(self.buffers, self.buffers[1:], strict=False):
            self.plan.linear(
                address(x), stride(x), self.matrix, 0, address(out), stride(out), on_outputs=False
            )
        self.expected = self.buffers[0].astype(np.float64) @ np.linalg.matrix_power(
            weight.T.astype(np.float64), length
        )

    def check(self) -> None:
        np.testing.assert_allclose(self.buffers[-1], self.expected, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_operations_run_in_order_on_any_number_of_threads(threads):
    chain = Chain(_native.ThreadPool(threads), 100)
    assert chain.plan.num_ops == 100
    for _ in range(10):
        for buffer in chain.buffers[1:]:
            buffer[:] = np.nan
        chain.plan.run(16, 0, 0)
        chain.check()


def test_submit_signals_the_event_and_frees_the_pool(event_fd):
    chain = Chain(_native.ThreadPool(2), 50)
    for _ in range(200):
        chain.plan.submit(16, 0, 0, event_fd)
        assert select.select([event_fd], [], [], 5)[0]
        assert os.eventfd_read(event_fd) == 1
    chain.check()


def test_second_submit_is_refused_until_the_first_is_done(event_fd):
    pool = _native.ThreadPool(2)
    chain, other = Chain(pool, 300, rows=64, dim=256), Chain(pool, 1)
    chain.plan.submit(64, 0, 0, event_fd)
    with pytest.raises(RuntimeError, match="busy"):
        chain.plan.submit(64, 0, 0, event_fd)
    with pytest.raises(RuntimeError, match="busy"):
        other.plan.run(16, 0, 0)
    with pytest.raises(RuntimeError, match="running"):
        chain.plan.activate(address(chain.buffers[0]), 99, 4, "silu", address(chain.buffers[1]), 99)
    chain.plan.wait()
    assert os.eventfd_read(event_fd) == 1
    chain.check()
    other.plan.wait()
    other.plan.run(16, 0, 0)
    other.check()


def test_run_releases_the_interpreter_lock():
    chain = Chain(_native.ThreadPool(1), 300, rows=64, dim=256)
    running, ticks = threading.Event(), 0
    thread = threading.Thread(target=lambda: (running.wait(), [chain.plan.run(64, 0, 0) for _ in range(5)]))
    thread.start()
    running.set()
    while thread.is_alive():
        ticks += 1
        time.sleep(0.0005)
    assert ticks > 5
    chain.check()


def test_empty_runs_and_empty_plans(event_fd):
    pool = _native.ThreadPool(2)
    _native.Plan(pool).run(0, 0, 0)
    empty = _native.Plan(pool)
    empty.submit(3, 1, 1, event_fd)
    empty.wait()
    assert os.eventfd_read(event_fd) == 1
    Chain(pool, 3).plan.run(0, 0, 0)


def test_negative_counts_are_refused():
    with pytest.raises(ValueError, match="num_tokens"):
        _native.Plan(_native.ThreadPool(1)).run(-1, 0, 0)


@pytest.mark.parametrize("threads", [0, -3, 5000])
def test_bad_thread_counts_are_refused(threads):
    with pytest.raises(ValueError, match="num_threads must be between 1 and 1024"):
        _native.ThreadPool(threads)


def test_pools_and_plans_may_be_dropped_while_idle_asleep_or_running(event_fd):
    before = len(os.listdir("/proc/self/task"))
    for pause in (0.0, 0.002):
        for threads in (1, 2, 5):
            chain = Chain(_native.ThreadPool(threads), 20)
            chain.plan.run(16, 0, 0)
            time.sleep(pause)
            chain.plan.submit(16, 0, 0, event_fd)
            del chain.plan
            chain.check()
            del chain
            gc.collect()
    # Threads of earlier tests may end meanwhile; none of these may stay.
    assert len(os.listdir("/proc/self/task")) <= before


def test_idle_pool_uses_no_processor_time():
    chain = Chain(_native.ThreadPool(4), 5)
    time.sleep(0.2)  # numpy's own threads go to sleep
    chain.plan.run(16, 0, 0)
    time.sleep(0.01)
    start = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - start < 0.03


def test_instruction_sets():
    names = _native.instruction_sets()
    assert names[-1] == "portable" and _native.instruction_set() in names
    with pytest.raises(
        ValueError, match=r"instruction set 'sse9' is not supported here; choose one of .*portable"
    ):
        _native.set_instruction_set("sse9")
