"""Prompts that come back: echo, scoring, prompt logprobs and token ids, whole and streamed."""

from __future__ import annotations

import json
import re

import pytest
from helpers.fake_model import expected_prompt_logprobs
from serving import TEXT, events

from streamllm.outputs import Logprob
from streamllm.sampling_params import SamplingParams
from streamllm.server.logprobs import LogprobFormatter

PROMPT = "Grüße, 漢字 😀: "
IDS = list(PROMPT.encode())


def expected_offsets(text: str) -> list[int]:
    return [index for index, character in enumerate(text) for _ in character.encode()]


def choices_of(server, body: dict) -> list[dict]:
    """The choices of a completion, put together from the chunks where it streams."""
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return response.json()["choices"]
    choices: dict[int, dict] = {}
    for chunk in events(response):
        for part in chunk["choices"]:
            known = choices.setdefault(part["index"], {"text": "", "logprobs": None, "index": part["index"]})
            known["text"] += part["text"]
            if part["logprobs"] is not None:
                for name, values in part["logprobs"].items():
                    known["logprobs"] = known["logprobs"] or {}
                    known["logprobs"].setdefault(name, []).extend(values)
            known |= {name: part[name] for name in ("finish_reason", "stop_reason") if name in part}
    return [choices[index] for index in sorted(choices)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [PROMPT, IDS])
def test_echo_with_logprobs(server, prompt, stream):
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 12, "stream": stream}
    (choice,) = choices_of(server, body)
    answer = TEXT.encode()[:12].decode("utf-8", "replace")
    assert choice["text"] == PROMPT + answer
    logprobs = choice["logprobs"]
    expected = expected_prompt_logprobs(IDS, 2)
    own = [entry and next(iter(entry.values())).logprob for entry in expected]
    assert logprobs["token_logprobs"] == pytest.approx([*own, *[-0.5] * 12])
    assert logprobs["tokens"][:4] == ["G", "r", "bytes:\\xc3", "bytes:\\xbc"]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"] == expected_offsets(PROMPT + answer)[: len(IDS) + 12]
    for shown, entry in zip(logprobs["top_logprobs"][1:], expected[1:], strict=False):
        values = {server.engine.tokenizer.token_text(i): value.logprob for i, value in entry.items()}
        assert len(shown) == len(values) and list(shown.values()) == pytest.approx(list(values.values()))
    server.canary()


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_choices(server, stream):
    prompts = ["first ", "second prompt ", "x"]
    body = {"prompt": prompts, "n": 2, "echo": True, "logprobs": 0, "max_tokens": 3, "stream": stream}
    choices = choices_of(server, body)
    assert [choice["text"] for choice in choices] == [p + TEXT[c : c + 3] for p in prompts for c in (0, 1)]
    for index, choice in enumerate(choices):
        prompt = prompts[index // 2]
        assert len(choice["logprobs"]["tokens"]) == len(prompt) + 3
        assert "".join(choice["logprobs"]["tokens"][: len(prompt)]) == prompt
        assert choice["logprobs"]["token_logprobs"][0] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_max_tokens_0_scores_the_prompt(server, stream, n):
    before = server.stats()
    body = {"prompt": "Your answer: Yes", "max_tokens": 0, "echo": True, "logprobs": 1, "n": n}
    choices = choices_of(server, {**body, "stream": stream})
    assert [choice["index"] for choice in choices] == list(range(n))
    for choice in choices:
        assert (choice["text"], choice["finish_reason"]) == ("Your answer: Yes", "length")
        assert len(choice["logprobs"]["tokens"]) == 16
        assert choice["logprobs"]["token_logprobs"][0] is None
    usage = server.post("/v1/completions", body).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (16, 0, 16)
    assert server.stats().generation_tokens == before.generation_tokens
    server.canary()


def test_scoring_without_logprobs(server):
    body = {"prompt": ["a", "bc"], "max_tokens": 0, "echo": True}
    answer = server.post("/v1/completions", body).json()
    assert [(c["text"], c["logprobs"]) for c in answer["choices"]] == [("a", None), ("bc", None)]


def check_field(entries: list, ids: list[int], count: int) -> None:
    expected = expected_prompt_logprobs(ids, count)
    assert entries[0] is None and len(entries) == len(ids)
    for entry, wanted in zip(entries[1:], expected[1:], strict=True):
        assert list(entry) == [str(token_id) for token_id in wanted]
        for shown, value in zip(entry.values(), wanted.values(), strict=True):
            assert shown == {
                "logprob": pytest.approx(value.logprob),
                "rank": value.rank,
                "decoded_token": value.decoded_token,
            }


def test_the_field_prompt_logprobs(server):
    body = {"prompt": [PROMPT, "two"], "max_tokens": 2, "prompt_logprobs": 1, "n": 2}
    choices = server.post("/v1/completions", body).json()["choices"]
    for choice, ids in zip(choices, [IDS, IDS, list(b"two"), list(b"two")], strict=True):
        check_field(choice["prompt_logprobs"], ids, 1)
        assert choice["logprobs"] is None
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "max_tokens": 2, "prompt_logprobs": 0, "return_token_ids": True}
    answer = server.post("/v1/chat/completions", body).json()
    check_field(answer["prompt_logprobs"], answer["prompt_token_ids"], 0)
    server.canary()


