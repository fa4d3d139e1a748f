"""Either route of generation through the ``openai`` client, as one function with one kind of answer."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import openai

MODEL = "SmolLM2-135M-Instruct"
EOS, START_OF_MESSAGE = 2, 1
"""Special tokens of the default model: ``<|im_end|>`` and ``<|im_start|>``."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "chat": {"model": MODEL, "messages": [{"role": "user", "content": "Say something about the sea."}]},
    "completions": {"model": MODEL, "prompt": "The sea is blue, the sky is blue, and"},
}
GREEDY = {"temperature": 0, "max_tokens": 12}
NOT_GIVEN = object()


@dataclass(frozen=True)
class Answer:
    """What came back, whole or streamed.

    Attributes:
        body: the whole answer, or the last chunk; vLLM's fields besides OpenAI's are in it.
        texts: each choice's text.
        finish_reasons: each choice's.
        chunks: all chunks of a stream.
    """

    body: dict[str, Any]
    texts: list[str]
    finish_reasons: list[str]
    chunks: list[dict[str, Any]]

    @property
    def text(self) -> str:
        assert len(self.texts) == 1
        return self.texts[0]

    @property
    def choice(self) -> dict[str, Any]:
        return self.body["choices"][0]

    @property
    def completion_tokens(self) -> int:
        return self.body["usage"]["completion_tokens"]

    @property
    def prompt_tokens(self) -> int:
        return self.body["usage"]["prompt_tokens"]

    @property
    def cached_tokens(self) -> int:
        return self.body["usage"]["prompt_tokens_details"]["cached_tokens"]

    @property
    def logprob_tokens(self) -> list[str]:
        """The tokens as the choice's logprobs show them."""
        logprobs = self.choice["logprobs"]
        return logprobs["tokens"] if "tokens" in logprobs else [e["token"] for e in logprobs["content"]]


class Asker:
    """``ask(field=value, ...)`` sends a greedy request of 12 tokens with these fields.

    Fields that OpenAI's client does not know go into ``extra_body``, as its documentation tells vLLM's users;
    ``NOT_GIVEN`` leaves one of the defaults out.

    Attributes:
        route: ``"chat"`` or ``"completions"``.
    """

    def __init__(self, client: openai.OpenAI, route: str) -> None:
        self.route = route
        self.is_chat = route == "chat"
        self._create = client.chat.completions.create if self.is_chat else client.completions.create
        self._known = set(inspect.signature(self._create).parameters) - {"self", "extra_body"}

    def __call__(self, **fields: Any) -> Answer:
        values = {**DEFAULTS[self.route], **GREEDY, **fields}
        values = {name: value for name, value in values.items() if value is not NOT_GIVEN}
        known = {name: value for name, value in values.items() if name in self._known and value is not None}
        extra = {name: value for name, value in values.items() if name not in known}
        required = "messages" if self.is_chat else "prompt"
        if required in extra:
            known[required] = []
        known.setdefault("model", MODEL)
        answer = self._create(**known, extra_body=extra)
        return _streamed(answer, self.is_chat) if values.get("stream") else _whole(answer, self.is_chat)

    def refusal(self, **fields: Any) -> openai.APIStatusError:
        """The error that a request with these fields is answered with."""
        try:
            answer = self(**fields)
        except openai.APIStatusError as error:
            assert error.body["message"] and error.body["type"]
            return error
        raise AssertionError(f"{fields} was not refused but answered: {answer.body}")

    def ids(self, **fields: Any) -> list[int]:
        """The token ids of an answer."""
        answer = self(return_token_ids=True, **fields)
        return answer.choice["token_ids"]


def _whole(answer: Any, is_chat: bool) -> Answer:
    body = answer.model_dump()
    choices = body["choices"]
    texts = [choice["message"]["content"] if is_chat else choice["text"] for choice in choices]
    return Answer(body, texts, [choice["finish_reason"] for choice in choices], [])


def _streamed(stream: Any, is_chat: bool) -> Answer:
    chunks = [chunk.model_dump() for chunk in stream]
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text = (choice["delta"]["content"] if is_chat else choice["text"]) or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text
            if choice["finish_reason"]:
                assert choice["index"] not in reasons
                reasons[choice["index"]] = choice["finish_reason"]
    assert sorted(texts) == sorted(reasons) == list(range(len(texts)))
    return Answer(
        chunks[-1], [texts[i] for i in range(len(texts))], [reasons[i] for i in range(len(texts))], chunks
    )
