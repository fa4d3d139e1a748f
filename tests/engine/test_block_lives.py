"""How long KV blocks live, against a recorder that writes everything down and computes afterwards."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise

import pytest

from streamllm.config import EngineConfig
from streamllm.engine.block_lives import ACCESSES_KEPT, BlockLife, BlockLives
from streamllm.engine.block_pool import BlockPool
from streamllm.errors import ConfigError


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def observed_pool(num_blocks: int, sample_rate: float = 1.0) -> tuple[BlockPool, Clock, list[BlockLife]]:
    pool, clock, lives = BlockPool(num_blocks, 16), Clock(), []
    observer = BlockLives(sample_rate, clock)
    observer.on_end(lives.append)
    pool.observer = observer
    return pool, clock, lives


def test_a_life_ends_when_the_memory_is_handed_out_again():
    pool, clock, lives = observed_pool(1)
    blocks = pool.allocate(1)
    pool.register(blocks[0], (0, b"content"))
    for clock.now in (3.0, 4.0, 7.5):
        pool.share(blocks)
        pool.release(blocks)
    clock.now = 9.0
    pool.release(blocks)
    assert lives == []
    clock.now = 10.0
    assert pool.allocate(1) == blocks
    assert lives == [BlockLife(lifetime=10.0, idle=2.5, reuse_gaps=(1.0, 3.5))]


def test_a_block_that_nobody_took_up_again_was_idle_all_its_life():
    pool, clock, lives = observed_pool(1)
    pool.release(pool.allocate(1))
    clock.now = 2.0
    pool.allocate(1)
    assert lives == [BlockLife(lifetime=2.0, idle=2.0, reuse_gaps=())]


def test_a_copy_on_write_begins_a_life():
    pool, clock, lives = observed_pool(3)
    (block,) = pool.allocate(1)
    pool.share([block])
    clock.now = 1.0
    copy = pool.replace(block)
    pool.release([copy])
    clock.now = 4.0
    assert copy in pool.allocate(2)
    assert BlockLife(lifetime=3.0, idle=3.0, reuse_gaps=()) in lives


def test_lives_that_a_reset_cuts_short_are_not_told():
    pool, clock, lives = observed_pool(2)
    pool.release(pool.allocate(2))
    pool.reset_cache()
    clock.now = 1.0
    pool.allocate(2)
    assert lives == []


def test_a_sample_is_followed():
    pool, _, lives = observed_pool(10_000, sample_rate=0.1)
    pool.release(pool.allocate(10_000))
    pool.allocate(10_000)
    # Six standard deviations around 1,000.
    assert 820 < len(lives) < 1180


@pytest.mark.parametrize(("rate", "message"), [(0, "must be above 0"), (1.5, "must be between 0 and 1")])
def test_a_share_that_is_none_is_refused(rate, message):
    with pytest.raises(ConfigError, match=f"--kv-cache-metrics-sample {message}"):
        EngineConfig(kv_cache_metrics_sample=rate)


class Recorder:
    """Writes down who took which block when; knows nothing of pools."""

    def __init__(self) -> None:
        self.events: dict[int, list[tuple[str, float]]] = defaultdict(list)

    def write(self, what: str, block_ids: list[int], now: float) -> None:
        for block_id in block_ids:
            self.events[block_id].append((what, now))

    def lives(self) -> list[tuple[float, float, tuple[float, ...]]]:
        """Lifetime, idle time and gaps of each life that has ended, in any order."""
        lives = []
        for events in self.events.values():
            births = [index for index, (what, _) in enumerate(events) if what == "allocated"]
            for begin, end in pairwise(births):
                times = [time for _, time in events[begin : end + 1]]
                accesses = times[1:-1][-ACCESSES_KEPT:]
                gaps = tuple(b - a for a, b in pairwise(accesses))
                lives.append((times[-1] - times[0], times[-1] - times[-2], gaps))
        return lives


@pytest.mark.parametrize("seed", range(20))
def test_all_lives_are_as_recorded(seed):
    rng = random.Random(seed)
    pool, clock, lives = observed_pool(6)
    recorder = Recorder()
    holders: list[list[int]] = []
    for step in range(1000):
        clock.now += rng.randrange(4)
        operation = rng.choice(["allocate", "share", "find", "copy", "release", "release", "release"])
        mine = rng.choice(holders) if holders else []
        if operation == "allocate" and pool.num_free:
            blocks = pool.allocate(rng.randint(1, pool.num_free))
            recorder.write("allocated", blocks, clock.now)
            for place, block in enumerate(blocks):
                pool.register(block, (place, bytes(step)))
            holders.append(blocks)
        elif operation == "share" and mine:
            pool.share(mine)
            recorder.write("accessed", mine, clock.now)
            holders.append(list(mine))
        elif operation == "find" and pool.num_cached:
            found = [rng.choice([block for block, key in enumerate(pool.keys) if key is not None])]
            pool.share(found)
            recorder.write("accessed", found, clock.now)
            holders.append(found)
        elif operation == "release" and mine:
            holders.remove(mine)
            pool.release(mine)
        elif operation == "copy" and mine and pool.num_free:
            mine[0] = pool.replace(mine[0])
            recorder.write("allocated", [mine[0]], clock.now)
    told = [(life.lifetime, life.idle, life.reuse_gaps) for life in lives]
    assert sorted(told) == sorted(recorder.lives())
    assert any(len(gaps) == ACCESSES_KEPT - 1 for _, _, gaps in told)
