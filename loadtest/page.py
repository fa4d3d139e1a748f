"""What a person who watches the engine on the page costs, without a model.

    python loadtest/page.py [--json FILE] [--check]

While so many sequences decode in a pool of so many blocks, the engine is looked at as the server does it:
blocks 10 times a second, requests and figures twice. A tenth of a second is taken to be five steps; each
running sequence takes a new block every 16. Times are CPU times of the thread, medians, the encoding of the
events included. The share is that of the event loop's time; where it would exceed 1 %, the server looks less
often. Without a watcher there are no looks; the pool has no hooks that would cost anything then.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
from driver import Driver
from scheduler import BLOCK_SIZE, OUTPUT_LENGTH, PROMPT_LENGTH, random_tokens

from streamllm.engine.stats import memory_figures
from streamllm.engine.step import Limits
from streamllm.engine.watch import EngineWatch
from streamllm.server.page.feed import INTERVAL, MAX_SHARE, OVERVIEW_INTERVAL

CASES = [(1, 6_000), (8, 6_000), (32, 6_000), (128, 20_000), (256, 20_000), (256, 100_000)]
"""(running sequences, blocks)"""
GOAL = (32, 6_000)
"""What a CPU serves at once: here ten looks a second must fit into the share."""
STEPS_A_LOOK = 5


def busy_driver(num_running: int, num_blocks: int) -> Driver:
    """So many sequences that decode, each alone with its blocks."""
    driver = Driver(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        limits=Limits(num_running, num_running * PROMPT_LENGTH),
        answer=random_tokens,
        max_model_len=num_blocks * BLOCK_SIZE,
    )
    for number in range(num_running):
        request = driver.add([number, *range(1, PROMPT_LENGTH)], OUTPUT_LENGTH)
        request.stream = SimpleNamespace(lora_request=None)  # type: ignore[assignment]
    driver.step()
    return driver


def watch_of(driver: Driver) -> EngineWatch:
    """As the engine makes it, but for the figures that count no blocks."""

    def stats() -> Any:
        return SimpleNamespace(memory=memory_figures(driver.pool, driver.scheduler.sequences()))

    return EngineWatch(driver.pool, driver.live.values, stats, driver.scheduler.events)


def measure(num_running: int, num_blocks: int, num_looks: int) -> dict[str, float]:
    """Milliseconds of a first look, a look, an overview and :data:`STEPS_A_LOOK` steps; bytes of events a
    second; the share that looks and overviews take at full rate."""
    driver = busy_driver(num_running, num_blocks)
    watch = watch_of(driver)
    start = time.thread_time()
    watch.look()
    orjson.dumps(watch.snapshot())
    first = time.thread_time() - start
    looks, overviews, steps, sizes = [], [], [], []
    for _ in range(num_looks):
        start = time.thread_time()
        for _ in range(STEPS_A_LOOK):
            driver.step()
        stepped = time.thread_time()
        news = orjson.dumps(watch.look())
        looked = time.thread_time()
        overview = orjson.dumps(watch.overview(), default=vars)
        end = time.thread_time()
        steps.append(stepped - start)
        looks.append(looked - stepped)
        overviews.append(end - looked)
        sizes.append(len(news) / INTERVAL + len(overview) / OVERVIEW_INTERVAL)
    look, overview_time = statistics.median(looks), statistics.median(overviews)
    return {
        "first_ms": 1e3 * first,
        "look_ms": 1e3 * look,
        "overview_ms": 1e3 * overview_time,
        "steps_ms": 1e3 * statistics.median(steps),
        "bytes_a_second": statistics.median(sizes),
        "share": look / INTERVAL + overview_time / OVERVIEW_INTERVAL,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--looks", type=int, default=100, help="looks a case")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument(
        "--check", action="store_true", help=f"fail if {GOAL} takes more than {MAX_SHARE:.0%}"
    )
    args = parser.parse_args()
    print("running   blocks  first look   look   overview   5 steps' scheduling   kB/s   share of the loop")
    results = []
    for num_running, num_blocks in CASES:
        figures = measure(num_running, num_blocks, args.looks)
        results.append({"running": num_running, "blocks": num_blocks, **figures})
        print(
            f"{num_running:7d} {num_blocks:8,d} {figures['first_ms']:8.2f} ms {figures['look_ms']:6.3f} ms"
            f" {figures['overview_ms']:6.3f} ms {figures['steps_ms']:13.2f} ms"
            f" {figures['bytes_a_second'] / 1e3:13.1f} {figures['share']:10.2%}"
        )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    goal = next(each for each in results if (each["running"], each["blocks"]) == GOAL)
    if args.check and goal["share"] > MAX_SHARE:
        print(f"too slow: {goal['share']:.2%} of the event loop's time", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
