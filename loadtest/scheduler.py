"""What the scheduler costs on the event loop, without a model.

    python loadtest/scheduler.py [--json FILE] [--check]

- A step: ``schedule()`` plus ``update()`` while so many sequences decode and so many requests wait, either
  because the batch is full (no slot) or because the pool is (no block; the queue's first is looked at in vain
  every time). Medians over many steps; every sequence takes a new block every 16 steps.
- A long prompt: everything that the event loop does for it before its first step has been submitted, cold and
  with its whole prefix cached, and for its later steps. Tokenising and hashing are left out: threads do them.

Times are CPU times of the thread, so that neighbours on the machine count less.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from driver import Driver

from streamllm.engine.admission import Admission
from streamllm.engine.prefix_hash import block_hashes, chain_seed
from streamllm.engine.step import Limits
from streamllm.runner.batch_state import BatchState
from streamllm.runner.messages import ScheduledBatch, StepOutput

BLOCK_SIZE = 16
PROMPT_LENGTH = 161
"""Of the requests that decode and wait: ShareGPT's mean."""
OUTPUT_LENGTH = 1000
CACHED_LENGTH = 32_768
CHUNK = 2048
STEP_GOAL_MS = 1.0
ADMISSION_GOAL_MS = 10.0
GOAL_RUNNING, GOAL_WAITING, GOAL_PROMPT = 256, 1000, 100_000


def random_tokens(batch: ScheduledBatch) -> StepOutput:
    """A token for every output row; each sequence's own, so that no two share a block."""
    count = len(batch.output_rows)
    tokens = [[(row.sequence_id * 7919 + batch.step) % 50_000] for row in batch.output_rows]
    return StepOutput(tokens, [None] * count, [None] * count)


# -- a step --------------------------------------------------------------------------------------------------

SITUATIONS = {
    "batch full": "no slot is free",
    "pool full": "slots are free; the queue's first finds too few blocks",
    "pool full, prefix cached": f"the same, and the cache holds {CACHED_LENGTH:,} tokens of its prompt",
}


