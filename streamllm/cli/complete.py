"""``streamllm complete``: texts go on, by a server or by an engine in this process."""

from __future__ import annotations

import argparse

from streamllm.cli.client import add_client_arguments, open_client, request_body
from streamllm.cli.display import show_with_figures
from streamllm.cli.prompt import read_and_ask


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_client_arguments(parser, "continue this one text", ())


def run(options: argparse.Namespace) -> int:
    """Continue texts, a line each, until the user leaves.

    Raises:
        ConfigError: flags are wrong.
        ModelLoadError: the model cannot be run here.
        StreamLLMError: the server does not answer, or refuses the one text of ``--quick``.
    """
    with open_client(options) as (client, model):
        body = request_body(options, model)

        def complete(text: str) -> None:
            answer = client.ask("completions", {**body, "prompt": text})
            show_with_figures(answer, markdown=False, stats=options.stats)

        if options.quick is not None:
            complete(options.quick)
            return 0
        return read_and_ask(complete, model, {})
