"""``streamllm run-batch``: a file of requests answered in this process, its results written as they come."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import orjson

from streamllm.cli.arguments import add_settings, engine_settings, settings_from
from streamllm.cli.config_file import add_config_argument
from streamllm.cli.serve import read_chat_template
from streamllm.config import EngineConfig, ServerConfig
from streamllm.errors import ConfigError, EngineDeadError

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from tqdm import tqdm

    from streamllm.engine.async_engine import AsyncEngine
    from streamllm.server.batches.lines import FileCheck, InputLine, LineRequest
    from streamllm.server.batches.store import Result

_REQUEST_SETTINGS = (
    "served_model_name",
    "chat_template",
    "chat_template_content_format",
    "default_chat_template_kwargs",
    "trust_request_chat_template",
    "tool_call_parser",
    "tool_parser_plugin",
    "reasoning_parser",
    "exclude_tools_when_tool_choice_none",
    "max_body_bytes",
)
"""Of the server's settings, those that decide what becomes of a request."""

QUEUED_LINES = 16
"""Lines that wait behind those that run, so that no step waits for a prompt."""

LOOK_INTERVAL = 0.2
"""Seconds after which it is looked again whether the engine lives."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(model_positional=None)
    parser.add_argument(
        "-i", "--input-file", required=True, metavar="FILE",
        help='lines {"custom_id", "method": "POST", "url": "/v1/chat/completions", "body": {...}}; - reads '
        "standard input",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output-file", required=True, metavar="FILE",
        help="where results go, one a line, as they come; one that is there is gone on with; - writes to "
        "standard output",
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="begin afresh if the output file is there")
    add_config_argument(parser)
    add_settings(parser, EngineConfig, "engine (as for serve)")
    add_settings(parser, ServerConfig, "requests (as for serve)", only=_REQUEST_SETTINGS)


def run(options: argparse.Namespace) -> int:
    """Answer the lines; 1 if any failed.

    Raises:
        ConfigError: a setting is wrong, or the files cannot be used.
        ModelLoadError: the model cannot be run.
        EngineDeadError: the engine died.
    """
    engine_config = EngineConfig(**{"disable_log_stats": True, **engine_settings(options)})
    settings = settings_from(options, ServerConfig)
    if settings.get("chat_template"):
        settings["chat_template"] = read_chat_template(settings["chat_template"])
    with contextlib.ExitStack() as stack:
        data_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="streamllm-batch-"))
        config = ServerConfig(**settings, data_dir=data_dir)
        path = stack.enter_context(_input_file(options.input_file, Path(data_dir)))
        check = _check(path, options.input_file, config.max_body_bytes)
        output = stack.enter_context(_output_file(options.output_file, path, overwrite=options.overwrite))
        if output.num_results:
            _check_continuation(path, output, config.max_body_bytes)
            _say(f"{output.num_results} of {check.num_lines} lines have results in {output.name}; going on")
        if output.num_results < check.num_lines:
            from streamllm.engine.async_engine import AsyncEngine

            engine = AsyncEngine.from_config(engine_config)
            asyncio.run(_Work(engine, config, path, check, output).run())
    answered = check.num_lines - output.num_failed
    _say(f"{answered} of {check.num_lines} lines answered, {output.num_failed} failed")
    return 1 if output.num_failed else 0


def _say(text: str) -> None:
    print(f"streamllm: {text}", file=sys.stderr)


# -- input -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _input_file(name: str, folder: Path) -> Iterator[Path]:
    """A file that can be read twice; what comes through a pipe is written to ``folder`` first."""
    path = Path(name)
    try:
        if name != "-" and (path.is_file() or path.is_dir()):
            path.open("rb").close()
            yield path
            return
        copy = folder / "input.jsonl"
        source: IO[bytes] = sys.stdin.buffer if name == "-" else path.open("rb")
        with source, copy.open("wb") as file:
            shutil.copyfileobj(source, file)
    except OSError as error:
        raise ConfigError(f"--input-file {name} cannot be read: {error.strerror or error}.") from None
    yield copy


def _check(path: Path, name: str, max_body_bytes: int) -> FileCheck:
    from streamllm.server.batches.lines import MAX_LINES, FileCheck

    check = FileCheck(path, None, max_body_bytes)
    try:
        while check.advance():
            pass
    finally:
        check.close()
    if not check.num_lines:
        raise ConfigError(f"--input-file {name} holds no request.")
    if check.num_lines > MAX_LINES:
        raise ConfigError(f"--input-file {name} holds more than {MAX_LINES:,} requests; split it.")
    for error in check.errors:
        _say(f"line {error.line}: {error}")
    if check.num_errors > len(check.errors):
        _say(f"{check.num_errors - len(check.errors)} more lines are broken")
    return check


def _identity(line: InputLine, check: FileCheck | None = None) -> tuple[LineRequest | None, Any, str | int]:
    """What a line asks, what is wrong with it instead, and what its result is known by."""
    from streamllm.server.batches.lines import LineError, read_line

    try:
        request = read_line(line)
        if check is None or line.number not in check.duplicates:
            return request, None, request.custom_id
        message = "custom_id is that of an earlier line; each line needs one of its own."
        raise LineError("duplicate_custom_id", message, line.number, "custom_id")
    except LineError as error:
        return None, error, line.number


# -- output ------------------------------------------------------------------------------------------------


@dataclass
class _Output:
    """Results on their way to a file.

    Attributes:
        done: what an earlier run has results of: ``custom_id``, or the number of a broken line.
        num_results: the earlier run's, and this one's.
        num_failed: of them, those that are errors.
    """

    name: str
    file: IO[bytes]
    done: set[str | int] = field(default_factory=set)
    num_results: int = 0
    num_failed: int = 0

    def write(self, result: Result) -> None:
        self.num_results += 1
        self.num_failed += result.is_error
        try:
            self.file.write(result.output + b"\n")
            self.file.flush()
        except OSError as error:
            raise ConfigError(f"{self.name} cannot be written: {error.strerror or error}.") from None

    def read(self) -> None:
        """Take up the results of an earlier run; a last line that it did not finish is cut off."""
        end = 0
        for number, line in enumerate(self.file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                key, failed = _known_result(line)
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ConfigError(
                    f"{self.name} exists, and its line {number} is no result of a batch; name another file, "
                    "or add --overwrite."
                ) from None
            self.done.add(key)
            self.num_results += 1
            self.num_failed += failed
            end += len(line)
        self.file.seek(end)
        self.file.truncate()


def _known_result(line: bytes) -> tuple[str | int, bool]:
    result = orjson.loads(line)
    error, response = result["error"], result["response"]
    key = result["custom_id"]
    if error is not None:
        return error.get("line", key), True
    if not isinstance(key, str):
        raise ValueError
    return key, response["status_code"] != 200


@contextlib.contextmanager
def _output_file(name: str, input_path: Path, *, overwrite: bool) -> Iterator[_Output]:
    if name == "-":
        yield _Output("standard output", sys.stdout.buffer)
        return
    path = Path(name)
    if path.exists() and path.samefile(input_path):
        raise ConfigError(f"--output-file {name} is the input file; name another.")
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "it is a folder")
        mode = "r+b" if path.is_file() and not overwrite else "wb"
        file = path.open(mode)
    except OSError as error:
        raise ConfigError(f"--output-file {name} cannot be written: {error.strerror or error}.") from None
    with file:
        output = _Output(name, file)
        if mode == "r+b":
            output.read()
        yield output


def _check_continuation(path: Path, output: _Output, max_body_bytes: int) -> None:
    """
    Raises:
        ConfigError: the output holds results of lines that the input does not have.
    """
    missing = set(output.done)
    for line in _lines(path, max_body_bytes):
        missing.difference_update((_identity(line)[2], line.number))
    if missing:
        shown = str(min(missing, key=str))[:60]
        raise ConfigError(
            f'{output.name} exists and holds results of other requests ("{shown}"); name another file, or '
            "add --overwrite."
        )


def _lines(path: Path, max_body_bytes: int) -> Iterator[InputLine]:
    from streamllm.server.batches.lines import LineReader

    reader = LineReader(path, max_body_bytes)
    try:
        while lines := reader.read():
            yield from lines
    finally:
        reader.close()


# -- work --------------------------------------------------------------------------------------------------


class _Work:
    """Answers what has no result yet, as many lines at once as the engine runs."""

    def __init__(
        self, engine: AsyncEngine, config: ServerConfig, path: Path, check: FileCheck, output: _Output
    ) -> None:
        self._engine = engine
        self._config = config
        self._path = path
        self._check = check
        self._output = output
        self._failure: BaseException | None = None

    async def run(self) -> None:
        """
        Raises:
            ConfigError: a result cannot be written.
            EngineDeadError: the engine died.
        """
        from tqdm import tqdm

        from streamllm.server.app import create_app

        app = create_app(self._engine, self._config)
        total, done = self._check.num_lines, self._output.num_results
        async with app.router.lifespan_context(app):
            with tqdm(total=total, initial=done, unit="line", disable=None) as bar:
                work = asyncio.ensure_future(self._answer_all(app, bar))
                try:
                    while not work.done():
                        await asyncio.wait({work}, timeout=LOOK_INTERVAL)
                        if self._engine.dead_error is not None:
                            raise EngineDeadError(f"the engine died: {self._engine.dead_error}")
                finally:
                    work.cancel()
                    await asyncio.wait({work})
            work.result()

    async def _answer_all(self, app: Starlette, bar: tqdm[Any]) -> None:
        from streamllm.server.batches.execution import LineRunner, error_line
        from streamllm.server.batches.store import Result

        runner = LineRunner(app)
        places = asyncio.Semaphore(self._engine.config.max_num_seqs + QUEUED_LINES)
        tasks: set[asyncio.Task[None]] = set()

        def end(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            places.release()
            if not task.cancelled():
                self._failure = self._failure or task.exception()

        async def answer(request: LineRequest) -> None:
            result = await runner.run(request, owner="")
            self._output.write(result)
            bar.update()

        try:
            for line in _lines(self._path, self._config.max_body_bytes):
                request, error, key = _identity(line, self._check)
                if key in self._output.done:
                    continue
                if request is None:
                    broken = Result(line.number, True, error_line(None, error.body()))
                    self._output.write(broken)
                    bar.update()
                    continue
                await places.acquire()
                if self._failure is not None:
                    break
                task = asyncio.create_task(answer(request))
                tasks.add(task)
                task.add_done_callback(end)
            while tasks and self._failure is None:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
        if self._failure is not None:
            raise self._failure
