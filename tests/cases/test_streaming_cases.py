"""S: streams and the text in them; N: choices."""

from __future__ import annotations

import pytest
from case_server import CHAT, COMPLETIONS, ROUTES, forced, minimal

SCRIPTS = "ďá 漢字 😀👩‍👩‍👧 กำ é"


def test_s01_a_stop_string_never_leaks(server):
    for stop in ("DEFGHIJ", "D", "IJ t", "EFGHIJ tail"):
        body = forced("ABCDEFGHIJ tail", stop=[stop])
        expected = "ABCDEFGHIJ tail".partition(stop)[0]
        whole = server.answer(COMPLETIONS, body)["choices"][0]
        events = server.events(COMPLETIONS, body)
        assert "".join(event["choices"][0]["text"] for event in events) == whole["text"] == expected
        last = events[-1]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)


def test_s02_a_stop_that_does_not_come_delays_nothing(server):
    body = minimal(COMPLETIONS, max_tokens=20, ignore_eos=True)
    plain = server.deltas(COMPLETIONS, body)
    assert server.deltas(COMPLETIONS, body | {"stop": ["Z" * 16]}) == plain
    assert len(plain) == 20 and all(plain)
    # A beginning of the stop is held back, and given when generation ends by length.
    text = "".join(plain)
    assert "".join(server.deltas(COMPLETIONS, body | {"stop": [text[-3:] + "never"]})) == text


@pytest.mark.parametrize("path", ROUTES)
def test_s04_characters_come_whole(server, path):
    deltas = server.deltas(path, forced(SCRIPTS, path))
    assert "".join(deltas) == SCRIPTS
    assert not any("\ufffd" in delta for delta in deltas)
    for limit in range(1, 12):
        body = forced(SCRIPTS, max_tokens=limit)
        whole = server.answer(COMPLETIONS, body)["choices"][0]["text"]
        assert "".join(server.deltas(COMPLETIONS, body)) == whole
        assert "\ufffd" not in whole.removesuffix("\ufffd") and SCRIPTS.startswith(
            whole.removesuffix("\ufffd")
        )


def test_s06_every_chunk_is_complete(server):
    events = server.events(CHAT, minimal(CHAT, n=2, temperature=1, seed=1))
    for name in ("id", "created", "model", "object"):
        assert len({event[name] for event in events}) == 1
    assert events[0]["object"] == "chat.completion.chunk"
    for index in range(2):
        choices = [c for event in events for c in event["choices"] if c["index"] == index]
        assert choices[0]["delta"]["role"] == "assistant"
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] in ("stop", "length")


def test_s07_usage_comes_as_it_was_asked_for(server):
    body = minimal(CHAT)
    usage = server.answer(CHAT, body)["usage"]
    events = server.events(CHAT, body)
    assert all(event["choices"] and event.get("usage") is None for event in events)
    *chunks, last = server.events(CHAT, body | {"stream_options": {"include_usage": True}})
    assert last["choices"] == [] and all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == usage[name]
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        e["usage"]["completion_tokens"] for e in server.events(CHAT, body | {"stream_options": options})
    ]
    assert counts == sorted(counts) and counts[-1] == usage["completion_tokens"]
    response = server.post(CHAT, body | {"stream_options": {"include_usage": True}, "stream": False})
    assert response.status_code == 400 and response.json()["error"]["param"] == "stream_options"
    several = server.answer(CHAT, body | {"n": 3, "temperature": 1})["usage"]
    assert several["prompt_tokens"] == usage["prompt_tokens"]
    assert several["completion_tokens"] <= 12


@pytest.mark.parametrize("fields", [{"n": 0}, {"stop": ""}, {"temperature": 5}, {"response_format": {}}])
def test_s08_s09_what_is_known_to_be_bad_is_refused_before_the_stream(server, fields):
    for path in ROUTES:
        server.refusal(path, minimal(path, **fields))
    server.refusal(COMPLETIONS, {"prompt": "word " * 20_000})


@pytest.mark.parametrize(
    "stop, accepted",
    [("", False), ([""], False), (["x", ""], False), (None, True), ([], True), (["\x00"] * 5, True)],
)
def test_s10_empty_stop_strings(server, stop, accepted):
    body = minimal(COMPLETIONS, stop=stop, ignore_eos=True)
    if accepted:
        assert server.answer(COMPLETIONS, body)["usage"]["completion_tokens"] == 4
    else:
        assert server.refusal(COMPLETIONS, body)["param"].startswith("stop")


def test_s10_too_many_stop_strings(server):
    assert server.refusal(COMPLETIONS, minimal(COMPLETIONS, stop=["a"] * 10_000))["param"] == "stop"


@pytest.mark.parametrize("kept", [True, False])
def test_s11_the_stop_string_is_kept_or_not(server, kept):
    body = forced("abcSTOPdef", stop="STOP", include_stop_str_in_output=kept)
    choice = server.answer(COMPLETIONS, body)["choices"][0]
    assert choice["text"] == ("abcSTOP" if kept else "abc") and choice["stop_reason"] == "STOP"
    assert "".join(server.deltas(COMPLETIONS, body)) == choice["text"]


def test_s11_the_reason_is_the_token_or_nothing(server):
    body = minimal(COMPLETIONS, logit_bias={"500": 100})
    assert server.answer(COMPLETIONS, body | {"stop_token_ids": [500]})["choices"][0]["stop_reason"] == 500
    eos = server.answer(COMPLETIONS, minimal(COMPLETIONS, logit_bias={"2": 100}))["choices"][0]
    assert (eos["finish_reason"], eos["stop_reason"]) == ("stop", None)


# -- choices -------------------------------------------------------------------------------------------------


def test_n01_choices_are_complete_and_apart(server):
    for seed in range(5):
        body = minimal(CHAT, n=4, temperature=1, seed=seed, max_tokens=12 + seed)
        answer = server.answer(CHAT, body)
        texts = [choice["message"]["content"] for choice in answer["choices"]]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        events = server.events(CHAT, body)
        streamed, reasons = [""] * 4, [[] for _ in range(4)]
        for choice in (choice for event in events for choice in event["choices"]):
            streamed[choice["index"]] += choice["delta"].get("content") or ""
            reasons[choice["index"]].append(choice["finish_reason"])
        assert streamed == texts
        assert [r[-1] for r in reasons] == [choice["finish_reason"] for choice in answer["choices"]]


@pytest.mark.parametrize("n", [10**6, -1, 0, "2", 1.5, True, 2**70])
def test_n04_impossible_numbers_of_choices(server, n):
    for path in ROUTES:
        assert server.refusal(path, minimal(path, n=n))["param"] == "n"


def test_n04_greedy_choices_are_equal(server):
    choices = server.answer(COMPLETIONS, minimal(COMPLETIONS, n=3))["choices"]
    assert len({choice["text"] for choice in choices}) == 1 and len(choices) == 3
