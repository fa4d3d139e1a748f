"""How long work takes on a GPU, and what the GPU can do at most. On a CPU the same calls work, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Launch = Callable[[], Any]
"""Puts an operation on the current stream."""

CACHE_MULTIPLE = 4
"""How many times the GPU's cache is outgrown by what is read in turn."""
MOST_COPIES = 64
_MEASURED_SECONDS = 0.002
"""What is timed at once at least: events have a resolution of half a microsecond."""
_MOST_REPLAYS = 100


@dataclass(frozen=True)
class Peaks:
    """What the device does at most, measured.

    Attributes:
        bandwidth: bytes a second that a copy reads and writes.
        matrix_rate: operations a second of a bfloat16 matrix product.
    """

    bandwidth: float
    matrix_rate: float

    def floor(self, num_bytes: float, operations: float) -> float:
        """Seconds that work takes at least."""
        return max(num_bytes / self.bandwidth, operations / self.matrix_rate)


class Device:
    """A torch device.

    Args:
        name: ``"cuda"`` or ``"cpu"``.

    Attributes:
        device: torch's object.
        is_gpu: whether it is one.
    """

    def __init__(self, name: str) -> None:
        self.device = torch.device(name)
        self.is_gpu = self.device.type == "cuda"
        self._stream = torch.cuda.Stream() if self.is_gpu else None

    def describe(self) -> dict[str, Any]:
        """What a result should be read with."""
        found: dict[str, Any] = {"torch": torch.__version__}
        if self.is_gpu:
            properties = torch.cuda.get_device_properties(self.device)
            found |= {
                "name": properties.name,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "memory_bytes": properties.total_memory,
                "cuda": torch.version.cuda,
            }
        else:
            found["name"] = "CPU (a dry run: its figures mean nothing)"
        return found

    def copies_for(self, num_bytes: int) -> int:
        """How many different ones of something outgrow the cache, within reason."""
        if not self.is_gpu:
            return 2
        cache_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size
        return min(-(-CACHE_MULTIPLE * cache_bytes // max(num_bytes, 1)), MOST_COPIES)

    def seconds(self, launches: Sequence[Launch], budget: float) -> float:
        """The shortest time that one of ``launches`` took, in rounds of all of them one after the other.

        On a GPU a round is a CUDA graph: what the host does to launch kernels does not count.

        Args:
            budget: seconds that measuring takes, about.
        """
        run = self._captured(launches) if self.is_gpu else self._in_turn(launches)
        repeats = max(min(int(_MEASURED_SECONDS / max(run(1), 1e-7)), _MOST_REPLAYS), 1)
        best, end = float("inf"), time.perf_counter() + budget
        while True:
            best = min(best, run(repeats) / repeats)
            if time.perf_counter() > end:
                return best / len(launches)

    def measure_peaks(self, budget: float) -> Peaks:
        """Highest rates of a large copy and a large matrix product."""
        num_bytes, size = (2**30, 8192) if self.is_gpu else (2**20, 128)
        source, target = torch.empty(2, num_bytes, dtype=torch.uint8, device=self.device).unbind()
        copying = self.seconds([lambda: target.copy_(source)], budget)
        a, b = torch.randn(2, size, size, device=self.device).to(torch.bfloat16).unbind()
        out = torch.empty_like(a)
        multiplying = self.seconds([lambda: torch.mm(a, b, out=out)], budget)
        return Peaks(2 * num_bytes / copying, 2 * size**3 / multiplying)

    def _captured(self, launches: Sequence[Launch]) -> Callable[[int], float]:
        stream = self._stream
        assert stream is not None
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for launch in launches:
                launch()  # compiles kernels and takes workspaces, which a capture must not do
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for launch in launches:
                    launch()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def run(repeats: int) -> float:
            with torch.cuda.stream(stream):
                start.record()
                for _ in range(repeats):
                    graph.replay()
                end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3

        return run

    @staticmethod
    def _in_turn(launches: Sequence[Launch]) -> Callable[[int], float]:
        def run(repeats: int) -> float:
            start = time.perf_counter()
            for _ in range(repeats):
                for launch in launches:
                    launch()
            return time.perf_counter() - start

        return run