def test_each_field_shows_as_many_as_it_asks_for(server):
    body = {"prompt": "abcd", "max_tokens": 1, "echo": True, "logprobs": 1, "prompt_logprobs": 3}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    check_field(choice["prompt_logprobs"], list(b"abcd"), 3)
    assert [len(shown) for shown in choice["logprobs"]["top_logprobs"][1:4]] == [2, 2, 2]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_prompt_logprobs_are_not_streamed(server, path):
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 1}
    answer = server.post(path, {**body, "stream": True})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "prompt_logprobs" and "stream" in error["message"]


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 0}, {"echo": True, "max_tokens": 0}])
def test_beam_search_has_none(server, fields):
    body = {"prompt": "x", "use_beam_search": True, "n": 2, "max_tokens": 3, **fields}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == ("prompt_logprobs" if "echo" not in fields else "max_tokens")


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_of_a_completion(server, stream):
    body = {"prompt": ["ab", "c"], "n": 2, "max_tokens": 9, "return_token_ids": True, "stream": stream}
    response = server.post("/v1/completions", body)
    parts = [c for e in events(response) for c in e["choices"]] if stream else response.json()["choices"]
    for index, prompt in enumerate([b"ab", b"ab", b"c", b"c"]):
        mine = [part for part in parts if part["index"] == index]
        assert mine[0]["prompt_token_ids"] == list(prompt)
        assert not any("prompt_token_ids" in part for part in mine[1:])
        ids = [token_id for part in mine for token_id in part.get("token_ids", [])]
        assert ids == list(TEXT[index % 2 :].encode()[:9])


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_of_a_chat(server, stream):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "return_token_ids": True}
    response = server.post("/v1/chat/completions", {**body, "stream": stream})
    chunks = events(response) if stream else [response.json()]
    assert bytes(chunks[0]["prompt_token_ids"]).decode() == "[user] hi\n"
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    ids = [i for chunk in chunks for choice in chunk["choices"] for i in choice.get("token_ids", [])]
    assert ids == list(TEXT.encode()[:9])


def test_tokens_as_token_ids(server):
    fields = {"max_tokens": 2, "return_tokens_as_token_ids": True}
    body = {"prompt": "ab", "echo": True, "logprobs": 1, **fields}
    logprobs = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:97", "token_id:98", "token_id:84", "token_id:104"]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert list(logprobs["top_logprobs"][2]) == ["token_id:84", "token_id:85"][:1]
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 1, **fields}
    content = server.post("/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
    assert [(item["token"], item["bytes"]) for item in content] == [
        ("token_id:84", [84]),
        ("token_id:104", [104]),
    ]


def test_offsets_of_bytes_that_are_no_text(server):
    """A character cut by the prompt's ends, and a stray byte in the middle, are U+FFFD in the text."""
    ids = [0xBC, 0x61, 0xFF, 0x62, 0xE6, 0xBC]
    body = {"prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 2}
    for stream in (False, True):
        (choice,) = choices_of(server, {**body, "stream": stream})
        assert choice["text"] == "\ufffda\ufffdb\ufffdTh"
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4, 4, 5, 6]


class SentencePieceLike:
    """Puts BOS and a space in front of a text."""

    pieces = (b"<s>", b" Hello", b" world", b"Hello")

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id == 0


@pytest.mark.parametrize(
    "text, ids, offsets",
    [
        ("Hello world", [0, 1, 2], [0, 0, 5]),
        (" Hello world", [0, 1, 2], [0, 0, 6]),
        # Which of two equal tokens the text shows cannot be told; what follows stands right.
        ("<s>Hello", [0, 0, 3], [0, 3, 3]),
        ("Hello<s> world", [0, 1, 0, 2], [0, 0, 5, 8]),
    ],
)
def test_what_a_tokenizer_puts_in_front_is_no_text(text, ids, offsets):
    formatter = LogprobFormatter(SentencePieceLike(), SamplingParams(logprobs=0))
    entries = [None, *({token_id: Logprob(-1.0, 1)} for token_id in ids[1:])]
    shown = formatter.prompt(ids, entries, text)
    assert shown["tokens"] == [SentencePieceLike.pieces[i].decode() for i in ids]
    assert shown["text_offset"] == offsets


def test_a_cut_prompt_is_echoed_as_cut(server):
    body = {"prompt": "0123456789", "truncate_prompt_tokens": 4, "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = server.post("/v1/completions", body).json()
    assert answer["choices"][0]["text"] == "6789"
    assert answer["choices"][0]["logprobs"]["tokens"] == list("6789")
    assert answer["usage"]["prompt_tokens"] == 4


def test_json_is_strict(server):
    """The fake model's alternatives are all minus infinity."""
    body = {"prompt": "ab", "echo": True, "logprobs": 20, "max_tokens": 3}
    text = server.post("/v1/completions", body).text
    assert not re.search("NaN|Infinity", text)
    json.loads(text, parse_constant=lambda name: pytest.fail(name))
