"""From a conversation to a prompt's token ids, without ever holding up the event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from streamllm.errors import InvalidRequestError, ModelLoadError
from streamllm.text.chat_template import ChatTemplate
from streamllm.text.content_format import ContentFormat
from streamllm.text.messages import check_template_kwargs, normalise_messages
from streamllm.text.tokenizer import Tokenizer
from streamllm.text.tools_as_text import tools_as_text

SMALL = 4_000
"""Characters up to which a conversation is rendered at once (a few milliseconds of work at most)."""

WAIT_LIMIT = 10.0
"""Seconds that a request waits for its rendering, the queue for a thread included."""

MAX_REQUEST_TEMPLATE = 200_000
"""Characters of a template that comes with a request."""


class Rendered(NamedTuple):
    """A conversation as the model reads it."""

    text: str
    token_ids: list[int]


class ChatRenderer:
    """Renders conversations with one model's template and tokenizer.

    Args:
        template: the model's, or what is used instead of it; ``None`` if there is none.
        check_text: refuses a text that is too long to be worth tokenising; takes ``may_be_cut`` as well.
        default_kwargs: variables for the template where a request does not set them.

    Attributes:
        template: see above.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        check_text: Callable[..., None],
        default_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.template = template
        self.check_text = check_text
        self._tokenizer = tokenizer
        self._default_kwargs = check_template_kwargs(default_kwargs)
        self._compiled = functools.lru_cache(maxsize=16)(self._compile)

    async def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        content_format: ContentFormat | None = None,
        tools: list[dict[str, Any]] | None = None,
        prompt_may_be_cut: bool = False,
    ) -> Rendered:
        """The prompt of a conversation; exactly one BOS if the model has one.

        Args:
            chat_template: Jinja to use instead of the model's template: the client's, who must be trusted.
            content_format: what shape of content to give the template instead of what it looks made for.
            tools: functions as :class:`ChatTemplate` takes them; a template that knows no tools gets them,
                and the conversation's calls, as text.
            prompt_may_be_cut: a prompt that is too long for the context is not refused here.

        Raises:
            InvalidRequestError: no template, a template's own refusal, one that takes too long, malformed
                messages, or a prompt that is too long.
        """
        render = functools.partial(
            self.text_of,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            content_format=content_format,
            tools=tools,
            prompt_may_be_cut=prompt_may_be_cut,
        )
        kwargs = (self._default_kwargs, chat_template_kwargs)
        if chat_template is None and _is_small((messages, tools, kwargs)):
            text = render()
        else:
            text = await _in_thread(render, own_template=chat_template is None)
        encode = self._tokenizer.encode_chat
        small = len(text) <= SMALL
        return Rendered(text, encode(text) if small else await asyncio.to_thread(encode, text))

    def text_of(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        chat_template: str | None,
        chat_template_kwargs: Mapping[str, Any] | None,
        content_format: ContentFormat | None = None,
        tools: list[dict[str, Any]] | None,
        prompt_may_be_cut: bool = False,
    ) -> str:
        """The prompt's text, on the caller's thread: as :meth:`render`, but for its limit of time."""
        source = self.template.source if chat_template is None and self.template else chat_template
        if source is None:
            raise InvalidRequestError(
                "This model has no chat template; use /v1/completions.", param="messages"
            )
        kwargs = {**self._default_kwargs, **check_template_kwargs(chat_template_kwargs)}
        template = self.template
        if template is None or chat_template is not None or content_format is not None:
            template = self._compiled(source, content_format)
        if template.takes_tools:
            conversation, shown = messages, tools
        else:
            conversation, shown = tools_as_text(messages, tools or []), None
        text = template.render(
            normalise_messages(conversation, template),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=shown,
            **kwargs,
        )
        self.check_text(text, may_be_cut=prompt_may_be_cut)
        return text

    def _compile(self, source: str, content_format: ContentFormat | None) -> ChatTemplate:
        if len(source) > MAX_REQUEST_TEMPLATE:
            raise InvalidRequestError(
                f"chat_template is too long; at most {MAX_REQUEST_TEMPLATE} characters are allowed.",
                param="chat_template",
            )
        try:
            return ChatTemplate(source, self._tokenizer.special_token_strings, content_format)
        except ModelLoadError as error:
            raise InvalidRequestError(str(error), param="chat_template") from None


def _is_small(value: Any) -> bool:
    """Whether a JSON value holds at most :data:`SMALL` characters, give or take."""
    size, stack = 0, [value]
    while stack and size <= SMALL:
        item = stack.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, Mapping):
            size += 8 * len(item)
            if size <= SMALL:
                stack += [*item, *item.values()]
        elif isinstance(item, (list, tuple)):
            size += 8 * len(item)
            if size <= SMALL:
                stack += item
    return size <= SMALL


@functools.cache
def _threads(own_template: bool) -> ThreadPoolExecutor:
    """Few, so that whatever templates do cannot take the machine; those that come with requests, which may be
    hostile, wait only for each other."""
    return ThreadPoolExecutor(2 if own_template else 1, "streamllm-render")


async def _in_thread(render: Callable[[], str], *, own_template: bool) -> str:
    future = asyncio.get_running_loop().run_in_executor(_threads(own_template), render)
    try:
        return await asyncio.wait_for(future, WAIT_LIMIT)
    except asyncio.TimeoutError:
        raise InvalidRequestError(
            f"The conversation could not be rendered within {WAIT_LIMIT:g} s.", param="messages"
        ) from None
