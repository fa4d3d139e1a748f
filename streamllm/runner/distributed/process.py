"""A worker's process: ``python -m streamllm.runner.distributed.process``; standard input says what to do.

Nothing is imported before it is bound to its cores: threads inherit them from who starts them.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys


def main() -> None:
    # Whoever ends the engine may signal its whole group; running requests are the engine's to end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    cpus, start = pickle.load(sys.stdin.buffer)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    from streamllm.runner.distributed.worker import run_worker

    run_worker(pickle.loads(start))


if __name__ == "__main__":
    main()
