"""``streamllm bench``: measures servers over HTTP, and the engine in this process."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from streamllm.bench import latency, serve, throughput

_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "serve": serve.run,
    "latency": latency.run,
    "throughput": throughput.run,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommands, whose names ``run`` finds as ``bench_command``."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=type(parser))
    for name, add_own_arguments, help_text, more in (
        ("serve", serve.add_arguments, "measure OpenAI-compatible servers",
         "Latencies and throughput, with the report and the flags of `vllm bench serve`. Several servers are "
         "measured in turn and compared."),
        ("latency", latency.add_arguments, "measure how long a batch takes, in this process", ""),
        ("throughput", throughput.add_arguments, "measure prompts and tokens a second, in this process", ""),
    ):  # fmt: skip
        description = f"{help_text[0].upper()}{help_text[1:]}. {more}".rstrip()
        own_parser = commands.add_parser(name, help=help_text, description=description, allow_abbrev=False)
        own_parser.set_defaults(bench_command=name)
        add_own_arguments(own_parser)


def run(options: argparse.Namespace) -> int:
    """Run the chosen benchmark; see each one's ``run`` for what it raises."""
    return _COMMANDS[options.bench_command](options)
