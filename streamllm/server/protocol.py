"""Request bodies: their fields, and how a wrong one is reported.

Every field of OpenAI's and vLLM's requests stands here once: it is honoured (a field of a struct below), not
supported yet (``NOT_SUPPORTED_YET``: refused unless it has a neutral value), or without effect (``IGNORED``).
A field that stands nowhere is ignored and logged once. Ranges are :class:`SamplingParams`' business.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import msgspec

from streamllm.errors import InvalidRequestError

logger = logging.getLogger("streamllm.server")

MAX_PROMPTS = 2048
"""Prompts in one request for completions or embeddings."""

NOT_SUPPORTED_YET: dict[str, tuple[Any, ...]] = {
    # field -> values that change nothing, besides null
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "ec_transfer_params": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "logprob_token_ids": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (),
    "stream_interval": (1,),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncation_side": ("left",),
    "verbosity": ("medium",),
    "watermarking": (False,),
    "web_search_options": (),
}

IGNORED = frozenset(
    {
        "guided_decoding_backend",
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "user",
    }
)


class StreamOptions(msgspec.Struct, kw_only=True):
    """``include_usage``: one more chunk with the usage at the end. ``continuous_usage_stats`` (vLLM's): the
    usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ApiRequest(msgspec.Struct, kw_only=True):
    """A body that somebody else's API defines.

    Attributes:
        REFUSED: known fields that are not honoured -> the values that change nothing, besides null.
        IGNORED: fields that change nothing here.
    """

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    IGNORED: ClassVar[frozenset[str]] = frozenset()


class GenerationRequest(ApiRequest, kw_only=True):
    """What both routes honour. ``None`` stands for a field left out: the model's sampling defaults apply,
    then OpenAI's.

    ``priority`` (lower is served first) decides under ``--scheduling-policy priority``, and is without effect
    under ``fcfs``. Only requests with the same ``cache_salt`` share cached blocks. With ``use_beam_search``
    the choices are the best hypotheses of ``n`` beams (:mod:`streamllm.server.beams`).

    ``logits_processors`` names processors that the server knows (:mod:`streamllm.logits_processors`), which
    are told ``vllm_xargs``.

    vLLM's ways to look at tokens: ``return_token_ids`` adds the ids of prompt and answer,
    ``return_tokens_as_token_ids`` names each token in the logprobs ``token_id:N``.
    """

    REFUSED = NOT_SUPPORTED_YET
    IGNORED = IGNORED

    model: str | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    logits_processors: list[str] | None = None
    vllm_xargs: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of ``POST /v1/chat/completions``.

    ``reasoning_effort`` is told to the chat template, which decides what it does with it; ``"none"`` also
    sets ``enable_thinking`` to false there, any other value to true. ``thinking_token_budget`` (-1 for none)
    ends the reasoning after so many tokens; ``include_reasoning: false`` leaves it out of the answer.
    """

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of ``POST /v1/completions``; ``prompt`` is text, token ids, or a list of either."""

    prompt: str | list[Any]
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


EMBEDDING_NOT_SUPPORTED_YET: dict[str, tuple[Any, ...]] = {
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "messages": (),
    "mm_processor_kwargs": ({},),
    "truncation_side": ("left",),
}
"""As ``NOT_SUPPORTED_YET``, of ``/v1/embeddings``."""

EMBEDDING_IGNORED = frozenset({"request_id", "user"})


class EmbeddingRequest(ApiRequest, kw_only=True):
    """Body of ``POST /v1/embeddings``; ``input`` is text, token ids, or a list of either.

    An embedding is the hidden state of the input's last token, or with ``pooling: "mean"`` the mean over all
    its tokens, of which the first ``dimensions`` values are kept, scaled to length 1 unless ``normalize``
    (vLLM's newer name: ``use_activation``) is false. ``encoding_format`` is ``"float"``, or ``"base64"`` for
    little-endian float32.
    """

    REFUSED = EMBEDDING_NOT_SUPPORTED_YET
    IGNORED = EMBEDDING_IGNORED

    input: str | list[Any]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    pooling: str | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None


Body = TypeVar("Body", bound=msgspec.Struct)


def refused_fields(body_type: type[msgspec.Struct]) -> Mapping[str, tuple[Any, ...]]:
    """Known fields that a route cannot honour -> the values that change nothing, besides null."""
    return body_type.REFUSED if issubclass(body_type, ApiRequest) else {}


def field_support(body_type: type[msgspec.Struct]) -> dict[str, str]:
    """Every known field of a route's body -> ``"honoured"``, ``"not supported yet"`` or ``"ignored"``."""
    ignored = body_type.IGNORED if issubclass(body_type, ApiRequest) else ()
    table = dict.fromkeys(refused_fields(body_type), "not supported yet") | dict.fromkeys(ignored, "ignored")
    return table | dict.fromkeys(body_type.__struct_fields__, "honoured")


def decode_body(body: bytes, body_type: type[Body]) -> Body:
    """The request in a body.

    Of a key that stands twice the last value counts, as with OpenAI.

    Raises:
        InvalidRequestError: the body is not a JSON object, a field has the wrong type, is missing, or is not
            supported yet.
    """
    values = _decode_json(body)
    if not isinstance(values, dict):
        raise InvalidRequestError(f"The body must be a JSON object, got {describe_kind(values)}.")
    _refuse_unsupported(values, body_type)
    try:
        return msgspec.convert(values, body_type)
    except msgspec.ValidationError as error:
        raise _wrong_type(error) from None


# -- values that cannot be honoured ------------------------------------------------------------------------

_reported_fields: set[str] = set()


def _refuse_unsupported(values: dict[str, Any], body_type: type[msgspec.Struct]) -> None:
    support = field_support(body_type)
    for name, value in values.items():
        status = support.get(name)
        if status is None:
            _report_unknown(name)
        elif status == "not supported yet":
            neutral = refused_fields(body_type)[name]
            if not is_neutral(value, neutral):
                raise InvalidRequestError(f"{name} is not supported yet; {leave_out(neutral)}.", param=name)


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a field's value asks for nothing: null, or one of ``neutral`` (in JSON, ``false`` is not 0)."""
    return value is None or any(
        isinstance(value, bool) == isinstance(accepted, bool) and value == accepted for accepted in neutral
    )


def leave_out(neutral: tuple[Any, ...]) -> str:
    """What to do about a field that cannot be honoured: ``"leave it out or send 0"``."""
    values = " or ".join(msgspec.json.encode(value).decode() for value in neutral)
    return f"leave it out or send {values}" if values else "leave it out"


def _report_unknown(name: str) -> None:
    # The bound keeps clients that invent names from filling memory and logs.
    if name not in _reported_fields and len(_reported_fields) < 200:
        _reported_fields.add(name)
        logger.warning("ignoring the unknown request field %.100r", name)


# -- bodies that are not JSON ------------------------------------------------------------------------------

_LONE_SURROGATE = re.compile(rb"\\u[dD](?:[89abAB]..(?!\\u[dD][c-fC-F])|[c-fC-F]..)")


def _decode_json(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise InvalidRequestError("The body is nested too deeply.") from None
    except msgspec.ValidationError:
        raise _number_out_of_range(body) from None
    except msgspec.DecodeError as error:
        raise _malformed(body, str(error)) from None


def _number_out_of_range(body: bytes) -> InvalidRequestError:
    """msgspec does not say which field holds the number, so each is decoded alone."""
    for name, raw in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items():
        try:
            msgspec.json.decode(raw)
        except msgspec.ValidationError:
            return InvalidRequestError(
                f"{name[:100]} holds a number that is out of range; it must be finite.", param=name[:100]
            )
    return InvalidRequestError("The body holds a number that is out of range; it must be finite.")


def _malformed(body: bytes, reason: str) -> InvalidRequestError:
    if not body.strip():
        return InvalidRequestError("The body is empty; a JSON object is expected.")
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return InvalidRequestError(f"The body is not valid UTF-8 (byte {error.start}).")
    if surrogate := _LONE_SURROGATE.search(body):
        return InvalidRequestError(
            f"The body is not valid JSON: lone surrogate in a string (byte {surrogate.start()})."
        )
    if match := re.search(r"JSON is malformed: (.*) \(byte (\d+)\)", reason):
        # msgspec has already stepped over the first of trailing characters.
        offset = int(match[2]) - (match[1] == "trailing characters")
        return InvalidRequestError(f"The body is not valid JSON: {match[1]} (byte {offset}).")
    return InvalidRequestError(f"The body is not complete JSON: it ends at byte {len(body)}.")


# -- wrong types in JSON's words ---------------------------------------------------------------------------

_KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


def describe_kind(value: Any) -> str:
    """A JSON value's type for a message: ``"a string"``, ``"null"``."""
    if isinstance(value, bool):
        return "true" if value else "false"
    for kind, name in ((str, "a string"), (int, "an integer"), (float, "a number"), (list, "a list")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "an object"


def wrong_value(place: str, reason: str) -> InvalidRequestError:
    """The error about a value in a body.

    Args:
        place: its path, such as ``tools[1].function.name``.
        reason: the rest of the sentence, without its full stop.
    """
    return InvalidRequestError(f"{place} {reason}.", param=place)


def _wrong_type(error: msgspec.ValidationError) -> InvalidRequestError:
    text = str(error)
    if match := re.match(r"Object missing required field `(\w+)`", text):
        return InvalidRequestError(f"{match[1]} is required.", param=match[1])
    match = re.match(r"Expected `(.+?)`, got `(.+?)`(?: - at `\$\.?(.+)`)?$", text)
    if match is None:
        return InvalidRequestError(f"The body is not a valid request: {text}.")
    allowed = [_KINDS.get(kind, kind) for kind in match[1].split(" | ") if kind != "null"]
    got = {"bool": "a boolean", "float": "a decimal number"}.get(match[2], _KINDS.get(match[2], match[2]))
    path = (match[3] or "body").replace("[...]", "")
    return InvalidRequestError(f"{path} must be {' or '.join(allowed)}, got {got}.", param=path)
