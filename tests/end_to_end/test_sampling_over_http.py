"""Sampling fields over HTTP: hostile values are refused by name, and change nothing for anybody else."""

from __future__ import annotations

import concurrent.futures
import json
import time

import httpx
import openai
import pytest
from helpers.live_server import LiveServer

ROUTES = {
    "/v1/completions": {"prompt": "The capital of France is"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Count to ten."}]},
}
BIG = 10**19
MANY = 100_000


@pytest.fixture(scope="module")
def server():
    with LiveServer("--max-model-len", "1024", "--kv-cache-memory-bytes", "128MiB") as server:
        server.expected = canary(server)
        yield server
    assert server.exit_code == 0


def canary(server) -> str:
    body = {"prompt": "The sky is", "temperature": 0, "max_tokens": 12}
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def check_unharmed(server) -> None:
    assert canary(server) == server.expected
    assert httpx.get(server.url + "/health").status_code == 200
    server.wait_until_quiet()


def post(server, path: str, fields: dict | str) -> httpx.Response:
    if isinstance(fields, dict):
        body = json.dumps({**ROUTES[path], "max_tokens": 8, **fields})
    else:  # JSON that json.dumps does not write
        body = json.dumps(ROUTES[path])[:-1] + ', "max_tokens": 8, ' + fields + "}"
    return httpx.post(
        server.url + path, content=body, headers={"content-type": "application/json"}, timeout=30
    )


NUMBERS = ["NaN", "Infinity", "-Infinity", '"NaN"', "1e400", "true", "[]", "{}", f"{BIG}", f"-{BIG}"]
NUMBER_FIELDS = [
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "min_p",
]
REFUSED = [
    ("presence_penalty", 2.1), ("presence_penalty", -2.1), ("frequency_penalty", 3),
    ("repetition_penalty", 0), ("repetition_penalty", -1), ("temperature", 2.1), ("top_p", 0), ("min_p", 1.1),
    ("logit_bias", {"191222": -100}), ("logit_bias", {"49152": 1}), ("logit_bias", {"-1": 5}),
    ("logit_bias", {"abc": 1}), ("logit_bias", {"": 1}), ("logit_bias", {"1.5": 1}),
    ("logit_bias", {"5": None}), ("logit_bias", {"5": "1"}), ("logit_bias", {"5": True}),
    ("logit_bias", {str(BIG): 1}), ("logit_bias", [5]),
    ("logit_bias", {str(i): 1 for i in range(MANY)}),
    ("allowed_token_ids", []), ("allowed_token_ids", [49152]), ("allowed_token_ids", [-1]),
    ("allowed_token_ids", [BIG]), ("allowed_token_ids", [1.5]), ("allowed_token_ids", ["1"]),
    ("allowed_token_ids", [True]), ("allowed_token_ids", 5), ("allowed_token_ids", list(range(MANY))),
    ("bad_words", [""]), ("bad_words", ["a", ""]), ("bad_words", [5]), ("bad_words", "word"),
    ("bad_words", ["x" * 10_000]), ("bad_words", [f"w{i}" for i in range(MANY)]),
    ("stop_token_ids", [49152]), ("stop_token_ids", [-1]), ("stop_token_ids", [2**40]),
    ("stop_token_ids", [BIG]), ("stop_token_ids", list(range(MANY))),
    ("min_tokens", -1), ("min_tokens", 9), ("min_tokens", BIG), ("min_tokens", 1.5),
    ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2), ("truncate_prompt_tokens", 1024),
    ("truncate_prompt_tokens", BIG), ("truncate_prompt_tokens", "1"),
    ("logits_processors", ["os.system"]), ("logits_processors", [""]), ("logits_processors", "x"),
    ("logits_processors", ["a"] * 100), ("vllm_xargs", [1]), ("vllm_xargs", "x"),
    ("seed", 2**64), ("seed", "1"), ("top_k", -2), ("top_k", BIG),
]  # fmt: skip


@pytest.mark.parametrize(
    "path", [pytest.param("/v1/completions", marks=pytest.mark.slow), "/v1/chat/completions"]
)
def test_wrong_values_are_refused_by_name(server, path):
    for field, value in REFUSED:
        began = time.monotonic()
        plain, streamed = (post(server, path, {field: value, "stream": stream}) for stream in (False, True))
        assert time.monotonic() - began < 4
        shown = json.dumps(value)[:40]
        assert plain.status_code == 400, (field, shown, plain.text)
        error = plain.json()["error"]
        assert error["param"] and error["param"].split("[")[0] == field, (field, shown, error)
        assert field in error["message"], (field, shown, error)
        assert streamed.json() == plain.json(), (field, shown)
    check_unharmed(server)


