"""What a request's text must look like (``vllm.sampling_params.StructuredOutputsParams``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from streamllm.checks import check_flag, check_integer, check_strings, show_value
from streamllm.errors import InvalidRequestError

MAX_CHOICES = 10_000
MAX_CHOICE_LENGTH = 16_384

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
FLAGS = ("disable_any_whitespace", "disable_additional_properties", "disable_fallback")
KINDS = {str: "a string", dict: "an object", bool: "a boolean"}


@dataclass(frozen=True, slots=True)
class Thinking:
    """What a model may write before its answer. What ``structured_outputs`` asks for begins behind it.

    Attributes:
        rules: a grammar for it, in llguidance's Lark notation with a rule ``before``.
        is_limited: the grammar matters even where the answer is free.
    """

    rules: str
    is_limited: bool = False

    @classmethod
    def between_tokens(
        cls, start_token_id: int | None, end_token_id: int, budget: int | None = None
    ) -> Thinking:
        """Any text between two tokens.

        Args:
            start_token_id: the token with which the model may begin to think; ``None`` where the prompt ends
                with it already, so that the output always begins with thinking.
            end_token_id: the token that ends it.
            budget: tokens between the two at most, after which the end is forced; ``None`` for no limit.

        Raises:
            InvalidRequestError: ``budget`` is not a number of tokens.
        """
        limit, thoughts = "", "thoughts "
        if budget is not None:
            budget = check_integer("thinking_token_budget", budget, 0, 2**31 - 1)
            limit, thoughts = f"[max_tokens={budget}]", "thoughts " if budget else ""
        before = f"{thoughts}<[{end_token_id}]>"
        if start_token_id is not None:
            before = f"(<[{start_token_id}]> {before})?"
        rules = [f"before: {before}"]
        if thoughts:
            rules.append(rf"thoughts{limit}: /(.|\n)*/")
        return cls("\n".join(rules), is_limited=budget is not None)


@dataclass(slots=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one constraint, and how to read it.

    The text always satisfies the constraint as a whole, unless ``max_tokens`` or a stop string cuts it off: a
    constraint that cannot be enforced is refused, and so is a schema with a keyword that is not enforced.

    Attributes:
        json: a JSON schema, as an object or as its text. Objects may have other properties than those listed
            unless ``additionalProperties`` forbids it, and they come in the schema's order.
        regex: a regular expression that the whole text matches (Rust's ``regex`` syntax: no look-around, no
            back-references).
        choice: the text is one of these strings.
        grammar: a context-free grammar, in llguidance's Lark notation (with a rule ``start``) or in GBNF,
            that is EBNF with ``::=`` (with a rule ``root``).
        json_object: ``True``: any JSON object.
        structural_tag: free text in which triggers begin parts that follow a schema: ``{"triggers": [...],
            "structures": [{"begin", "schema", "end"}]}``.
        disable_any_whitespace: JSON without whitespace between its parts.
        whitespace_pattern: a regular expression for the whitespace between the parts of JSON, which may
            always be left out; the default is up to 20 of space, tab, CR and LF.
        disable_additional_properties: must be false: say ``"additionalProperties": false`` in the schema.
        disable_fallback: without effect; there is nothing to fall back to.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    disable_additional_properties: bool = False
    disable_fallback: bool = False

    def __post_init__(self) -> None:
        self._check_number_given()
        for name, kinds in (
            ("json", (str, dict, bool)),
            ("regex", (str,)),
            ("grammar", (str,)),
            ("json_object", (bool,)),
            ("structural_tag", (str, dict)),
            ("whitespace_pattern", (str,)),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                allowed = " or ".join(KINDS[kind] for kind in kinds)
                raise _invalid(f"{name} must be {allowed}, got {show_value(value)}.")
        self._check_choice()
        for name in FLAGS:
            setattr(self, name, self._check_flag(name))
        if self.disable_additional_properties:
            raise _invalid(
                "disable_additional_properties is not supported; say "
                '"additionalProperties": false in the schema.'
            )
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise _invalid("disable_any_whitespace and whitespace_pattern exclude each other.")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> StructuredOutputsParams:
        """The parameters in a decoded JSON object.

        Raises:
            InvalidRequestError: it has other fields, or their values are wrong.
        """
        known = {field.name for field in fields(cls)}
        for name, value in values.items():
            if name not in known and value is not None:
                raise _invalid(f"{name[:100]} is not known; there are {', '.join(sorted(known))}.")
        return cls(**{name: value for name, value in values.items() if name in known and value is not None})

    def _check_number_given(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            got = f"got {' and '.join(given)}" if given else "got none"
            raise _invalid(f"exactly one of {', '.join(CONSTRAINTS)} must be given; {got}.")

    def _check_choice(self) -> None:
        if self.choice is None:
            return
        try:
            self.choice = check_strings(
                "choice", self.choice, max_count=MAX_CHOICES, max_length=MAX_CHOICE_LENGTH
            )
        except InvalidRequestError as error:
            raise _invalid(error.message) from None
        if not self.choice:
            raise _invalid("choice is empty: no text could be generated.")

    def _check_flag(self, name: str) -> bool:
        try:
            return check_flag(name, getattr(self, name))
        except InvalidRequestError as error:
            raise _invalid(error.message) from None


def _invalid(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured_outputs: {reason}", param="structured_outputs")
