"""A replica's stream of events as the gateway passes it on.

What comes before the first token is held back: until then nothing is said that another replica could not say
too, so that a request whose replica dies can be asked again elsewhere. Afterwards only whole events pass, so
that the one that says why a stream ends is never the end of a broken one.
"""

from __future__ import annotations

import re

import orjson

from streamllm.server.errors import error_body
from streamllm.server.sse import DONE, frame, named_frame

END_OF_EVENT = b"\n\n"

_OPENING = re.compile(
    rb"event: (response\.(created|queued|in_progress)|message_start|ping)\n"
    rb'|data: .*"role":"assistant","content":""'
)
"""Beginnings of events that say nothing yet: of OpenAI's Responses, Anthropic's Messages, and chat chunks."""

MOST_HELD_BYTES = 1 << 20
"""Beyond which an answer is passed on whatever it begins with."""


class EventRelay:
    """Which bytes of a stream may be passed on now.

    Attributes:
        num_events: passed on so far.
    """

    def __init__(self) -> None:
        self.num_events = 0
        self._held = bytearray()
        self._has_begun = False

    @property
    def has_begun(self) -> bool:
        """Whether something has been passed on."""
        return self._has_begun

    def feed(self, data: bytes) -> bytes:
        """More of the stream -> what may be passed on."""
        if self._has_begun and not self._held and data.endswith(END_OF_EVENT):
            return self._passed(data)
        self._held += data
        end = self._held.rfind(END_OF_EVENT) + len(END_OF_EVENT)
        if end < len(END_OF_EVENT) or not (self._has_begun or self._says_something(end)):
            return b""
        events = bytes(self._held[:end])
        del self._held[:end]
        return self._passed(events)

    def rest(self) -> bytes:
        """What is left at the stream's proper end."""
        data = bytes(self._held)
        self._held.clear()
        return self._passed(data) if data else b""

    def _passed(self, data: bytes) -> bytes:
        self._has_begun = True
        self.num_events += data.count(END_OF_EVENT)
        return data

    def _says_something(self, end: int) -> bool:
        if end > MOST_HELD_BYTES:
            return True
        events = bytes(self._held[:end]).split(END_OF_EVENT)[:-1]
        return any(not _OPENING.match(event) for event in events)


def farewell(path: str, message: str, num_events: int) -> bytes:
    """The last events of a stream whose replica is gone, in the form of the API that was asked.

    Args:
        path: of the request.
        num_events: that have been passed on.
    """
    body = error_body(message, status=503)
    if path.startswith("/v1/messages"):
        return named_frame("error", body)
    if path.startswith("/v1/responses"):
        event = {"type": "error", "code": "server_error", "message": message, "param": None}
        return named_frame("error", {**event, "sequence_number": num_events})
    return frame(body) + DONE


def previous_response(body: bytes) -> str | None:
    """The stored response that a request to the Responses API continues."""
    if b'"previous_response_id"' not in body:
        return None
    try:
        found = orjson.loads(body)
    except ValueError:
        return None  # for the replica to refuse
    response_id = found.get("previous_response_id") if isinstance(found, dict) else None
    return response_id if isinstance(response_id, str) else None
