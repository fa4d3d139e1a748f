"""``streamllm``: the command line. Heavy imports happen inside the commands, so that help is instant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from streamllm import __version__
from streamllm.cli import (
    bench,
    chat,
    collect_env,
    complete,
    completion,
    models,
    plan,
    pull,
    run_batch,
    serve,
    tune_gpu,
)
from streamllm.cli.help_topics import EPILOG, format_topic, help_topic
from streamllm.errors import ConfigError, StreamLLMError

_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "serve": serve.run,
    "chat": chat.run,
    "complete": complete.run,
    "pull": pull.run,
    "list": models.run_list,
    "remove": models.run_remove,
    "plan": plan.run,
    "run-batch": run_batch.run,
    "bench": bench.run,
    "collect-env": collect_env.run,
    "tune-gpu": tune_gpu.run,
    "completion": completion.run,
}

_CONFIGURABLE = ("serve", "chat", "complete", "run-batch", "bench")
"""Commands that take ``--config``, and vLLM's flags that change nothing."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def build_parser() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The parser of the whole command, and that of ``serve``."""
    parser = _Parser(
        prog="streamllm",
        description="Serve large language models to many users at once.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"streamllm {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    serve_parser = commands.add_parser(
        "serve",
        help="serve a model over an OpenAI-compatible HTTP API",
        description="Serve a model over an OpenAI-compatible HTTP API. With no model named, "
        "SmolLM2-135M-Instruct is fetched once and served.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    serve.add_arguments(serve_parser)
    _add_talking_commands(commands)
    _add_model_commands(commands)
    run_batch.add_arguments(
        commands.add_parser(
            "run-batch",
            help="answer a file of requests, without a server",
            description="Answer a file of requests in OpenAI's batch format, a line each, without a server. "
            "Results are written as they come; the same command goes on where an earlier one stopped.",
            allow_abbrev=False,
        )
    )
    bench.add_arguments(
        commands.add_parser(
            "bench",
            help="measure servers, or the engine in this process",
            description="Measure OpenAI-compatible servers, or the engine in this process.",
            allow_abbrev=False,
        )
    )
    collect_env.add_arguments(
        commands.add_parser(
            "collect-env",
            help="describe this machine, the kernels in use and why, for bug reports",
            description="Describe this machine, the kernels in use and why, for bug reports.",
            allow_abbrev=False,
        )
    )
    tune_gpu.add_arguments(
        commands.add_parser(
            "tune-gpu",
            help="measure how Triton's kernels are tiled best on this GPU for a model",
            description="Measure how Triton's attention kernels are tiled best on this GPU for a model, and "
            "keep that in the cache folder, where it wins over the package's tables.",
            allow_abbrev=False,
        )
    )
    completion.add_arguments(
        commands.add_parser(
            "completion",
            help="print a script that completes commands and flags in a shell",
            description="Print a script that completes commands, flags and their values: "
            "source <(streamllm completion bash), the same with zsh, or streamllm completion fish | source.",
            allow_abbrev=False,
        )
    )
    return parser, serve_parser


def _add_talking_commands(commands: Any) -> None:
    for name, add_arguments, help_text, more in (
        ("chat", chat.add_arguments, "talk with a model in the terminal",
         "With a server (--url), or with an engine in this process. Lines of a pipe are asked in turn."),
        ("complete", complete.add_arguments, "let a model continue texts",
         "By a server (--url), or by an engine in this process. Each line is a text of its own."),
    ):  # fmt: skip
        description = f"{help_text[0].upper()}{help_text[1:]}. {more}"
        add_arguments(commands.add_parser(name, help=help_text, description=description, allow_abbrev=False))


def _add_model_commands(commands: Any) -> None:
    for name, add_arguments, help_text, more in (
        ("pull", pull.add_arguments, "fetch a model",
         "What is here already is not fetched again, and an interrupted download goes on where it stopped."),
        ("list", models.add_list_arguments, "list the models on this machine",
         "Those in streamllm's cache and in the Hugging Face hub's, the last used first."),
        ("remove", models.add_remove_arguments, "delete a model from the caches", ""),
        ("plan", plan.add_arguments, "say what a model would take here, without loading it",
         "Memory for weights and KV cache, and how many sequences fit. Of a model on the hub only the config "
         "and the headers of its files are read."),
    ):  # fmt: skip
        description = f"{help_text[0].upper()}{help_text[1:]}. {more}".rstrip()
        add_arguments(commands.add_parser(name, help=help_text, description=description, allow_abbrev=False))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0; 1 for a model or a server that could not run; 2 for a command line that could not be understood.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser, _ = build_parser()
    try:
        command = arguments[0] if arguments else None
        if (topic := help_topic(arguments)) is not None:
            print(format_topic(completion.innermost_command(parser, arguments)[0], topic), end="")
            return 0
        if command in _CONFIGURABLE:
            own_parser, own_arguments = completion.innermost_command(parser, arguments)
            options = own_parser.parse_args(serve.prepare(own_arguments, own_parser))
            return _COMMANDS[command](options)
        options = parser.parse_args(arguments)
        if options.command in _COMMANDS:
            return _COMMANDS[options.command](options)
        parser.print_help()
        return 0
    except ConfigError as error:
        print(f"streamllm: error: {error}", file=sys.stderr)
        return 2
    except StreamLLMError as error:
        print(f"streamllm: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
