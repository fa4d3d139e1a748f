"""A conversation rendered to the prompt's text by the model's own Jinja template.

The environment is the one that templates are written for (Transformers' ``apply_chat_template``,
https://huggingface.co/docs/transformers/chat_templating): whitespace rules, ``tojson``, ``raise_exception``,
``strftime_now``, loop controls and the ``generation`` tag. :mod:`streamllm.text.template_environment` makes
it, and bounds what a template can do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.meta

from streamllm.errors import InvalidRequestError, ModelLoadError
from streamllm.text.content_format import ContentFormat, detect_content_format
from streamllm.text.template_environment import (
    TIME_LIMIT,
    RefusedByTemplateError,
    TemplateLimitError,
    environment,
    time_limit,
)

RESERVED_VARIABLES = frozenset(
    {
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "chat_template",
        "self",
        "bos_token",
        "eos_token",
    }
)
"""What a request's ``chat_template_kwargs`` may not set: each has a field of its own, or none."""

_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_HERE "


class ChatTemplate:
    """A compiled chat template. Rendering is thread-safe.

    Args:
        source: the Jinja template.
        special_tokens: ``bos_token``, ``eos_token`` ..., which the template sees as variables.
        content_format: what shape of ``content`` to give it; found out from the template if left out.

    Attributes:
        source: the template's text.
        content_format: what shape of ``content`` the template expects.
        takes_tools: it prints the tools that a request brings.

    Raises:
        ModelLoadError: the template is not valid Jinja; the line is named.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], content_format: ContentFormat | None = None
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            parsed = environment().parse(source)
            detected = detect_content_format(parsed)
            self.takes_tools = "tools" in jinja2.meta.find_undeclared_variables(parsed)
            self.content_format = content_format or detected
            self._template = environment().from_string(source)
        except RecursionError as error:
            raise ModelLoadError("The chat template is nested too deeply.") from error
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
            InvalidRequestError: the template refuses the messages (its own words are the error's text),
                cannot handle them, or takes more than :data:`TIME_LIMIT`; both ``add_generation_prompt`` and
                ``continue_final_message`` are set.
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
            with time_limit(TIME_LIMIT):
                text = self._template.render(
                    variables,
                    messages=messages,
                    tools=tools or None,
                    add_generation_prompt=add_generation_prompt,
                )
        except RefusedByTemplateError as error:
            raise InvalidRequestError(str(error), param="messages") from error
        except TemplateLimitError as error:
            raise InvalidRequestError(
                f"The chat template was stopped on these messages: {error}.", param="messages"
            ) from error
        except Exception as error:  # whatever an arbitrary template raises is about these messages
            raise InvalidRequestError(
                f"The model's chat template cannot render these messages: {error}.", param="messages"
            ) from error
        return _cut_at_mark(text) if continue_final_message else text


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
