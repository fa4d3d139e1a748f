"""Which bytes of a replica's stream are passed on, however they arrive."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamllm.deploy.stream_relay import EventRelay, farewell, previous_response

ROLE = b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
CREATED = b'event: response.created\ndata: {"type":"response.created"}\n\n'
IN_PROGRESS = b'event: response.in_progress\ndata: {"type":"response.in_progress"}\n\n'
DELTA = b'event: response.output_text.delta\ndata: {"delta":"a"}\n\n'
START = b'event: message_start\ndata: {"type":"message_start"}\n\n'
BLOCK = b'event: content_block_start\ndata: {"type":"content_block_start"}\n\n'


@pytest.mark.parametrize(
    ("opening", "first"),
    [(ROLE, TOKEN), (CREATED + IN_PROGRESS, DELTA), (START, BLOCK), (b"", b'data: {"error":{}}\n\n')],
)
def test_nothing_passes_before_something_is_said(opening: bytes, first: bytes) -> None:
    relay = EventRelay()
    assert relay.feed(opening) == b""
    assert not relay.has_begun
    assert relay.feed(first[:-1]) == b""
    assert relay.feed(first[-1:]) == opening + first
    assert relay.has_begun


def test_several_choices_open_before_one_speaks() -> None:
    relay = EventRelay()
    second = ROLE.replace(b'"index":0', b'"index":1')
    assert relay.feed(ROLE + second) == b""
    assert relay.feed(TOKEN) == ROLE + second + TOKEN


@given(
    st.lists(st.integers(1, 40), max_size=60), st.lists(st.sampled_from([TOKEN, DELTA, BLOCK]), max_size=6)
)
def test_only_whole_events_pass_and_all_of_them(sizes: list[int], events: list[bytes]) -> None:
    stream = ROLE + b"".join(events)
    relay, passed, start = EventRelay(), b"", 0
    for size in [*sizes, len(stream)]:
        passed += relay.feed(stream[start : start + size])
        start += size
        assert passed == b"" or passed.endswith(b"\n\n")
        assert stream.startswith(passed)
    assert passed + relay.rest() == stream
    assert relay.num_events == len(events) + 1


def test_a_stream_without_an_end_of_event_is_passed_on_at_its_end() -> None:
    relay = EventRelay()
    assert relay.feed(TOKEN + b": odd") == TOKEN
    assert relay.rest() == b": odd"


def test_each_api_gets_its_own_farewell() -> None:
    chat = farewell("/v1/chat/completions", "gone", 5)
    first, done, rest = chat.split(b"\n\n")
    assert json.loads(first.removeprefix(b"data: "))["error"]["message"] == "gone"
    assert (done, rest) == (b"data: [DONE]", b"")
    name, data = farewell("/v1/responses", "gone", 5).strip().split(b"\n")
    assert name == b"event: error"
    assert json.loads(data.removeprefix(b"data: "))["sequence_number"] == 5
    assert farewell("/v1/messages", "gone", 5).startswith(b"event: error\ndata: ")


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b'{"input": "x", "previous_response_id": "resp_1"}', "resp_1"),
        (b'{"input": "\\"previous_response_id\\""}', None),
        (b'{"previous_response_id": 3}', None),
        (b'{"previous_response_id"', None),
        (b'["previous_response_id"]', None),
    ],
)
def test_the_response_that_is_continued(body: bytes, found: str | None) -> None:
    assert previous_response(body) == found
