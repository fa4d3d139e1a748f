"""``streamllm chat``: a conversation in the terminal, with a server or with an engine in this process."""

from __future__ import annotations

import argparse
from typing import Any

from streamllm.cli.client import ApiClient, add_client_arguments, open_client, request_body
from streamllm.cli.display import show_with_figures
from streamllm.cli.prompt import read_and_ask

_REQUEST_SETTINGS = ("chat_template", "default_chat_template_kwargs", "reasoning_parser")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", "--system-prompt", metavar="TEXT", help="the system prompt")
    add_client_arguments(parser, "ask this one question", _REQUEST_SETTINGS)


def run(options: argparse.Namespace) -> int:
    """Talk until the user leaves.

    Raises:
        ConfigError: flags are wrong.
        ModelLoadError: the model cannot be run here.
        StreamLLMError: the server does not answer, or refuses the one question of ``--quick``.
    """
    with open_client(options) as (client, model):
        conversation = Conversation(client, request_body(options, model), options.system, options.stats)
        if options.quick is not None:
            conversation.ask(options.quick)
            return 0
        return read_and_ask(conversation.ask, model, {"/reset": conversation.reset})


class Conversation:
    """Messages so far, and who answers them."""

    def __init__(self, client: ApiClient, body: dict[str, Any], system: str | None, stats: bool) -> None:
        self._client = client
        self._body = body
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self._stats = stats
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self.messages: list[dict[str, str]] = [*self._first]

    def ask(self, text: str) -> None:
        """Show the answer to ``text``. What was shown before it broke off or was stopped stays in the
        conversation; a question without any answer does not.

        Raises:
            StreamLLMError: the server refuses, fails or goes away.
            KeyboardInterrupt: the user stopped it.
        """
        question = {"role": "user", "content": text}
        body = {**self._body, "messages": [*self.messages, question]}
        answer = self._client.ask("chat/completions", body)
        try:
            show_with_figures(answer, markdown=True, stats=self._stats)
        finally:
            if answer.text:
                self.messages += [question, {"role": "assistant", "content": answer.text}]
