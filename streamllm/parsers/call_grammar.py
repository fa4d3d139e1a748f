"""Grammars under which a model calls tools, in llguidance's Lark
(https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamllm.engine.constraint import quoted, schema_text
from streamllm.errors import InvalidRequestError
from streamllm.parsers.tools import Tool
from streamllm.structured_outputs import StructuredOutputsParams

_JSON = StructuredOutputsParams(json_object=True)
_PLAIN_NAME = re.compile(r"[A-Za-z_][\w.\-]*")


@dataclass(frozen=True, slots=True)
class CallRules:
    """What a request asks of the model's calls.

    Attributes:
        tools: those that may be called.
        required: the text is at least one call, and nothing else. Otherwise it is free, and only what begins
            as a call must go on as one.
        parallel: several calls may be made.
        special_token_ids: the ids of special tokens by their text. Other tokens are plain text to a grammar.
        chat_template: the model's, for formats that come in several forms.
    """

    tools: Sequence[Tool]
    required: bool = True
    parallel: bool = True
    special_token_ids: Mapping[str, int] = field(default_factory=dict)
    chat_template: str = ""

    def literal(self, text: str) -> str:
        """Lark for just this text, special tokens by their ids; nothing for no text."""
        ids = self.special_token_ids
        if not ids:
            return quoted(text)
        parts = re.split(f"({'|'.join(map(re.escape, ids))})", text)
        return " ".join(f"<[{ids[part]}]>" if part in ids else quoted(part) for part in parts if part)


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a format writes calls: ``opening call (separator call)* closing``.

    Attributes:
        before: what a tool's call begins with, up to its arguments.
        after: what ends a call.
        trigger: each ``opening`` (or call, if there is no opening) begins with it, and nothing else does.
            Empty: calls come at the text's very beginning or not at all.
        marks: what else free text must not hold, since the parser would read a call there.
        arguments: Lark for a tool's arguments, and the rules that it uses, their names beginning with the
            prefix given; by default JSON by the tool's schema.
    """

    before: Callable[[Tool], str]
    after: str = ""
    opening: str = ""
    separator: str = ""
    closing: str = ""
    trigger: str = ""
    marks: tuple[str, ...] = ()
    arguments: Callable[[Tool, str], tuple[str, list[str]]] | None = None


def calls_grammar(rules: CallRules, form: CallForm, *, not_a_call: str = "") -> str:
    """The grammar for calls of one form.

    Args:
        rules: what the request asks for.
        form: how the calls are written.
        not_a_call: for forms without a trigger: a character class for the first character of free text.

    Raises:
        InvalidRequestError: a tool's parameters cannot be enforced.
    """
    cut = form.trigger if not rules.required else ""
    lines = []
    for index, tool in enumerate(rules.tools):
        make = form.arguments or _json_arguments
        arguments, more = make(tool, f"arguments_{index}")
        before = form.before(tool) if form.opening else form.before(tool).removeprefix(cut)
        items = (rules.literal(before), arguments, rules.literal(form.after))
        lines += [f"call_{index}: {_sequence(*items)}", *more]
    lines.append(f"call: {' | '.join(f'call_{index}' for index in range(len(rules.tools)))}")
    separated = f"({_sequence(rules.literal(form.separator), 'call')})*" if rules.parallel else ""
    if not rules.required and not form.opening and form.trigger:
        separated = ""
    opening = rules.literal(form.opening.removeprefix(cut))
    lines.append(f"calls: {_sequence(opening, 'call', separated, rules.literal(form.closing))}")
    return "\n".join([*_start(rules, form, not_a_call), *lines])


def _start(rules: CallRules, form: CallForm, not_a_call: str) -> list[str]:
    if rules.required:
        return ["start: calls"]
    excluded = [mark for mark in form.marks if mark != form.trigger or mark in rules.special_token_ids]
    if not form.trigger:
        return ["start: calls | FREE?", f"FREE: {free_text(excluded, not_a_call)}"]
    again = "*" if rules.parallel else "?"
    lead = text_before(form.trigger, "lead", rules, excluded)
    return [f"start: (lead calls){again} TEXT?", *lead, f"TEXT: {free_text(excluded)}"]


def text_before(mark: str, name: str, rules: CallRules, excluded: Sequence[str] = ()) -> list[str]:
    """Lark for the rule ``name``: any text, and the mark that ends it. Special tokens are no text."""
    if mark in rules.special_token_ids:
        terminal = f"TEXT_OF_{name.upper()}"
        return [f"{name}: {terminal}? {rules.literal(mark)}", f"{terminal}: {free_text(excluded)}"]
    return [rf"{name}[lazy]: ({free_text(excluded)})? {quoted(mark)}"]


def free_text(excluded: Sequence[str] = (), first: str = "") -> str:
    """A Lark terminal for text that is not empty and holds none of ``excluded``; ``first`` is a character
    class for its first character."""
    text = rf"/{first}(.|\n){'*' if first else '+'}/"
    if not excluded:
        return text
    return rf"{text} & ~/(.|\n)*({'|'.join(quoted(mark)[1:-1] for mark in excluded)})(.|\n)*/"


def _sequence(*items: str) -> str:
    return " ".join(filter(None, items))


def _json_arguments(tool: Tool, prefix: str) -> tuple[str, list[str]]:
    return json_rule(object_schema(tool), tool), []


def json_rule(schema: Any, tool: Tool) -> str:
    """Lark for JSON that follows a schema, a part of a tool's parameters.

    Raises:
        InvalidRequestError: it cannot be enforced.
    """
    try:
        return f"%json {schema_text(schema, _JSON)}"
    except InvalidRequestError as error:
        raise unenforceable(tool, error.message.partition(": ")[2].rstrip(".")) from None


def object_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object even if the schema does not say so.

    Raises:
        InvalidRequestError: the schema says that they are something else.
    """
    schema = tool.parameters
    if schema is None:
        return {"type": "object"}
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise unenforceable(tool, 'their type must be "object"')
    return {"type": "object", **schema}


def check_plain_name(tool: Tool) -> str:
    """A tool's name, for formats that write it without quotes.

    Raises:
        InvalidRequestError: it has characters that would have to be quoted.
    """
    if not _PLAIN_NAME.fullmatch(tool.name):
        raise InvalidRequestError(
            f"tools: {tool.name[:100]!r} cannot be called in this model's format; a function's name must be "
            "letters, digits, _, - and dots, a letter or _ first.",
            param="tools",
        )
    return tool.name


def unenforceable(tool: Tool, reason: str) -> InvalidRequestError:
    """The error for parameters that no grammar can be made of in a model's format."""
    return InvalidRequestError(
        f"tools: the parameters of {tool.name[:100]} cannot be enforced in this model's format: {reason}.",
        param="tools",
    )
