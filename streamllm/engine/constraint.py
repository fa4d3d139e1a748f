"""From what a client asks of the text to the source of a grammar."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from streamllm.errors import InvalidRequestError
from streamllm.structured_outputs import StructuredOutputsParams, Thinking

if TYPE_CHECKING:
    from typing import TypeGuard

MAX_SOURCE_LENGTH = 262_144
"""Characters of a constraint. A schema with 10,000 enum values of 10 characters is half as long."""

MAX_EXACT_INTEGER = 2**53
"""The grammar library reads numbers as float64."""

WHITESPACE = r"[ \t\n\r]{1,20}"
"""Between the parts of JSON, where a model without a limit may go on for ever."""

DIALECTS = re.compile(r"https?://json-schema\.org/(draft-0[467]|draft/2019-09|draft/2020-12)/schema#?")


class ConstraintSource(NamedTuple):
    """A grammar before it is compiled, which also is the key under which it is cached.

    Attributes:
        kind: ``"json"``, ``"regex"``, ``"grammar"`` (Lark or GBNF) or ``"lark"`` (written here).
        text: in that notation; JSON schemas carry their options.
        thinking: what may come before it, as Lark with a rule ``before``; empty for nothing.
    """

    kind: str
    text: str
    thinking: str = ""


def constraint_source(
    params: StructuredOutputsParams | None, thinking: Thinking | None = None, *, vocab_size: int = 0
) -> ConstraintSource:
    """The grammar's source.

    Args:
        params: what the text must look like; ``None`` for any text.
        thinking: what may come before it.
        vocab_size: ids that can be sampled; needed without ``params``.

    Raises:
        InvalidRequestError: it is too long, or malformed in a way that can be seen without compiling it.
    """
    if params is None:
        # Any text, special tokens included: a model may call tools with them.
        anything = rf"start: (/(.|\n)+/ | <[0-{vocab_size - 1}]>)*"
        source = ConstraintSource("lark", anything)
    else:
        _check_length(constraint_length(params))
        source = _source(params)
    if thinking is not None:
        source = source._replace(thinking=thinking.rules)
    _check_length(len(source.text))
    if not source.text.isascii():
        try:
            source.text.encode()
        except UnicodeEncodeError:
            raise refused("it holds a lone surrogate, which no UTF-8 can hold") from None
    return source


def constraint_length(params: StructuredOutputsParams) -> int:
    """About how many characters a constraint has; quick however long it is."""
    if params.choice is not None:
        return sum(map(len, params.choice))
    value = next((v for v in (params.json, params.structural_tag, params.regex, params.grammar) if v), "")
    return len(value) if isinstance(value, str) else len(_encoded(value))


def refused(reason: str, *, status: int = 400) -> InvalidRequestError:
    """The error for a constraint that cannot be enforced."""
    return InvalidRequestError(
        f"structured_outputs cannot be enforced: {reason}.", param="structured_outputs", status=status
    )


def _source(params: StructuredOutputsParams) -> ConstraintSource:
    if params.json not in (None, False):
        return ConstraintSource("json", schema_text(parsed_json(params.json, "json"), params))
    if params.json_object:
        return ConstraintSource("json", schema_text({"type": "object"}, params))
    if params.regex is not None:
        _check_regex(params.regex)
        return ConstraintSource("regex", params.regex)
    if params.choice is not None:
        return ConstraintSource("lark", f"start: /{'|'.join(map(_literal, params.choice))}/")
    if params.grammar is not None:
        return ConstraintSource("grammar", params.grammar)
    return ConstraintSource(
        "lark", _tags_grammar(parsed_json(params.structural_tag, "structural_tag"), params)
    )


# -- JSON schemas ------------------------------------------------------------------------------------------


def parsed_json(value: Any, name: str) -> Any:
    """What a JSON text holds; an object is returned as it is."""
    if not isinstance(value, str):
        return value
    _check_length(len(value))
    try:
        return msgspec.json.decode(value)
    except RecursionError:
        raise refused(f"{name} is nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeEncodeError) as error:
        raise refused(f"{name} is not valid JSON: {error}") from None


def schema_text(schema: Any, params: StructuredOutputsParams) -> str:
    """The schema as JSON, with the options that the grammar library reads from it."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise refused("a JSON schema must be an object or true")
    if "x-guidance" in schema:
        raise refused("the schema's keyword x-guidance is not supported")
    dialect = schema.get("$schema")
    if dialect is not None and not (isinstance(dialect, str) and DIALECTS.fullmatch(dialect)):
        raise refused("the schema's $schema is none of JSON Schema's drafts 4, 6, 7, 2019-09 and 2020-12")
    options = {
        "lenient": False,
        "coerce_one_of": False,
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_flexible": not params.disable_any_whitespace,
        "whitespace_pattern": None
        if params.disable_any_whitespace
        else params.whitespace_pattern or WHITESPACE,
    }
    try:
        _check_exactness(schema)
    except RecursionError:
        raise refused("the schema is nested too deeply") from None
    return _encoded({"x-guidance": options, **schema}).decode()