def decoding_driver(num_running: int, num_waiting: int, situation: str) -> Driver:
    """``num_running`` sequences that decode and ``num_waiting`` requests that wait."""
    full = situation == "batch full"
    room = -(-(PROMPT_LENGTH + OUTPUT_LENGTH) // BLOCK_SIZE) * num_running + CACHED_LENGTH // BLOCK_SIZE
    driver = Driver(
        num_blocks=room,
        block_size=BLOCK_SIZE,
        limits=Limits(num_running + (0 if full else 8), 2 * CACHED_LENGTH + num_running * PROMPT_LENGTH),
        answer=random_tokens,
        max_model_len=room * BLOCK_SIZE,
    )
    too_long = list(range(room * BLOCK_SIZE))
    if situation == "pool full, prefix cached":
        driver.add(too_long[:CACHED_LENGTH], 1)
        driver.step()
    for number in range(num_running):
        driver.add([number, *range(1, PROMPT_LENGTH)], OUTPUT_LENGTH)
    driver.step()
    if not full:
        driver.add(too_long, 1)
    for number in range(num_waiting):
        driver.add([num_running + number, *range(1, PROMPT_LENGTH)], 100)
    return driver


def time_steps(driver: Driver, num_steps: int) -> dict[str, float]:
    """Median milliseconds of the two halves of a step and of both; ``collection``: of one full garbage
    collection in this state, which Python may insert anywhere."""
    halves: dict[str, list[float]] = {"schedule": [], "update": [], "both": []}
    for _ in range(num_steps):
        start = time.thread_time()
        batch = driver.scheduler.schedule()
        scheduled = time.thread_time()
        assert batch is not None
        output = random_tokens(batch)
        answered = time.thread_time()
        driver.scheduler.update(batch, output)
        end = time.thread_time()
        halves["schedule"].append(scheduled - start)
        halves["update"].append(end - answered)
        halves["both"].append(scheduled - start + end - answered)
    result = {name: 1e3 * statistics.median(values) for name, values in halves.items()}
    gc.collect()  # what earlier situations left
    start = time.thread_time()
    gc.collect()
    return result | {"collection": 1e3 * (time.thread_time() - start)}


# -- a long prompt -------------------------------------------------------------------------------------------


class Vocabulary:
    """As much of a tokenizer as admission asks."""

    vocab_size = 50_000

    def __init__(self) -> None:
        self._spellings: list[str | None] = ["x"] * self.vocab_size

    def contains(self, token_id: int) -> bool:
        return 0 <= token_id < self.vocab_size and self._spellings[token_id] is not None

    def token_bytes(self, token_id: int) -> bytes:
        return b"x"


def time_admission(length: int, *, cached: bool, repeats: int) -> dict[str, float]:
    """Milliseconds of the event loop for one prompt of ``length`` tokens, each part's median: ``check``
    (admission), ``add`` (request, sequence, queue), ``schedule`` (the first step's), ``state`` (the runner's
    copy of the sequence), ``total``: all of that; ``later``: the longest of all later steps, the one that
    frees its blocks included."""
    vocabulary: Any = Vocabulary()
    num_blocks = length // BLOCK_SIZE + 64
    admission = Admission(
        vocabulary,
        max_model_len=2 * length,
        hidden_size=1,
        max_beam_width=1,
        num_blocks=num_blocks,
        blocks_for=lambda n: n,
    )
    prompt = [i * 31 % Vocabulary.vocab_size for i in range(length)]
    hashes = block_hashes(prompt, BLOCK_SIZE, chain_seed())
    driver = Driver(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        limits=Limits(8, CHUNK),
        answer=random_tokens,
        max_model_len=2 * length,
    )
    state = BatchState(8)
    parts: dict[str, list[float]] = {}
    if cached:
        _serve_long_prompt(driver, state, admission, prompt, hashes)
    for _ in range(repeats):
        if not cached:
            driver.pool.reset_cache()
        for name, seconds in _serve_long_prompt(driver, state, admission, prompt, hashes).items():
            parts.setdefault(name, []).append(1e3 * seconds)
    return {name: statistics.median(values) for name, values in parts.items()}


def _serve_long_prompt(
    driver: Driver, state: BatchState, admission: Admission, prompt: list[int], hashes: list[bytes]
) -> dict[str, float]:
    """Seconds of each part."""
    clock = [time.thread_time()]
    checked = admission.check_token_ids(prompt)
    clock.append(time.thread_time())
    driver.add(checked, 4, hashes=list(hashes))
    clock.append(time.thread_time())
    batch = driver.scheduler.schedule()
    assert batch is not None
    clock.append(time.thread_time())
    state.update(batch)
    clock.append(time.thread_time())
    names = ("check", "add", "schedule", "state")
    parts = {name: end - start for name, start, end in zip(names, clock, clock[1:], strict=False)}
    parts["total"] = clock[-1] - clock[0]
    driver.retire(driver.scheduler.update(batch, random_tokens(batch)))
    parts["later"] = 0.0
    while driver.live:
        start = time.thread_time()
        batch = driver.scheduler.schedule()
        assert batch is not None
        state.update(batch)
        driver.retire(driver.scheduler.update(batch, random_tokens(batch)))
        parts["later"] = max(parts["later"], time.thread_time() - start)
    return parts


# -- what is said about it -----------------------------------------------------------------------------------


def measure(num_steps: int, repeats: int) -> dict[str, Any]:
    """All figures, ready for JSON."""
    sizes = [(running, GOAL_WAITING) for running in (32, 64, 128, 256, 512)]
    sizes.append((GOAL_RUNNING, 2 * GOAL_WAITING))
    steps = []
    for situation in SITUATIONS:
        for running, waiting in sizes:
            figures = time_steps(decoding_driver(running, waiting, situation), num_steps)
            steps.append({"situation": situation, "running": running, "waiting": waiting, **figures})
    prompts = []
    for cached in (False, True):
        for length in (GOAL_PROMPT // 2, GOAL_PROMPT, 2 * GOAL_PROMPT):
            figures = time_admission(length, cached=cached, repeats=repeats)
            prompts.append({"length": length, "cached": cached, **figures})
    return {"steps": steps, "prompts": prompts}


def render(result: dict[str, Any]) -> str:
    """The two tables on the terminal, in milliseconds."""
    lines = [
        f"A step, ms (goal: {STEP_GOAL_MS:g} with {GOAL_RUNNING} running and {GOAL_WAITING:,} waiting)",
        "",
        f"{'':<26}{'running':>8}{'waiting':>8}{'schedule':>10}{'update':>8}{'both':>8}{'a row':>10}{'gc':>8}",
    ]
    for row in result["steps"]:
        lines.append(
            f"{row['situation']:<26}{row['running']:>8,}{row['waiting']:>8,}{row['schedule']:>10.3f}"
            f"{row['update']:>8.3f}{row['both']:>8.3f}{1e3 * row['both'] / row['running']:>7.2f} µs"
            f"{row['collection']:>8.1f}"
        )
    lines += [
        "",
        f"A long prompt on the event loop, ms (goal: {ADMISSION_GOAL_MS:g} for {GOAL_PROMPT:,} tokens)",
        "",
        f"{'tokens':<10}{'prefix':<8}{'check':>8}{'add':>8}{'schedule':>10}{'state':>8}{'total':>8}"
        f"{'per 1,000':>12}{'worst later step':>18}",
    ]
    for row in result["prompts"]:
        lines.append(
            f"{row['length']:<10,}{'cached' if row['cached'] else 'new':<8}{row['check']:>8.2f}"
            f"{row['add']:>8.2f}{row['schedule']:>10.2f}{row['state']:>8.2f}{row['total']:>8.2f}"
            f"{1e6 * row['total'] / row['length']:>9.0f} µs{row['later']:>18.2f}"
        )
    return "\n".join(lines)


def shortfalls(result: dict[str, Any]) -> list[str]:
    """Where a goal is missed."""
    found = []
    for row in result["steps"]:
        is_goal = (row["running"], row["waiting"]) == (GOAL_RUNNING, GOAL_WAITING)
        if is_goal and row["both"] >= STEP_GOAL_MS:
            found.append(f"{row['situation']}: a step takes {row['both']:.2f} ms")
    for row in result["prompts"]:
        if row["length"] == GOAL_PROMPT and row["total"] >= ADMISSION_GOAL_MS:
            prefix = "with its prefix cached" if row["cached"] else "new"
            found.append(f"a prompt of {row['length']:,} tokens, {prefix}, takes {row['total']:.1f} ms")
    return found


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="loadtest/scheduler.py",
        description="The scheduler's time on the event loop.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--steps", type=int, default=300, help="steps timed in each situation (default: %(default)s)")
    add("--repeats", type=int, default=7, help="long prompts of each length (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write every number")
    add("--check", action="store_true", help="exit with 1 where a goal is missed")
    args = parser.parse_args(argv)
    if not 1 <= args.steps < OUTPUT_LENGTH or args.repeats < 1:
        parser.error(f"--steps must be 1 to {OUTPUT_LENGTH - 1}, --repeats at least 1")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    result = measure(args.steps, args.repeats)
    print(render(result))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    missed = shortfalls(result) if args.check else []
    for line in missed:
        print(line, file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
