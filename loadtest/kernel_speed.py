"""Each CPU kernel against its floor.

    python loadtest/kernel_speed.py [--peers] [--formats q4_1 q8_0 ...] [--json FILE]

A kernel cannot take less time than its bytes take at the read bandwidth, nor than its operations take at the
peak of the unit that does them. Both are measured in the same run, on as many threads, with the instruction
set in use: bandwidth of memory and of the second-level cache, float32 multiply-adds, 8-bit multiply-adds. The
larger of the two times is the floor; "share" is floor / time, 100 % being all that the hardware can do.

Times are the shortest of several calls, peaks the highest of several, in alternation, so that neighbours on
the machine count less. With ``--peers`` the same products by MKL, oneDNN (float32) and FBGEMM (8 bits), as
torch has them: "1.5 x FBGEMM" is how many times faster ours is.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernel_cases import (
    CACHE_MULTIPLE,
    ROWS,
    SHAPES,
    Case,
    CaseMaker,
    Work,
    cases_by_group,
    last_level_cache,
)
from kernel_peers import PEERS, peer_runs, torch_with

from streamllm import _native, machine

CACHE_BYTES = 256 * 1024
"""A thread's share of the second-level cache that its bandwidth is measured on."""


@dataclass
class Peaks:
    """What the hardware does at most: bytes and operations a second."""

    memory: float = 0.0
    cache: float = 0.0
    float32: float = 0.0
    int8: float = 0.0

    def measure(self, threads: int, seconds: float) -> None:
        """Keep the highest of what was measured before and now."""
        memory_bytes = CACHE_MULTIPLE * last_level_cache() // threads
        self.memory = max(self.memory, _native.measure_read_bandwidth(threads, memory_bytes, seconds))
        self.cache = max(self.cache, _native.measure_read_bandwidth(threads, CACHE_BYTES, seconds))
        self.float32 = max(self.float32, _native.measure_float32_peak(threads, seconds))
        self.int8 = max(self.int8, _native.measure_int8_peak(threads, seconds))

    def floor(self, work: Work) -> float:
        """Seconds that the work takes at least."""
        return max(work.bytes / getattr(self, work.source), work.operations / getattr(self, work.unit))


def shortest(run: Callable[[], None], repeats: int, seconds: float) -> float:
    """Seconds of one of ``repeats`` operations in the fastest of the calls that fit into ``seconds``; the
    first call, which touches everything for the first time, does not count."""
    run()
    best, end = float("inf"), time.perf_counter() + seconds
    for _ in range(1000):
        start = time.perf_counter()
        run()
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            break
    return best / repeats


class Measurement:
    """Times of all cases and peers; a later, shorter time replaces an earlier one."""

    def __init__(self, threads: int, seconds: float) -> None:
        self.threads, self.seconds = threads, seconds
        self.peaks = Peaks()
        self.times: dict[Work, float] = {}
        self.peers: dict[tuple[str, str, int], float] = {}

    def run(self, rounds: int, formats: tuple[str, ...], torch: Any | None) -> None:
        groups = cases_by_group(CaseMaker(self.threads), formats)
        for name, sources in groups.items():
            for _ in range(rounds):
                self.peaks.measure(self.threads, self.seconds)
                for source in sources:
                    for case in source():
                        self._measure(case)
                if torch is not None and name in SHAPES:
                    self._measure_peers(torch, name)
            print(f"{name} done", file=sys.stderr)

    def _measure(self, case: Case) -> None:
        seconds = shortest(case.run, case.repeats, self.seconds)
        self.times[case.work] = min(self.times.get(case.work, seconds), seconds)

    def _measure_peers(self, torch: Any, name: str) -> None:
        for library, rows, repeats, run in peer_runs(torch, name, ROWS):
            key = (library, "{} [{}, {}]".format(name, *SHAPES[name]), rows)
            seconds = shortest(run, repeats, self.seconds)
            self.peers[key] = min(self.peers.get(key, seconds), seconds)

    def result(self) -> dict[str, Any]:
        """Everything as JSON has it; rows in the table's order."""
        rows = []
        for work in sorted(self.times, key=_place_in_table):
            seconds = self.times[work]
            libraries = PEERS[work.unit] if work.kernel.startswith("linear") else ()
            peers = {
                library: self.peers[key] / seconds
                for library in libraries
                if (key := (library, work.shape, work.rows)) in self.peers
            }
            rows.append(
                {
                    "kernel": work.kernel,
                    "shape": work.shape,
                    "rows": work.rows,
                    "seconds": seconds,
                    "bytes_per_second": work.bytes / seconds,
                    "operations_per_second": work.operations / seconds,
                    "share_of_floor": self.peaks.floor(work) / seconds,
                    "times_faster_than": peers,
                }
            )
        return {
            "cpu": machine.cpu_model(),
            "instruction_set": _native.instruction_set(),
            "threads": self.threads,
            "peaks": asdict(self.peaks),
            "kernels": rows,
        }


def _place_in_table(work: Work) -> tuple[int, str]:
    order = ("linear", "experts", "attention", "rms_norm", "rotary", "gate_and_mul", "sample")
    place = next(index for index, beginning in enumerate(order) if work.kernel.startswith(beginning))
    # The sort is stable: within a kernel the order is that of measurement.
    return place, work.kernel if place == 0 else ""


def render(result: dict[str, Any]) -> str:
    """The table."""
    peaks = {name: value / 1e9 for name, value in result["peaks"].items()}
    lines = [
        f"{result['cpu']}, {result['instruction_set']}, {result['threads']} threads",
        f"read bandwidth: memory {peaks['memory']:.1f} GB/s, cache {peaks['cache']:.0f} GB/s; "
        f"peaks: float32 {peaks['float32']:.0f}, int8 {peaks['int8']:.0f} G operations/s",
        "",
        f"{'kernel':20} {'shape':26} {'rows':>4} {'time, µs':>10} {'GB/s':>7} {'GOP/s':>7} {'share':>6}",
    ]
    for row in result["kernels"]:
        peers = ", ".join(f"{ratio:.1f} x {name}" for name, ratio in row["times_faster_than"].items())
        lines.append(
            f"{row['kernel']:20} {row['shape']:26} {row['rows']:4} {1e6 * row['seconds']:10.1f} "
            f"{row['bytes_per_second'] / 1e9:7.1f} {row['operations_per_second'] / 1e9:7.1f} "
            f"{row['share_of_floor']:6.0%} {peers}".rstrip()
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=machine.available_cores())
    parser.add_argument("--formats", nargs="+", choices=_native.weight_formats(), help="default: all")
    parser.add_argument("--instruction-set", choices=_native.instruction_sets(), help="default: the best")
    parser.add_argument(
        "--peers", action="store_true", help="measure MKL, oneDNN and FBGEMM too (needs torch)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="times that every kernel's turn comes")
    parser.add_argument("--seconds", type=float, default=0.02, help="for one kernel at one size, a round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number")
    arguments = parser.parse_args()

    if arguments.instruction_set:
        _native.set_instruction_set(arguments.instruction_set)
    torch = torch_with(arguments.threads) if arguments.peers else None
    if arguments.peers and torch is None:
        print("no peers: torch is not installed (pip install -e '.[gpu]')", file=sys.stderr)
    measurement = Measurement(arguments.threads, arguments.seconds)
    formats = tuple(arguments.formats or _native.weight_formats())
    measurement.run(arguments.rounds, formats, torch)
    result = measurement.result()
    print(render(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