def test_numbers_that_are_none(server):
    for field in NUMBER_FIELDS:
        for value in NUMBERS:
            if field == "repetition_penalty" and value == f"{BIG}":
                continue  # any positive number is one
            answer = post(server, "/v1/completions", f'"{field}": {value}')
            assert answer.status_code == 400, (field, value, answer.text)
            json.loads(answer.text, parse_constant=lambda name: pytest.fail(name))
    answer = post(server, "/v1/completions", '"logit_bias": {"5": NaN}')
    assert answer.status_code == 400
    check_unharmed(server)


def test_bias_beyond_100_is_clamped(server):
    """As in vLLM, and as documented."""
    for value, same in ((101, 100), (1e30, 100), (-1e30, -100)):
        fields = {"temperature": 0, "max_tokens": 4, "logprobs": 0}
        texts = [
            post(server, "/v1/completions", {**fields, "logit_bias": {"260": bias}}).json()["choices"][0]
            for bias in (value, same)
        ]
        assert texts[0] == texts[1]


@pytest.mark.parametrize("count", [20_000, 49_152])
def test_many_allowed_ids_are_served(server, count):
    answer = post(server, "/v1/completions", {"allowed_token_ids": list(range(count)), "temperature": 0})
    assert answer.status_code == 200
    check_unharmed(server)


def test_nothing_left_is_an_error_of_its_own_request(server):
    """At admission where it shows at once, else when it happens: an error, never text without the rules."""
    rules = {"allowed_token_ids": [260], "bad_words": [" the the"], "temperature": 0}
    at_once = {**rules, "bad_words": [" the"]}
    for stream in (False, True):
        answer = post(server, "/v1/completions", {**at_once, "stream": stream})
        assert answer.status_code == 400
        assert "allowed_token_ids, bad_words forbid all of them" in answer.json()["error"]["message"]
    answer = post(server, "/v1/completions", rules)
    assert answer.status_code == 400 and "no token is allowed" in answer.json()["error"]["message"]
    lines = post(server, "/v1/completions", {**rules, "stream": True}).text.strip().split("\n\n")
    error = next(json.loads(line[6:]) for line in lines if '"error"' in line)
    assert "no token is allowed" in error["error"]["message"]
    check_unharmed(server)


def test_cut_prompts_report_their_length(server):
    long = "word " * 3000
    bodies = {
        "/v1/completions": {"prompt": long},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": long}]},
    }
    for path, body in bodies.items():
        refused = post(server, path, body)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        for limit, expected in ((17, 17), (-1, 1016)):
            answer = post(server, path, {**body, "truncate_prompt_tokens": limit})
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["prompt_tokens"] == expected
    huge = post(server, "/v1/completions", {"prompt": "a" * 5_000_000, "truncate_prompt_tokens": 5})
    assert huge.status_code == 400 and huge.json()["error"]["param"] == "prompt"
    check_unharmed(server)


def test_every_field_works_through_the_openai_client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        request = {"model": "SmolLM2-135M-Instruct", "messages": ROUTES["/v1/chat/completions"]["messages"],
                   "max_tokens": 16, "temperature": 0.8, "seed": 5, "presence_penalty": 0.5,
                   "frequency_penalty": 0.3, "logit_bias": {"260": -100}}  # fmt: skip
        extra = {
            "repetition_penalty": 1.1, "allowed_token_ids": list(range(40_000)), "min_tokens": 4,
            "bad_words": ["ten", "one two"], "min_p": 0.01, "top_k": 100, "truncate_prompt_tokens": 200,
            "stop_token_ids": [7],
            "spaces_between_special_tokens": False, "vllm_xargs": {"unused": 1},
        }  # fmt: skip
        whole = client.chat.completions.create(**request, extra_body=extra).choices[0]
        chunks = client.chat.completions.create(**request, extra_body=extra, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert whole.message.content == text
    assert "ten" not in text.split()


def test_a_neighbour_of_hostile_requests_gets_its_own_text(server):
    """While requests at the edges of every range run, and others are refused."""
    hostile = [
        {"repetition_penalty": 1e-300}, {"repetition_penalty": 1e300}, {"temperature": 1e-300},
        {"temperature": 1e-5}, {"top_p": 1e-300}, {"min_p": 1, "top_k": 2**31 - 1}, {"presence_penalty": -2},
        {"logit_bias": {str(i): 100 for i in range(4096)}, "n": 4}, {"logit_bias": {"99999": 1}},
        {"stop_token_ids": [49151], "min_tokens": 8}, {"stop_token_ids": [49152], "min_tokens": 1},
        {"allowed_token_ids": [0]},
        {"bad_words": [f"w{i}" for i in range(1024)]}, {"frequency_penalty": -2, "logprobs": 5},
    ]  # fmt: skip
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(post, server, "/v1/completions", fields) for fields in hostile * 2]
        for _ in range(4):
            assert canary(server) == server.expected
        for fields, answer in zip(hostile * 2, answers, strict=True):
            assert answer.result().status_code in (200, 400), fields
            json.loads(answer.result().text, parse_constant=lambda name: pytest.fail(name))
    check_unharmed(server)
