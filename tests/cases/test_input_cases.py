"""P: prompts; V: values; E: errors; T: templates; Z: tokens. After each hostile request all is as before."""

from __future__ import annotations

import socket

import httpx
import pytest
from case_server import CHAT, COMPLETIONS, ROUTES, check_error, minimal

VOCABULARY = 49152


# -- prompts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [
        [VOCABULARY],
        [-1],
        [2**31],
        [2**63],
        [2**70],
        [1.5],
        [True],
        [[1], [-1]],
        [],
        [[]],
        [[1], []],
        [None],
        ["a", 1],
    ],
)
def test_p01_ids_that_are_no_tokens(server, prompt):
    error = server.refusal(COMPLETIONS, minimal(COMPLETIONS, prompt=prompt))
    assert error["param"].startswith("prompt")
    if prompt in ([VOCABULARY], [-1]):
        assert str(prompt[0]) in error["message"]


@pytest.mark.parametrize("prompt", ["", [], [""], ["", "a"]])
def test_p02_empty_prompts(server, prompt):
    assert "empty" in server.refusal(COMPLETIONS, minimal(COMPLETIONS, prompt=prompt))["message"]


def test_p02_empty_messages(server):
    assert server.refusal(CHAT, minimal(CHAT, messages=[]))["param"] == "messages"
    for content in ("", " "):
        server.answer(CHAT, minimal(CHAT, messages=[{"role": "user", "content": content}]))


def test_p03_a_long_prompt_is_not_cut(server):
    for path, fields in (
        (COMPLETIONS, {"prompt": "word " * 9000}),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 9000}]}),
        (COMPLETIONS, {"prompt": [5] * 9000}),
    ):
        error = server.refusal(path, minimal(path, **fields))
        assert error["code"] == "context_length_exceeded" and "8192" in error["message"]
        assert error["param"] in ("prompt", "messages")
    cut = server.answer(COMPLETIONS, minimal(COMPLETIONS, prompt=[5] * 9000, truncate_prompt_tokens=7))
    assert cut["usage"]["prompt_tokens"] == 7


BROKEN_TEXT = [rb"\ud800", rb"a\udc97b", rb"\ud83d x", b"\xc4\xe3\xba\xc3", b"\xe9", b"\xff\xfe"]


@pytest.mark.parametrize("text", BROKEN_TEXT)
def test_p05_text_that_is_no_unicode(server, text):
    string = b'"%b"' % text
    for path, field in (
        (COMPLETIONS, b'"prompt": %b' % string),
        (CHAT, b'"messages": [{"role": "user", "content": %b}]' % string),
        (COMPLETIONS, b'"prompt": "a", "stop": %b' % string),
        (COMPLETIONS, b'"prompt": "a", "bad_words": [%b]' % string),
        (COMPLETIONS, b'"prompt": "a", "model": %b' % string),
        (COMPLETIONS, b'"prompt": "a", "structured_outputs": {"choice": [%b]}' % string),
        (COMPLETIONS, b'"prompt": "a", %b: 1' % string),
    ):
        check_error(server.post(path, b'{"max_tokens": 1, %b}' % field), 400)


def test_p05_control_characters_and_marks(server):
    for path, body in (
        (COMPLETIONS, minimal(COMPLETIONS, prompt="a\x00\x1b[31m\u202e")),
        (CHAT, minimal(CHAT)),
    ):
        if path == CHAT:
            body["messages"][0]["content"] = "\x00"
        assert server.answer(path, body)["choices"]
    check_error(server.post(COMPLETIONS, b"\xef\xbb\xbf" + b'{"prompt": "a"}'), 400)


# -- values --------------------------------------------------------------------------------------------------

NUMBERS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", '"NaN"', "1e400", "-1e999"])
def test_v01_numbers_that_are_none(server, value):
    for name in [*NUMBERS, "priority", "seed", "max_tokens", "logit_bias"]:
        shown = f'{{"5": {value}}}' if name == "logit_bias" else value
        check_error(server.post(COMPLETIONS, f'{{"prompt": "a", "{name}": {shown}}}'.encode()), 400)


@pytest.mark.parametrize(
    "name, values",
    [
        ("temperature", [-0.1, 2.1]),
        ("top_p", [0, -1, 1.1]),
        ("min_p", [-0.1, 1.1]),
        ("presence_penalty", [-2.1, 2.1]),
        ("frequency_penalty", [-2.1, 2.1]),
        ("repetition_penalty", [0, -1]),
        ("top_k", [-2, 1.5]),
    ],
)
def test_v01_numbers_out_of_range(server, name, values):
    for value in values:
        assert server.refusal(COMPLETIONS, minimal(COMPLETIONS, **{name: value}))["param"] == name


@pytest.mark.parametrize(
    "bias",
    [
        {str(VOCABULARY): -100},
        {"191222": -100},
        {"-1": 5},
        {"abc": 1},
        {"5": None},
        {"5": "1"},
        {str(token): 1 for token in range(100_000)},
    ],
)
def test_v02_bias_on_what_is_no_token(server, bias):
    assert server.refusal(COMPLETIONS, minimal(COMPLETIONS, logit_bias=bias))["param"].startswith(
        "logit_bias"
    )


