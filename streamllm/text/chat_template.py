"""A conversation rendered to the prompt's text by the model's own Jinja template.

The environment is the one that templates are written for (Transformers' ``apply_chat_template``,
https://huggingface.co/docs/transformers/chat_templating): whitespace rules, ``tojson``, ``raise_exception``,
``strftime_now``, loop controls and the ``generation`` tag. It is a sandbox, for templates come with models
from anywhere.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from streamllm.errors import InvalidRequestError, ModelLoadError
from streamllm.text.content_format import ContentFormat, detect_content_format

RESERVED_VARIABLES = frozenset(
    {
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "chat_template",
        "self",
    }
)
"""What a request's ``chat_template_kwargs`` may not set: each has a field of its own, or none."""

_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_HERE "


class ChatTemplate:
    """A compiled chat template. Rendering is thread-safe.

    Args:
        source: the Jinja template.
        special_tokens: ``bos_token``, ``eos_token`` ..., which the template sees as variables.

    Attributes:
        source: the template's text.
        content_format: what shape of ``content`` the template expects.

    Raises:
        ModelLoadError: the template is not valid Jinja; the line is named.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            self.content_format: ContentFormat = detect_content_format(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(
                f"The chat template is not valid Jinja: line {error.lineno}: {error.message}."
            ) from error

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt's text.

        Args:
            messages: as :func:`streamllm.text.messages.normalise_messages` returns them.
            add_generation_prompt: end with the opening of an assistant turn.
            continue_final_message: end inside the last message, so that the model goes on writing it.
            tools: JSON schemas of functions; an empty list is the same as ``None``.
            kwargs: further variables for the template (``enable_thinking``, ``documents``), none of
                :data:`RESERVED_VARIABLES`.

        Raises:
            InvalidRequestError: the template refuses the messages (its own words are the error's text) or
                cannot handle them; both ``add_generation_prompt`` and ``continue_final_message`` are set.
        """
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequestError(
                    "continue_final_message needs add_generation_prompt to be false.",
                    param="continue_final_message",
                )
            messages = _mark_end(messages)
        variables = {"documents": None, **self._special_tokens, **kwargs}
        try:
            text = self._template.render(
                variables, messages=messages, tools=tools or None, add_generation_prompt=add_generation_prompt
            )
        except _RefusedByTemplate as error:
            raise InvalidRequestError(str(error), param="messages") from error
        except Exception as error:  # whatever an arbitrary template raises is about these messages
            raise InvalidRequestError(
                f"The model's chat template cannot render these messages: {error}.", param="messages"
            ) from error
        return _cut_at_mark(text) if continue_final_message else text


class _RefusedByTemplate(jinja2.TemplateError):
    """The template called ``raise_exception``."""


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training. It has no effect here."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    functions: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    environment.globals.update(functions)
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise _RefusedByTemplate(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _mark_end(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a mark at the end of the last one's text."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        marked: Any = content + _CONTINUE_MARK
    elif content and isinstance(content[-1], dict) and isinstance(content[-1].get("text"), str):
        marked = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _CONTINUE_MARK}]
    else:
        raise InvalidRequestError(
            "continue_final_message needs a final message that ends in text.", param="continue_final_message"
        )
    return [*messages[:-1], {**messages[-1], "content": marked}]


def _cut_at_mark(text: str) -> str:
    """The text up to the mark. A template that trims the mark's space trims the message's end too."""
    mark = text.rfind(_CONTINUE_MARK.rstrip())
    if mark < 0:
        raise InvalidRequestError(
            "continue_final_message cannot be used: the model's chat template drops the final message's end.",
            param="continue_final_message",
        )
    trimmed = not text.startswith(_CONTINUE_MARK, mark)
    return text[:mark].rstrip() if trimmed else text[:mark]
