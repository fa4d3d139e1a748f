"""An engine without a server, in a process of its own: the engine is called directly, as a program would do.

    python loadtest/worker.py BACKEND MODEL --threads T --max-num-seqs N --precision P

Reads one JSON object a line, ``{"requests": [[token ids, tokens wanted], ...], "concurrency": n}``, and
answers each with one line, ``{"duration": s, "results": [...]}`` in the requests' order; the first line says
``{"ready": true}``. A result holds the ``due`` time, the ``times`` of the tokens as far as the engine tells
them and the ``end`` (seconds from the start of the load), ``prompt_tokens`` and ``completion_tokens``.

Runs under the Python in which the engine is installed, and needs nothing but that engine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Work = list[tuple[list[int], int]]
"""Token ids of a prompt, and how many tokens to generate."""
Clock = Callable[[], float]
"""Seconds since the start of the load."""


class OpenVino:
    """OpenVINO GenAI's continuous batching, stepped by a closed loop.

    ``model`` is a GGUF file; ``precision`` that of the arithmetic (``f32``, ``bf16``), or ``auto``.
    """

    def __init__(self, model: Path, threads: int, max_num_seqs: int, precision: str) -> None:
        import numpy
        import openvino
        import openvino_genai

        self._tensor = lambda ids: openvino.Tensor(numpy.asarray([ids], numpy.int64))
        self._config = openvino_genai.GenerationConfig
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = max_num_seqs
        scheduler.cache_size = 2
        scheduler.enable_prefix_caching = True
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        if precision != "auto":
            properties["INFERENCE_PRECISION_HINT"] = precision
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU", properties)
        self._next_id = 0

    def run(self, work: Work, concurrency: int, clock: Clock) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = [{} for _ in work]
        waiting = list(range(len(work)))[::-1]
        running: dict[int, Any] = {}
        while waiting or running:
            while waiting and len(running) < concurrency:
                position = waiting.pop()
                results[position] = {"due": clock(), "times": [], "prompt_tokens": len(work[position][0])}
                running[position] = self._add(*work[position])
            self._pipeline.step()
            now = clock()
            for position, handle in list(running.items()):
                times = results[position]["times"]
                while handle.can_read():
                    times += [now for output in handle.read().values() for _ in output.generated_ids]
                if len(times) >= work[position][1]:
                    results[position] |= {"end": now, "completion_tokens": len(times)}
                    del running[position]
        # The last tokens are out; the pipeline frees their sequences in one more step.
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return results

    def _add(self, prompt: list[int], count: int) -> Any:
        config = self._config(max_new_tokens=count, ignore_eos=True, do_sample=False)
        self._next_id += 1
        return self._pipeline.add_request(self._next_id, self._tensor(prompt), config)


class StaticBatches:
    """``transformers.generate`` over batches of ``concurrency`` requests in their order, each of which runs
    to its longest output. ``model`` is a GGUF file or a folder; ``precision`` is ``f32`` or ``bf16``."""

    def __init__(self, model: Path, threads: int, max_num_seqs: int, precision: str) -> None:
        import torch
        from compare_transformers import load_transformers

        from streamllm.sources.resolve import resolve

        torch.set_num_threads(threads)
        self._model = load_transformers(resolve(str(model)))
        if precision == "bf16":
            self._model.to(torch.bfloat16)
        self._on_forward: Callable[[], object] = lambda: None
        self._model.register_forward_hook(lambda *call: self._on_forward() and None)

    def run(self, work: Work, concurrency: int, clock: Clock) -> list[dict[str, Any]]:
        from compare_transformers import generate_static

        from streamllm.bench.prompts import Request

        results = []
        for start in range(0, len(work), concurrency):
            batch = [
                Request(index, prompt, count)
                for index, (prompt, count) in enumerate(work[start : start + concurrency])
            ]
            due = clock()
            times: list[float] = []
            self._on_forward = lambda times=times: times.append(clock())  # type: ignore[misc]
            outputs = generate_static(self._model, batch, concurrency, lambda count: None)
            for request, output in zip(batch, outputs, strict=True):
                results.append(
                    {
                        "due": due,
                        "times": times[: len(output)],
                        "end": times[len(output) - 1],
                        "prompt_tokens": len(request.prompt),
                        "completion_tokens": len(output),
                    }
                )
        return results


class OfflineStreamllm:
    """``streamllm.LLM.generate`` with all requests at once; it tells the end of the whole work only."""

    def __init__(self, model: Path, threads: int, max_num_seqs: int, precision: str) -> None:
        from streamllm import LLM

        self._llm = LLM(str(model), threads=threads, max_num_seqs=max_num_seqs, dtype=precision)

    def run(self, work: Work, concurrency: int, clock: Clock) -> list[dict[str, Any]]:
        from streamllm import SamplingParams

        prompts = [{"prompt_token_ids": prompt} for prompt, _ in work]
        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _, count in work]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        end = clock()
        return [
            {
                "due": 0.0,
                "times": [],
                "end": end,
                "prompt_tokens": len(output.prompt_token_ids),
                "completion_tokens": len(output.outputs[0].token_ids),
            }
            for output in outputs
        ]


BACKENDS = {"openvino": OpenVino, "transformers": StaticBatches, "streamllm": OfflineStreamllm}


def serve(backend: Any, lines: Any, answer: Callable[[dict[str, Any]], object]) -> None:
    """Answer every line of work until the input ends."""
    answer({"ready": True})
    for line in lines:
        order = json.loads(line)
        clock = _clock()
        results = backend.run(order["requests"], order["concurrency"], clock)
        answer({"duration": clock(), "results": results})


def _clock() -> Clock:
    start = time.perf_counter()
    return lambda: time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="loadtest/worker.py", allow_abbrev=False)
    parser.add_argument("backend", choices=sorted(BACKENDS))
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, required=True)
    parser.add_argument("--precision", default="auto")
    args = parser.parse_args(argv)
    # Engines print to standard output, also from C++: their words go to the log, the answers to the pipe.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    backend = BACKENDS[args.backend](args.model, args.threads, args.max_num_seqs, args.precision)
    serve(backend, sys.stdin, lambda body: print(json.dumps(body), file=answers, flush=True))


if __name__ == "__main__":
    main()
