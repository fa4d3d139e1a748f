"""What ``chat`` and ``complete`` talk to: a server elsewhere, or one of their own in this process."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

from streamllm.cli.arguments import add_settings, engine_settings, settings_from
from streamllm.cli.config_file import add_config_argument
from streamllm.cli.serve import API_KEY_VARIABLES, read_chat_template
from streamllm.config import EngineConfig, ServerConfig
from streamllm.errors import ConfigError, StreamLLMError
from streamllm.settings import flag_of

if TYPE_CHECKING:
    import httpx

CONNECT_TIMEOUT = 10.0
"""Seconds that a server has to take a connection and to list its models. An answer may take any time."""


class Piece(NamedTuple):
    """Text of an answer, or of the reasoning before it."""

    text: str
    is_thought: bool = False


class Answer:
    """A streamed answer; iterating gives its pieces as they come.

    Attributes:
        text: what has come of the answer itself, without reasoning.
        finish_reason: ``None`` until it is over.
        num_tokens: generated tokens as the server counts them; ``None`` until it is over, and where the
            server does not say.
        first, last: seconds from the request to the first and the latest piece; ``None`` before.
    """

    def __init__(self, events: Generator[dict[str, Any], None, None]) -> None:
        self.text = ""
        self.finish_reason: str | None = None
        self.num_tokens: int | None = None
        self.first: float | None = None
        self.last: float | None = None
        self._events = events

    def __iter__(self) -> Iterator[Piece]:
        start = time.monotonic()
        for event in self._events:
            self.num_tokens = (event.get("usage") or {}).get("completion_tokens", self.num_tokens)
            for choice in event.get("choices", ())[:1]:
                self.finish_reason = choice.get("finish_reason") or self.finish_reason
                for piece in _pieces(choice):
                    self.last = time.monotonic() - start
                    self.first = self.last if self.first is None else self.first
                    self.text += "" if piece.is_thought else piece.text
                    yield piece

    def close(self) -> None:
        """End it; a server stops generating."""
        self._events.close()

    def figures(self) -> str:
        """Time to first token and speed, as a line."""
        if self.first is None or self.last is None:
            return "no token"
        figures = [f"TTFT {1000 * self.first:.0f} ms"]
        if self.num_tokens is not None:
            figures.append(f"{self.num_tokens} tokens")
            if self.num_tokens > 1 and self.last > self.first:
                figures.append(f"{(self.num_tokens - 1) / (self.last - self.first):.1f} tok/s")
        if self.finish_reason != "stop":
            figures.append({"length": "ended by length", None: "stopped"}.get(self.finish_reason, ""))
        return ", ".join(filter(None, figures))


def _pieces(choice: dict[str, Any]) -> Iterator[Piece]:
    delta = choice.get("delta") or {}
    if thought := delta.get("reasoning") or delta.get("reasoning_content"):
        yield Piece(thought, is_thought=True)
    if text := delta.get("content") or choice.get("text"):
        yield Piece(text)


class ApiClient:
    """An OpenAI-compatible server.

    Args:
        http: its base URL ends with ``/v1/``.
        name: of the server, for errors.
    """

    def __init__(self, http: httpx.Client, name: str) -> None:
        self._http = http
        self._name = name

    def models(self) -> list[str]:
        """The names of the models that it serves.

        Raises:
            StreamLLMError: it does not answer, or not like such a server.
        """
        with self._errors():
            response = self._http.get("models", timeout=CONNECT_TIMEOUT)
        self._check(response)
        try:
            names = [model["id"] for model in response.json()["data"]]
        except (ValueError, KeyError, TypeError):
            names = []
        if not names:
            raise StreamLLMError(f"{self._name} lists no models at /v1/models; is it an OpenAI-style server?")
        return names

    def ask(self, path: str, body: dict[str, Any]) -> Answer:
        """POST ``body`` to ``chat/completions`` or ``completions``, streamed.

        The answer's iterator raises StreamLLMError: the server refuses, fails or goes away.
        """
        return Answer(self._events(path, {**body, "stream": True}))

    def _events(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        with self._errors(), self._http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                response.read()
            self._check(response)
            for line in _lines(response.iter_bytes()):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = _json_object(data)
                if (error := event.get("error")) is not None:
                    raise StreamLLMError(f"{self._name} broke off: {_message(error)}")
                yield event
        raise StreamLLMError(f"{self._name} broke off in the middle of the answer.")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        import httpx

        try:
            yield
        except httpx.ConnectTimeout:
            raise StreamLLMError(f"{self._name} does not answer: no connection within 10 s.") from None
        except httpx.TimeoutException:
            raise StreamLLMError(
                f"{self._name} does not answer: it took the connection, then nothing."
            ) from None
        except httpx.HTTPError as error:
            raise StreamLLMError(f"{self._name} does not answer: {error or type(error).__name__}.") from None

    def _check(self, response: httpx.Response) -> None:
        if response.status_code == 200:
            return
        if response.status_code == 401:
            raise StreamLLMError(f"{self._name} refuses the API key, or wants one: give it with --api-key.")
        message = _message(_json_object(response.content).get("error"))
        raise StreamLLMError(
            f"{self._name} answers {response.status_code}: {message or response.reason_phrase}"
        )


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Lines that end with a line feed: httpx's own also end at U+2028 and others, which JSON may hold."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    yield rest


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error or "")


# -- flags -------------------------------------------------------------------------------------------------


def add_client_arguments(
    parser: argparse.ArgumentParser, quick: str, request_settings: tuple[str, ...]
) -> None:
    """The flags that ``chat`` and ``complete`` have in common.

    Args:
        quick: what ``--quick`` takes, for the help.
        request_settings: of the server's settings, those that are flags here.
    """
    parser.add_argument(
        "model_positional", nargs="?", metavar="MODEL",
        help="as --model; with --url its name on the server, the first of those if left out",
    )  # fmt: skip
    parser.add_argument("--url", metavar="URL", help="ask the server at http://host:port, not an engine here")
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"of the server (or in ${' or $'.join(API_KEY_VARIABLES)})"
    )
    parser.add_argument("--quick", metavar="TEXT", help=f"{quick}, then exit")
    parser.add_argument("--stats", action="store_true", help="say TTFT and tokens/s after each answer")
    add_config_argument(parser)
    sampling = parser.add_argument_group("sampling (the server's or the model's defaults if left out)")
    sampling.add_argument("--temperature", type=float, metavar="X")
    sampling.add_argument("--top-p", type=float, metavar="X")
    sampling.add_argument("--max-tokens", type=int, metavar="N")
    add_settings(parser, EngineConfig, "engine (as for serve; without --url)")
    if request_settings:
        add_settings(parser, ServerConfig, "requests (as for serve; without --url)", only=request_settings)


def request_body(options: argparse.Namespace, model: str) -> dict[str, Any]:
    """What every request of this command line says."""
    body: dict[str, Any] = {"model": model}
    for name in ("temperature", "top_p", "max_tokens"):
        if (value := getattr(options, name)) is not None:
            body[name] = value
    if options.stats:
        body["stream_options"] = {"include_usage": True}
    return body


def open_client(options: argparse.Namespace) -> AbstractContextManager[tuple[ApiClient, str]]:
    """The server that the flags ask for, and the model's name there.

    Entering raises ConfigError: flags are wrong, or do not go together; ModelLoadError: the model cannot be
    run here; StreamLLMError: the server does not answer.
    """
    return _own_engine(options) if options.url is None else _remote_server(options)


@contextlib.contextmanager
def _own_engine(options: argparse.Namespace) -> Iterator[tuple[ApiClient, str]]:
    import httpx

    from streamllm.cli.in_process import private_server

    if options.api_key is not None:
        raise ConfigError("--api-key is a server's; name it with --url.")
    request_settings = settings_from(options, ServerConfig)
    del request_settings["api_key"]
    if request_settings.get("chat_template"):
        request_settings["chat_template"] = read_chat_template(request_settings["chat_template"])
    engine_config = EngineConfig(**{"disable_log_stats": True, **engine_settings(options)})
    with (
        private_server(engine_config, request_settings) as path,
        httpx.Client(
            base_url="http://engine/v1/", transport=httpx.HTTPTransport(uds=path), timeout=None
        ) as http,
    ):
        client = ApiClient(http, "the engine")
        yield client, client.models()[0]


@contextlib.contextmanager
def _remote_server(options: argparse.Namespace) -> Iterator[tuple[ApiClient, str]]:
    import httpx

    settings = engine_settings(options)
    named = settings.pop("model", None)
    for name in (*settings, *settings_from(options, ServerConfig)):
        if name != "api_key":
            raise ConfigError(f"{flag_of(name)} is the engine's and has no effect with --url; leave it out.")
    key = options.api_key or next((key for name in API_KEY_VARIABLES if (key := os.environ.get(name))), None)
    headers = {} if key is None else {b"Authorization": f"Bearer {key}".encode()}
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT)
    with httpx.Client(base_url=_base_url(options.url), headers=headers, timeout=timeout) as http:
        client = ApiClient(http, options.url)
        names = client.models()
        if named is not None and named not in names:
            raise StreamLLMError(f"{options.url} has no model {named!r}; it serves {', '.join(names)}.")
        yield client, named or names[0]


def _base_url(url: str) -> str:
    """``host:port``, ``http://host:port`` and ``http://host:port/v1`` are all the same."""
    import httpx

    full = url if "://" in url else f"http://{url}"
    try:
        parsed = httpx.URL(full)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url {url} is no URL: {error}.") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"--url must be like http://host:port, got {url}.")
    return full.rstrip("/").removesuffix("/v1") + "/v1/"