def _encoded(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except RecursionError:
        raise refused("it is nested too deeply") from None
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise refused(f"it is not JSON: {error}") from None


def _check_length(length: int) -> None:
    if length > MAX_SOURCE_LENGTH:
        raise refused(f"it has {length} characters; at most {MAX_SOURCE_LENGTH} are allowed")


def _check_exactness(value: Any) -> None:
    """Refuse what the grammar library would enforce only nearly."""
    if isinstance(value, dict):
        least, properties = value.get("minProperties"), value.get("properties")
        known = len(properties) if isinstance(properties, dict) else 0
        if isinstance(least, (int, float)) and least > known + 1:
            # Keys that the schema does not list may come twice, and then count once.
            raise refused(
                f"minProperties is supported up to one more than properties lists ({known + 1} here)"
            )
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            _check_exactness(item)
    elif isinstance(value, (int, float)) and not abs(value) <= MAX_EXACT_INTEGER:
        raise refused("the schema holds a number beyond 2**53 (or NaN), which would not be kept exactly")


# -- text --------------------------------------------------------------------------------------------------


def _check_regex(regex: str) -> None:
    """What the grammar library would read in silence as something else."""
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise refused("the regex ends with a backslash")


def _literal(text: str) -> str:
    """A regular expression, between slashes, that matches just this text."""
    return "".join(
        character if character.isalnum() or ord(character) > 0xFF else f"\\x{ord(character):02X}"
        for character in text
    )


# -- structural tags ---------------------------------------------------------------------------------------


def _tags_grammar(tags: Any, params: StructuredOutputsParams) -> str:
    """Lark for free text with tags (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md):
    a lazy lexeme takes free text up to the first trigger, and what follows one must be one of its tags."""
    if not isinstance(tags, dict):
        raise refused("structural_tag must be an object")
    unknown = sorted(set(tags) - {"type", "triggers", "structures"})
    if unknown:
        raise refused(f"structural_tag's field {unknown[0][:100]} is not supported")
    triggers, structures = tags.get("triggers"), tags.get("structures")
    if not _is_text_list(triggers) or not isinstance(structures, list) or not structures:
        raise refused("structural_tag needs triggers (a list of strings) and structures (a list of objects)")
    rules = [_tag_rules(index, tag, triggers, params) for index, tag in enumerate(structures)]
    names = " | ".join(f"tag_{index}" for index in range(len(structures)))
    return "\n".join([f"start: ({names})* free", "free: TEXT", r"TEXT: /(.|\n)*/", *rules])


def _tag_rules(index: int, tag: Any, triggers: list[str], params: StructuredOutputsParams) -> str:
    place = f"structures[{index}]"
    if not isinstance(tag, dict) or set(tag) - {"begin", "schema", "end"}:
        raise refused(f"{place} must be an object with begin, schema and end")
    begin, end = tag.get("begin"), tag.get("end", "")
    if not isinstance(begin, str) or not isinstance(end, str):
        raise refused(f"{place} must have strings as begin and end")
    trigger = next((t for t in triggers if begin.startswith(t)), None)
    if trigger is None:
        raise refused(f"the begin of {place} starts with none of the triggers")
    schema = schema_text(parsed_json(tag.get("schema", {}), f"{place}.schema"), params)
    body = [quoted(begin[len(trigger) :]), f"%json {schema}", quoted(end)]
    return (
        f"trigger_{index}[lazy]: TEXT {quoted(trigger)}\n"
        f"tag_{index}: trigger_{index} {' '.join(filter(None, body))}"
    )


def quoted(text: str) -> str:
    """A Lark terminal for just this text; nothing for no text."""
    return f"/{_literal(text)}/" if text else ""


def _is_text_list(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and bool(value) and all(isinstance(t, str) and t for t in value)
