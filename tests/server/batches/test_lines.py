"""Reading and checking the lines of a file."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
from batch_client import CHAT, chat_line, jsonl
from hypothesis import given
from hypothesis import strategies as st

from streamllm.server.batches import lines as lines_module
from streamllm.server.batches.lines import FileCheck, LineReader, duplicates, read_line


def read_all(path, max_body_bytes=2**20):
    reader = LineReader(path, max_body_bytes)
    found = []
    while piece := reader.read():
        found += piece
    reader.close()
    return found


def checked(path, endpoint=CHAT) -> FileCheck:
    check = FileCheck(path, endpoint, 2**20)
    while check.advance():
        pass
    check.close()
    return check


def test_lines_are_numbered_as_in_an_editor(tmp_path):
    path = tmp_path / "in"
    path.write_bytes(b"\xef\xbb\xbf" + b"a\r\n\n  \nb\n" + b"c" * 70_000 + b"\nd")
    found = read_all(path, max_body_bytes=50_000)
    assert [(line.number, line.data) for line in found] == [
        (1, b"a\r\n"),
        (4, b"b\n"),
        (5, None),
        (6, b"d"),
    ]


def test_a_body_is_what_stands_in_the_line():
    body = '{ "a" : "\\u00fc", "b":[1.50, {}] }'
    data = (
        '{"custom_id": "1", "body":  ' + body + ' ,"x": 1, "url": "/v1/messages", "method":"POST"}\n'
    ).encode()
    request = read_line(lines_module.InputLine(3, data))
    assert (request.number, request.custom_id, request.url) == (3, "1", "/v1/messages")
    assert request.body == body.encode()


@given(st.lists(st.integers(0, 20), max_size=40))
def test_duplicates_are_what_a_dictionary_finds(digests):
    numbers = [2 * index + 1 for index in range(len(digests))]
    first, expected = {}, []
    for number, digest in zip(numbers, digests, strict=True):
        if digest in first:
            expected.append((first[digest], number))
        first.setdefault(digest, number)
    found = duplicates(numbers, np.array(digests, dtype=np.uint64))
    assert found == expected


def test_a_check_in_little_memory(tmp_path):
    path = tmp_path / "in"
    text = "x" * 500
    with path.open("wb") as file:
        for begin in range(0, 12_000, 1000):
            file.write(jsonl([chat_line(str(n), user=text) for n in range(begin, begin + 1000)]))
        file.write(jsonl([chat_line("17")]))
    assert path.stat().st_size > 6e6
    tracemalloc.start()
    try:
        check = checked(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert check.num_lines == 12_001 and check.num_errors == 1
    assert (check.errors[0].line, check.errors[0].code) == (12_001, "duplicate_custom_id")
    assert "line 18" in str(check.errors[0]) and check.duplicates == {12_001}
    assert peak < 4e6, peak


def test_too_many_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(lines_module, "MAX_LINES", 200)
    path = tmp_path / "in"
    path.write_bytes(jsonl([chat_line(str(n)) for n in range(200)]))
    assert not checked(path).errors
    path.write_bytes(jsonl([chat_line(str(n)) for n in range(500)]))
    check = checked(path)
    assert [error.code for error in check.errors] == ["too_many_lines"] and check.num_lines < 400


def test_messages_speak_of_the_line(tmp_path):
    path = tmp_path / "in"
    lone = json.dumps({**chat_line("a"), "custom_id": "\ud800"})
    line = chat_line("b")
    path.write_bytes(
        jsonl(["nonsense", lone, "[]", {**line, "body": "x"}, {**line, "url": "/v1/none"}]) + b'"\xff"\n'
    )
    messages = [str(error) for error in checked(path, None).errors]
    assert all(("The line" in text) == (index in (0, 1, 2, 5)) for index, text in enumerate(messages))
    assert messages[3] == "body must be an object, got a string."
    assert messages[4].startswith("url must be one of /v1/chat/completions, ")
    assert "UTF-8" in messages[5]
