"""The worker processes of an engine, seen from outside, and parts of a model that do not load."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

COMMAND = "streamllm.runner.distributed.process"


def worker_pids(engine_pid: int) -> list[int]:
    """Processes of the engine's workers, in the order in which they were started."""
    found = []
    for task in Path(f"/proc/{engine_pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            if COMMAND in _command(child):
                found.append(child)
    return sorted(found)


def is_alive(pid: int) -> bool:
    """Whether it runs: neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"{alive} still run after {seconds} s"
        time.sleep(0.02)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def die_while_loading(*arguments: Any) -> Any:
    """A :data:`streamllm.runner.distributed.messages.LoadShard` that the kernel ends for lack of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def fail_while_loading(*arguments: Any) -> Any:
    """One that has a bug."""
    return {}["weights"]


class ForbidToken:
    """A logits processor that can be sent to workers."""

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id

    def __call__(self, prompt_ids: Any, output_ids: Any, logits: Any) -> Any:
        logits[self.token_id] = -float("inf")
        return logits


class FailAfter:
    """One that fails at the third token."""

    def __call__(self, prompt_ids: Any, output_ids: Any, logits: Any) -> Any:
        if len(output_ids) == 2:
            raise ValueError("two are enough")
        return logits


def load_queued(*arguments: Any) -> Any:
    """A random model on a backend that takes several steps at once, as a GPU's does."""
    from helpers.queued_backend import queued_runner

    from streamllm.runner.pending_runner import PendingRunner

    return PendingRunner(8, lambda num_blocks: queued_runner(), "a queue", lambda adapter: adapter)