def test_v02_bias_is_clamped(server):
    answers = [
        server.answer(COMPLETIONS, minimal(COMPLETIONS, logit_bias={"500": value, "600": 90}))["choices"]
        for value in (100, 101)
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("token", [VOCABULARY, -1, 2**40, 2**70])
def test_v03_stop_tokens_that_are_none(server, token):
    body = minimal(COMPLETIONS, stop_token_ids=[token], min_tokens=1)
    assert server.refusal(COMPLETIONS, body)["param"].startswith("stop_token_ids")


@pytest.mark.parametrize("path", ROUTES)
def test_v08_numbers_of_tokens(server, path):
    for fields, param in (
        ({"min_tokens": 5}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2**70}, "max_tokens"),
        ({"max_tokens": "4"}, "max_tokens"),
    ):
        assert server.refusal(path, minimal(path, **fields))["param"] == param
    assert server.answer(path, minimal(path, max_tokens=None, stop=["a", "e", "i", "o"]))["choices"]


# -- errors --------------------------------------------------------------------------------------------------


def test_e01_every_status_has_openais_shape(server, strict_server):
    check_error(server.client.get("/v1/nothing"), 404)
    check_error(server.client.get(COMPLETIONS), 405)
    check_error(server.client.delete("/v1/models"), 405)
    check_error(server.client.get("/v1/models/nope"), 404)
    check_error(server.client.post("/v1/completions/", json={}), 404)
    check_error(httpx.get(strict_server.url + "/v1/models"), 401)
    check_error(server.post("/tokenize", {}), 400)
    check_error(server.post("/detokenize", {"tokens": "a"}), 400)
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 999999999999\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": "a"',
        b"null",
        b"[]",
        b'"a"',
        b"[" * 10_000,
        b'{"prompt":' + b"[" * 10_000,
        b"\x00",
    ],
)
def test_e02_broken_bodies(server, body):
    for path in (
        *ROUTES,
        "/tokenize",
        "/detokenize",
        "/v1/chat/completions/render",
        "/v1/completions/render",
    ):
        check_error(server.post(path, body), 400)


def test_e02_unknown_fields_and_repeated_keys(server):
    assert server.answer(COMPLETIONS, minimal(COMPLETIONS, never_heard_of={"a": []}))["choices"]
    assert server.post(COMPLETIONS, b'{"prompt": "a", "n": 0, "n": 1, "max_tokens": 1}').status_code == 200


@pytest.mark.parametrize("path", [*ROUTES, "/tokenize", "/v1/chat/completions/render"])
def test_e03_unknown_models(server, path):
    body = {"prompt": "a"} if path == "/tokenize" else minimal(CHAT if "chat" in path else path)
    for name in ("nope", "", "../etc", "SmolLM2-135M-Instruct\x00"):
        error = check_error(server.post(path, body | {"model": name}), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert check_error(server.post(path, body | {"model": 5}), 400)["param"] == "model"
    for accepted in ("SmolLM2-135M-Instruct", None):
        assert server.post(path, body | {"model": accepted}).status_code == 200


# -- templates -----------------------------------------------------------------------------------------------


def prompt_of(server, messages, **fields):
    """The text that a conversation becomes."""
    return server.answer("/v1/chat/completions/render", {"messages": messages, **fields})["prompt_text"]


def test_t01_histories_of_tools_without_tools(server):
    question = {"role": "user", "content": "Hi"}
    turns = [
        {"role": "assistant", "content": "hi"},
        {"role": "assistant", "content": "hi", "tool_calls": []},
        {"role": "assistant", "content": "hi", "tool_calls": None},
    ]
    assert len({prompt_of(server, [question, turn, question]) for turn in turns}) == 1
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for turn in (
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "tool_calls": [call]},
    ):
        assert server.answer(CHAT, minimal(CHAT, messages=[question, turn, question]))["choices"]


def test_t03_parts_become_text(server):
    def user(*parts):
        return [{"role": "user", "content": list(parts)}]

    text = [{"type": "text", "text": letter} for letter in "ab"]
    assert prompt_of(server, user(*text)) == prompt_of(server, [{"role": "user", "content": "a\nb"}])
    assert prompt_of(server, user(text[0])) == prompt_of(server, [{"role": "user", "content": "a"}])
    for part in ({"type": "image_url", "image_url": {"url": "x"}}, {"type": "nope"}, {}, 5, {"type": "text"}):
        error = server.refusal(CHAT, minimal(CHAT, messages=user(part)))
        assert error["param"].startswith("messages")


def test_t04_prompts_are_the_same_on_every_route(server):
    body = minimal(CHAT)
    ids = server.answer("/v1/chat/completions/render", body)["prompt_token_ids"]
    assert server.answer(CHAT, body | {"return_token_ids": True})["prompt_token_ids"] == ids
    assert server.answer("/tokenize", {"messages": body["messages"]})["tokens"] == ids


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"},
        {"chat_template": "{{ ''.__class__.__mro__ }}"},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": {"tokenize": True}},
        {"chat_template_kwargs": {"add_generation_prompt": False}},
    ],
)
def test_t05_templates_of_clients_are_refused(server, fields):
    (name,) = fields
    assert server.refusal(CHAT, minimal(CHAT, **fields))["param"].startswith(name)


def test_t07_the_templates_own_words_reach_the_client(strict_server):
    body = minimal(CHAT, messages=[{"role": "system", "content": "Be kind."}])
    assert strict_server.refusal(CHAT, body)["message"] == "Begin with a user."
    assert strict_server.answer(CHAT, minimal(CHAT))["choices"]
    strict_server.canary()


# -- tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens", [[-1], [2**63], [2**70], [VOCABULARY], ["1"], [[1]], [1.5], [None], "a", None]
)
def test_z01_ids_that_are_no_tokens(server, tokens):
    error = check_error(server.post("/detokenize", {"tokens": tokens}), 400)
    assert error["param"].startswith("tokens")


def test_z01_no_tokens_are_no_text(server):
    assert server.answer("/detokenize", {"tokens": []}) == {"prompt": ""}
