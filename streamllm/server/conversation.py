"""A conversation with the model: from a chat request to a prompt and the way tokens are drawn, and from the
model's text to content, reasoning and tool calls.

Chats, responses and Anthropic's messages all come through here: each API turns its request into a
:class:`~streamllm.server.protocol.ChatRequest`, and the events of the answer into its own shape.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from streamllm.engine.constraint import parsed_json, schema_text
from streamllm.errors import InvalidRequestError
from streamllm.outputs import CompletionOutput
from streamllm.parsers.events import (
    Content,
    Event,
    OutputParser,
    ParsedMessage,
    Reasoning,
    ToolCallStart,
    collect,
)
from streamllm.sampling_params import MAX_LOGPROBS, BeamSearchParams, SamplingParams
from streamllm.server.chat_prompt import chat_prompt
from streamllm.server.generation import ServerState, generation_params
from streamllm.server.output_format import OutputFormat
from streamllm.server.protocol import ChatRequest
from streamllm.server.tools import ToolUse, read_tools
from streamllm.structured_outputs import StructuredOutputsParams
from streamllm.text.chat_renderer import Rendered


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat request comes to.

    Attributes:
        prompt: what the model reads.
        params: how its tokens are drawn, and what they must look like.
        tools: what it may call.
        make_parser: makes what reads one answer's text; ``None``: all of it is content.
        include_reasoning: the client wants to see what the model thinks.
    """

    prompt: Rendered
    params: SamplingParams | BeamSearchParams
    tools: ToolUse
    make_parser: Callable[[], OutputParser] | None
    include_reasoning: bool = True

    def make_reader(self) -> AnswerReader:
        return AnswerReader(self)


async def plan_conversation(server: ServerState, request: ChatRequest) -> Conversation:
    """What a chat request comes to.

    Raises:
        InvalidRequestError: a field that is wrong, contradicts another or cannot be enforced; ``param`` is
            its name.
    """
    tools = read_tools(request)
    output_format = server.output_format
    output_format.check_tools(tools)
    params = read_params(server, request)
    prompt = await chat_prompt(server, request, request.messages)
    make_parser = None
    if output_format.is_active(tools):
        make_parser = functools.partial(output_format.parser, tools, prompt.text)
        if isinstance(params, SamplingParams):
            params = _constrained(output_format, request, tools, prompt.text, params)
    elif request.thinking_token_budget not in (None, -1):
        output_format.thinking(prompt.text, request.thinking_token_budget)
    return Conversation(prompt, params, tools, make_parser, request.include_reasoning is not False)


def read_params(server: ServerState, request: ChatRequest) -> SamplingParams | BeamSearchParams:
    renamed = {"logprobs": "top_logprobs"}
    max_tokens = request.max_tokens
    if request.max_completion_tokens is not None:
        max_tokens = request.max_completion_tokens
        renamed["max_tokens"] = "max_completion_tokens"
    return generation_params(
        server.engine,
        request,
        max_tokens=max_tokens,
        logprobs=_num_logprobs(request),
        prompt_logprobs=request.prompt_logprobs,
        renamed=renamed,
    )


def _num_logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    top = request.top_logprobs
    if top and 0 < top <= MAX_LOGPROBS:
        raise InvalidRequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    # Zero asks for nothing; what is out of range is refused as such.
    return top or None


def _constrained(
    output_format: OutputFormat, request: ChatRequest, tools: ToolUse, prompt: str, params: SamplingParams
) -> SamplingParams:
    """The parameters, with what tools and reasoning add to them."""
    structured = _with_calls(output_format, tools, params.structured_outputs)
    budget = None if request.thinking_token_budget == -1 else request.thinking_token_budget
    # Grammars for calls hold what their notation itself has for reasoning.
    holds_reasoning = tools.may_call and structured is not None and output_format.calls_hold_reasoning
    return params.clone(
        structured_outputs=structured,
        thinking=None if holds_reasoning else output_format.thinking(prompt, budget),
        kept_special_tokens=frozenset(output_format.special_token_ids.values()),
    )


def _with_calls(
    output_format: OutputFormat, tools: ToolUse, wanted: StructuredOutputsParams | None
) -> StructuredOutputsParams | None:
    """What the text must look like: calls that must be made, calls or what else the request wants, or free
    text in which calls follow strict schemas."""
    if tools.must_call:
        return StructuredOutputsParams(grammar=output_format.calls_grammar(tools, required=True))
    if not tools.may_call or wanted is None:
        if not tools.is_enforced:
            return wanted
        return StructuredOutputsParams(grammar=output_format.calls_grammar(tools, required=False))
    schema = {"type": "object"} if wanted.json_object else wanted.json
    if schema is None:
        raise InvalidRequestError(
            "structured_outputs can be combined with tools only if it asks for JSON; send tool_choice "
            '"none" or "required".',
            param="structured_outputs",
        )
    calls = re.sub(r"(?m)^start:", "calls_alone:", output_format.calls_grammar(tools, required=True))
    answer = f"answer_alone: %json {schema_text(parsed_json(schema, 'json'), wanted)}"
    return StructuredOutputsParams(grammar=f"start: calls_alone | answer_alone\n{answer}\n{calls}")


class AnswerReader:
    """Reads one answer as it comes."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._parser = conversation.make_parser() if conversation.make_parser else None
        self._num_calls = 0
        self._has_content = False

    @property
    def has_content_or_calls(self) -> bool:
        """Whether the answer holds more than reasoning so far."""
        return self._has_content or self._num_calls > 0

    def read(self, output: CompletionOutput) -> list[Event]:
        """What an output's new text means, its last one's the rest included.

        Args:
            output: of a stream of deltas, or of one final output.
        """
        if self._parser is None:
            return [Content(output.text)] if output.text else []
        events = self._parser.feed(output.text) if output.text else []
        if output.finish_reason is not None:
            events = events + self._parser.finish(output.finish_reason == "length")
        return list(self._wanted(events))

    def finish_reason(self, output: CompletionOutput) -> str:
        """Why the answer has ended, in OpenAI's words: with calls that the model chose to make
        ``"tool_calls"``; with one that the request named ``"stop"``."""
        reason = output.finish_reason or ""
        if self._num_calls and reason == "stop" and not self._conversation.tools.named:
            return "tool_calls"
        return reason

    def _wanted(self, events: Iterable[Event]) -> Iterable[Event]:
        for event in events:
            if isinstance(event, Reasoning) and not self._conversation.include_reasoning:
                continue
            if isinstance(event, ToolCallStart):
                self._num_calls += 1
            elif isinstance(event, Content):
                self._has_content = True
            yield event


def read_answer(conversation: Conversation, output: CompletionOutput) -> tuple[ParsedMessage, str]:
    """A choice's final output as the message, and the reason of its end, that a stream of it adds up to."""
    reader = conversation.make_reader()
    message = collect(reader.read(output))
    return message, reader.finish_reason(output)
