"""streamllm against every other engine that is installed: the same model, prompts and loads, in turn.

    python loadtest/compare.py --llama-server PATH --openvino-python PYTHON --vllm-python PYTHON \\
        --json compare.json --markdown compare.md --png compare.png

Each round starts the engines one after the other (A B A B ...), each alone on the machine, with the same
number of threads, runs all loads on it and stops it; the prompts are new in every round. Engines that are not
installed are named with the way to get them. Exit code 0; 1 if an engine failed or did other work than asked.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from comparison import plot, render
from engines import Engine, Programs, Run, Setting, catalogue
from loads import KINDS, Load, LoadOptions, check, make_loads, make_warm_up, record
from model_formats import ModelFormats
from servers import EngineFailure
from tqdm import tqdm

from streamllm.bench.client import RequestFailure

DEFAULTS = Programs()


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="loadtest/compare.py",
        description="streamllm against every other engine that is installed.",
        epilog="loads: " + "; ".join(f"{kind}: {meaning}" for kind, meaning in KINDS.items()),
        allow_abbrev=False,
    )
    cores = len(os.sched_getaffinity(0))
    add = parser.add_argument
    add("--model", help="a GGUF model, as for streamllm serve (default: the default model)")
    add(
        "--engines",
        nargs="+",
        metavar="NAME",
        help="engines, or beginnings of their names: llama.cpp is all its variants (default: all)",
    )
    add("--loads", nargs="+", choices=list(KINDS), default=list(KINDS), help="default: all")
    add("--streams", nargs="+", type=int, default=[1, 8, 32], help="concurrent streams (default: 1 8 32)")
    add("--requests-per-stream", type=int, default=2, help="requests of a load (default: %(default)s)")
    add("--input-len", type=int, default=128, help="prompt tokens (default: %(default)s)")
    add("--output-len", type=int, default=128, help="tokens to generate (default: %(default)s)")
    add("--rounds", type=int, default=3, help="turns of each; medians are reported (default: %(default)s)")
    add("--threads", type=int, default=cores, help="threads of each engine (default: the cores, %(default)s)")
    add("--seed", type=int, default=0, help="draws prompts and lengths (default: %(default)s)")
    add("--llama-server", default=DEFAULTS.llama_server, help="llama.cpp's server (default: on PATH)")
    for peer in ("openvino", "vllm", "transformers"):
        add(
            f"--{peer}-python",
            metavar="PYTHON",
            default=getattr(DEFAULTS, f"{peer}_python"),
            help=f"the Python that has {peer} installed (default: this one)",
        )
    add(
        "--folder",
        type=Path,
        help="keeps the model in the peers' formats, and what the engines print (default: compare/ in "
        "streamllm's cache)",
    )
    add("--json", type=Path, metavar="FILE", help="write all numbers, after every turn")
    add(
        "--from-json",
        type=Path,
        metavar="FILE",
        help="measure nothing: the tables and the picture of such a file, also of a run cut short",
    )
    add("--markdown", type=Path, metavar="FILE", help="write the table that is printed at the end")
    add("--png", type=Path, metavar="FILE", help="write a picture (needs matplotlib)")
    args = parser.parse_args(argv)
    for name in ("requests_per_stream", "input_len", "output_len", "rounds", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if min(args.streams) < 1:
        parser.error(f"--streams must be at least 1, got {min(args.streams)}")
    args.streams = sorted(set(args.streams))
    if args.png is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--png needs matplotlib: pip install matplotlib")
    return args


def select(engines: Sequence[Engine], wanted: Sequence[str] | None) -> list[Engine]:
    """The engines whose name begins with one of ``wanted``, all without it. streamllm, which the ratios refer
    to, is itself only under its full name.

    Raises:
        ValueError: a name fits no engine.
    """
    if wanted is None:
        return list(engines)
    chosen: set[str] = set()
    for name in wanted:
        exact = [engine.name for engine in engines if engine.name == name]
        fitting = exact or [engine.name for engine in engines if engine.name.startswith(name)]
        if not fitting:
            raise ValueError(f"no engine is called {name}; there are {', '.join(e.name for e in engines)}")
        chosen.update(fitting)
    return [engine for engine in engines if engine.name in chosen]


class Comparison:
    """The rounds, and the document that grows with them.

    Args:
        engines: those that take part, with their versions; ``None`` for one that is not installed.
        loads: the loads of a round by its number, 0 to warm up.
        setting: of all engines.
        document: what is known before the first round; ``engines``, ``loads``, ``runs`` and ``failures`` are
            added.
        save: called with the document after every turn.
    """

    def __init__(
        self,
        engines: Sequence[tuple[Engine, str | None]],
        loads: Callable[[int], list[Load]],
        setting: Setting,
        document: dict[str, Any],
        save: Callable[[dict[str, Any]], object],
    ) -> None:
        self._present = [engine for engine, version in engines if version is not None]
        self._loads = loads
        self._setting = setting
        self._save = save
        self.document = document | {
            "engines": [
                {
                    "name": engine.name,
                    "family": engine.family,
                    "precision": engine.precision,
                    "version": version,
                    "install": engine.install,
                }
                for engine, version in engines
            ],
            "loads": [
                {"name": load.name, "kind": load.kind, "streams": load.concurrency} for load in loads(1)
            ],
            "runs": [],
            "failures": [],
        }

    def run(self, rounds: int) -> dict[str, Any]:
        """All rounds. An engine that fails is out, loudly; the others go on."""
        for number in range(1, rounds + 1):
            for engine in list(self._present):
                try:
                    self._turn(engine, number)
                except (EngineFailure, RequestFailure) as failure:
                    message = str(failure)
                    print(f"FAILED {engine.name}, round {number}: {message}", file=sys.stderr, flush=True)
                    self.document["failures"].append(
                        {"engine": engine.name, "round": number, "message": message}
                    )
                    self._present.remove(engine)
                self._save(self.document)
        return self.document

    def _turn(self, engine: Engine, number: int) -> None:
        loads = [load for load in self._loads(number) if load.kind in engine.kinds]
        if not loads:
            return
        with engine.running(self._setting) as run:
            for load in self._loads(0):
                check(load, run(load)[0])
            bar = tqdm(loads, desc=f"round {number}, {engine.name}", disable=None)
            for load in bar:
                self._note(engine, number, load, run(load))

    def _note(self, engine: Engine, number: int, load: Load, run: Run) -> None:
        results, duration, client_cpu = run
        check(load, results)
        self.document["runs"].append(
            {
                "engine": engine.name,
                "round": number,
                **record(load, results, duration, client_cpu, self.document["cores"]),
            }
        )


def prepare(args: argparse.Namespace) -> Comparison:
    """Find the model and the engines. Raises :class:`ValueError` or streamllm's own errors."""
    from streamllm.sources.cache import cache_folder
    from streamllm.sources.resolve import resolve

    files = resolve(args.model)
    if files.kind != "gguf":
        raise ValueError(f"{files.path}: llama.cpp and OpenVINO need a GGUF file")
    encode, decode = _tokenizer(files.path)

    options = LoadOptions(
        args.loads, args.streams, args.requests_per_stream, args.input_len, args.output_len, args.seed
    )

    def loads(number: int) -> list[Load]:
        return make_loads(options, encode, number) if number else make_warm_up(options, encode)

    programs = Programs(args.llama_server, args.openvino_python, args.vllm_python, args.transformers_python)
    folder = args.folder or cache_folder() / "compare"
    folder.mkdir(parents=True, exist_ok=True)
    formats = ModelFormats(
        files.path, folder, _beside(args.llama_server, "llama-quantize"), args.transformers_python
    )
    engines = [(engine, engine.version()) for engine in select(catalogue(programs, formats), args.engines)]
    first_round = loads(1)
    setting = Setting(
        threads=args.threads,
        max_num_seqs=max(load.concurrency for load in first_round),
        max_model_len=-(-max(load.longest for load in first_round) // 256) * 256,
        logs=folder,
        decode=decode,
    )
    document = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "model": files.served_name,
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "arguments": {
            key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()
        },
    }
    return Comparison(engines, loads, setting, document, lambda document: _save(args.json, document))


def _tokenizer(gguf: Path) -> tuple[Callable[[str], list[int]], Callable[[Sequence[int]], str]]:
    from streamllm.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_gguf(gguf)
    return lambda text: tokenizer.encode(text, add_special_tokens=False), tokenizer.decode


def _beside(program: str, other: str) -> str:
    """``other`` in the folder of ``program``; by its name alone if that is a name alone."""
    path = Path(program)
    return str(path.with_name(other)) if path.name != program else other


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return "an unnamed processor"


def _save(path: Path | None, document: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    from streamllm.errors import ConfigError, ModelLoadError

    try:
        if args.from_json is not None:
            document = json.loads(args.from_json.read_text())
        else:
            # Ended from outside, it stops the engine that it has started.
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
            document = prepare(args).run(args.rounds)
    except (ConfigError, ModelLoadError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    text = render(document)
    print(text)
    if args.markdown is not None:
        args.markdown.write_text(text + "\n")
    if args.png is not None:
        plot(args.png, document)
    return 1 if document["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
