"""A request's leading text as a chain of hashes, read from its body without a tokenizer or chat template.

Equal prompts begin with equal text: the text here is what decides a prompt, in the order in which templates
put it (adapter and salt, tools, system prompt, messages), so that a conversation's next turn extends it. It
need not be the prompt itself. A wrong guess costs a cache miss, never a wrong answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import msgspec

COMPLETION_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"},
)
"""Routes whose requests compute a prompt that the prefix cache may hold."""

CHUNK_BYTES = 256
"""Of the first chunks, some 64 tokens."""

GROWTH = 8
"""Beyond ``GROWTH * CHUNK_BYTES`` a chunk is this fraction of what lies before it: a prefix is known to an
eighth of its length, and a long context needs few hashes."""

MAX_HASHES = 64
HASH_BYTES = 8


def _boundaries() -> tuple[int, ...]:
    ends = [CHUNK_BYTES]
    while len(ends) < MAX_HASHES:
        ends.append(ends[-1] + max(CHUNK_BYTES, ends[-1] // GROWTH))
    return tuple(ends)


BOUNDARIES = _boundaries()
"""Bytes of text that each hash of a chain covers; the last covers 1.5 MB."""


class _Prompt(msgspec.Struct):
    """The fields of all completion routes that decide how a prompt begins."""

    model: Any = None
    cache_salt: Any = None
    tools: Any = None
    system: Any = None
    instructions: Any = None
    messages: Any = None
    prompt: Any = None
    input: Any = None
    previous_response_id: Any = None


_decoder = msgspec.json.Decoder(_Prompt)


def prefix_hashes(body: bytes | Mapping[str, Any], path: str | None = None) -> list[int]:
    """The hashes of a request's prefixes, shortest first; each covers all text before it.

    Args:
        body: of the request, as JSON or decoded.
        path: of the request, if known, without the prefix of the deployment: ``/v1/chat/completions``.

    Returns:
        At most ``MAX_HASHES`` numbers of 64 bits, the same in every process; none for what is not a
        completion, is not valid, is shorter than a chunk, or continues a stored response, whose text is not
        in the body. Never raises: a wrong body is for the replica to refuse.
    """
    if path is not None and path not in COMPLETION_PATHS:
        return []
    try:
        prompt = msgspec.convert(body, _Prompt) if isinstance(body, Mapping) else _decoder.decode(body)
        text = b"".join(_prompt_text(prompt))
        seed = msgspec.json.encode((prompt.model, prompt.cache_salt))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError):
        return []
    return _chain(seed, text)


def _chain(seed: bytes, text: bytes) -> list[int]:
    """The hash of ``seed`` and of ``text`` up to each boundary within it."""
    # The key keeps the seed apart from the text; it takes 64 bytes.
    running = blake2b(digest_size=HASH_BYTES, key=blake2b(seed, digest_size=64).digest())
    hashes = []
    start = 0
    for end in BOUNDARIES:
        if end > len(text):
            break
        running.update(text[start:end])
        hashes.append(int.from_bytes(running.copy().digest(), "little"))
        start = end
    return hashes


def _prompt_text(prompt: _Prompt) -> Iterator[bytes]:
    """The pieces of the text; none if this is no prompt.

    Raises:
        TypeError, ValueError, OverflowError: a field has a wrong type.
    """
    if prompt.previous_response_id is not None:
        return
    if prompt.prompt is not None:
        yield _completion_text(prompt.prompt)
        return
    if prompt.messages is None and prompt.input is None:
        return
    if prompt.tools:
        yield _canonical(prompt.tools)
    for system in (prompt.system, prompt.instructions):
        if system is not None:
            yield _message_text({"role": "system", "content": system})
    messages = prompt.input if prompt.messages is None else prompt.messages
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    for message in messages:
        yield _message_text(message)


def _completion_text(prompt: Any) -> bytes:
    """A completion's prompt; of several, the first."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "surrogatepass")
    return array("I", prompt).tobytes()


def _message_text(message: Any) -> bytes:
    """One message: role, content and whatever else it has, however the client wrote it."""
    if not isinstance(message, Mapping):
        raise TypeError("a message must be an object")
    role, content = message.get("role"), message.get("content")
    rest = {
        name: value
        for name, value in message.items()
        if name != "role" and name != "content" and value is not None
    }
    # As str(): a wrong type is for the replica to refuse.
    text = f"{role}\0{_content_text(content)}\0"
    return text.encode("utf-8", "surrogatepass") + (_canonical(rest) if rest else b"") + b"\n"


def _content_text(content: Any) -> str:
    """Text as it is; a list of parts is the text of its parts, and what is no text as JSON."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return "" if content is None else _canonical(content).decode()
    return "".join(_part_text(part) for part in content)


def _part_text(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else _canonical(part).decode()


def _canonical(value: Any) -> bytes:
    """JSON that does not depend on the order in which a client writes the keys."""
    return msgspec.json.encode(value, order="sorted")
