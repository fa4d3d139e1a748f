"""G: constraints; C: prefix cache; K: a small pool; R: neighbours; Q: sampling."""

from __future__ import annotations

import concurrent.futures
import json
import time

import jsonschema
import pytest
from case_server import CHAT, COMPLETIONS, CaseServer, forced, minimal
from helpers.field_values import ACCEPTED, GOES_WITH

from streamllm.server.protocol import CompletionRequest, field_support


def schema_format(schema: object) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


# -- constraints ---------------------------------------------------------------------------------------------

NESTED = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
BAD_CONSTRAINTS = {
    "regex": ["[", "(?<=a)b", r"(a)\1", "(" * 5000],
    "json": [
        {"type": "objekt"},
        {"$ref": "#/nope"},
        {"$ref": "https://example.org/x"},
        {"enum": []},
        {"type": "object", "required": ["a"], "additionalProperties": False},
        NESTED,
        {"type": "string", "pattern": "(?<=x)y"},
        {"type": "string", "pattern": "["},
    ],
    "grammar": ["", "start: nope", 'root ::= "a"\nroot ::= "b"', "%"],
    "choice": [[], [1], ["a"] * 20_000],
}


@pytest.mark.parametrize(
    "kind, value", [(kind, value) for kind, values in BAD_CONSTRAINTS.items() for value in values]
)
def test_g01_g02_a_constraint_that_cannot_be_enforced_is_refused(server, kind, value):
    began = time.monotonic()
    assert server.refusal(COMPLETIONS, minimal(COMPLETIONS, structured_outputs={kind: value}))["param"]
    assert time.monotonic() - began < 15


def test_g01_an_odd_regex_is_enforced(server):
    for regex, expected in (("^(|.*)$", None), ("a{1000000000}", "aaaaaaaaaaaa")):
        body = minimal(COMPLETIONS, structured_outputs={"regex": regex}, max_tokens=3)
        text = server.answer(COMPLETIONS, body)["choices"][0]["text"]
        assert "\n" not in text and (expected is None or expected.startswith(text))


def test_g01_neighbours_of_a_huge_schema_finish(server):
    huge = {"type": "object", "properties": {f"property_{i}": {"type": "string"} for i in range(10_000)}}
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        answers = [
            threads.submit(server.post, COMPLETIONS, body)
            for body in (
                minimal(COMPLETIONS, response_format=schema_format(huge)),
                minimal(COMPLETIONS, max_tokens=60, ignore_eos=True),
                minimal(COMPLETIONS, response_format=schema_format({"description": "x" * 5_000_000})),
            )
        ]
    statuses = [answer.result().status_code for answer in answers]
    assert statuses[1] == 200 and set(statuses) <= {200, 400}


SCHEMAS = [
    {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3},
    {"pattern": "^[a-z]+$", "type": "string"},
    {
        "type": "array",
        "items": {"type": "integer", "minimum": 3, "maximum": 12},
        "minItems": 2,
        "maxItems": 3,
    },
    {"type": "integer", "minimum": 100, "exclusiveMaximum": 103},
    {"const": {"a": [1, None, "x"]}},
    {"type": "string", "format": "date"},
    {"oneOf": [{"const": 1}, {"const": "b"}]},
    {"allOf": [{"type": "integer"}, {"minimum": 5, "maximum": 6}]},
    {"type": "array", "uniqueItems": True, "maxItems": 2, "items": {"enum": [1, 2, 3]}},
    {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 90},
    {
        "type": "object",
        "patternProperties": {"^a": {"type": "integer"}},
        "additionalProperties": False,
        "maxProperties": 1,
    },
    {
        "type": "object",
        "properties": {"a": {"type": "null"}},
        "required": ["a"],
        "additionalProperties": False,
    },
]


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("seed", [0, 1])
def test_g03_a_schema_is_kept_or_refused(server, schema, seed):
    body = minimal(CHAT, response_format=schema_format(schema), temperature=1.2, seed=seed, max_tokens=120)
    response = server.post(CHAT, body)
    if response.status_code != 200:
        assert response.status_code == 400 and response.json()["error"]["param"] == "response_format"
        return
    choice = response.json()["choices"][0]
    if choice["finish_reason"] == "stop":
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)


def test_g07_enums_beyond_ascii(server):
    values = ["在线", "Sjöfart", "😀", 'a "quote"', "back\\slash", "new\nline"]
    for value in values:
        for ascii_only in (True, False):
            schema = {
                "type": "object",
                "properties": {"ключ": {"enum": [value]}},
                "required": ["ключ"],
                "additionalProperties": False,
            }
            body = minimal(CHAT, response_format=schema_format(schema), max_tokens=120)
            raw = json.dumps(body, ensure_ascii=ascii_only).encode()
            choice = json.loads(server.post(CHAT, raw).text)["choices"][0]
            assert choice["finish_reason"] == "stop"
            assert json.loads(choice["message"]["content"]) == {"ключ": value}
    assert server.answer(COMPLETIONS, forced("在线"))["choices"][0]["text"] == "在线"


@pytest.mark.parametrize(
    "value",
    [
        {"type": "json_schema"},
        {"type": "foo"},
        {},
        "json_object",
        [],
        5,
        {"type": None},
        {"type": "json_schema", "json_schema": {}},
    ],
)
def test_g08_malformed_formats(server, value):
    for path in (CHAT, COMPLETIONS):
        assert server.refusal(path, minimal(path, response_format=value))["param"].startswith(
            "response_format"
        )


def test_g08_no_format(server):
    assert server.answer(CHAT, minimal(CHAT, response_format=None))["choices"]


# -- prefix cache --------------------------------------------------------------------------------------------


def tokens_and_logprobs(server: CaseServer, prompt: list[int], salt: str) -> tuple[dict, int]:
    body = minimal(COMPLETIONS, prompt=prompt, logprobs=0, max_tokens=6, cache_salt=salt)
    answer = server.answer(COMPLETIONS, body)
    return answer["choices"][0]["logprobs"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_c01_a_hit_gives_what_a_miss_gives(server):
    prompt = server.answer("/tokenize", {"prompt": "A boat, a bay, a buoy and a bell. " * 9})["tokens"][:80]
    assert len(prompt) == 80
    warm = {}
    for length in (80, 80, 79, 65, 64, 63, 17, 16, 15, 1):
        found, cached = tokens_and_logprobs(server, prompt[:length], "one")
        assert cached % 16 == 0 and cached < length
        assert warm.setdefault(length, found) == found
    for length, found in warm.items():
        cold, cached = tokens_and_logprobs(server, prompt[:length], f"alone {length}")
        assert cached == 0 and cold == found


def test_c02_salts_do_not_share(server):
    prompt = list(range(1000, 1080))
    hits = [tokens_and_logprobs(server, prompt, salt)[1] for salt in ("A", "A", "B", "B")]
    assert hits == [0, 64, 0, 64]
    assert server.refusal(COMPLETIONS, minimal(COMPLETIONS, cache_salt=""))["param"] == "cache_salt"


def test_c03_cached_tokens_are_told(server):
    body = minimal(CHAT, messages=[{"role": "user", "content": "five blocks of words " * 16}])
    first, second = (server.answer(CHAT, body)["usage"] for _ in range(2))
    hits = server.metric("prefix_cache_hits_total")
    *_, last = server.events(CHAT, body | {"stream_options": {"include_usage": True}})
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < second["prompt_tokens"] and cached % 16 == 0
    assert first["prompt_tokens_details"]["cached_tokens"] < cached
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    assert server.metric("prefix_cache_hits_total") - hits == cached


# -- a small pool --------------------------------------------------------------------------------------------


def test_k01_a_request_larger_than_the_pool(small_server):
    error = small_server.refusal(COMPLETIONS, minimal(COMPLETIONS, prompt=[500] * 300))
    assert "300" in error["message"] and "256" in error["message"]
    assert small_server.answer(COMPLETIONS, minimal(COMPLETIONS))["choices"]
    grows = small_server.answer(
        COMPLETIONS, minimal(COMPLETIONS, prompt=[500] * 200, max_tokens=100, ignore_eos=True)
    )
    assert grows["choices"][0]["finish_reason"] == "length" and grows["usage"]["total_tokens"] == 256
    small_server.canary()


@pytest.mark.slow
def test_k03_preemption_changes_nothing(server, small_server):
    common = {"max_tokens": 90, "ignore_eos": True, "temperature": 0}
    bodies = [
        {"prompt": "The first story", **common},
        {"prompt": "The second story", **common, "temperature": 1, "seed": 7},
        {"prompt": "The third story", **common, "frequency_penalty": 1, "presence_penalty": 1},
        {"prompt": "The fourth story", **common, "logprobs": 2},
        {"prompt": "The fifth story", **common, "min_tokens": 80, "stop": ["e"]},
        {"prompt": "The sixth story", **common, "n": 2, "temperature": 1, "seed": 3, "max_tokens": 60},
        {"prompt": "The seventh story", **common, "structured_outputs": {"regex": "[a-z ]{200,}"}},
    ]
    expected = [server.answer(COMPLETIONS, body) for body in bodies]
    preempted = small_server.metric("num_preemptions_total")
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as threads:
        whole = list(threads.map(lambda body: small_server.post(COMPLETIONS, body).json(), bodies))
        streams = list(threads.map(lambda body: _texts(small_server, body), bodies))
    assert small_server.metric("num_preemptions_total") > preempted
    for one, other, streamed in zip(expected, whole, streams, strict=True):
        assert one["choices"] == other["choices"]
        assert streamed == [choice["text"] for choice in one["choices"]]
        for name in ("prompt_tokens", "completion_tokens"):
            assert one["usage"][name] == other["usage"][name]
    small_server.canary()


def _texts(server: CaseServer, body: dict) -> list[str]:
    """The texts of a streamed answer, each of its choices joined."""
    events = _events(server, body)
    texts = [""] * body.get("n", 1)
    for choice in (choice for event in events for choice in event["choices"]):
        texts[choice["index"]] += choice["text"]
    return texts


def _events(server: CaseServer, body: dict) -> list[dict]:
    # Each thread has a connection of its own.
    with server.another_client() as client:
        response = client.post(COMPLETIONS, json=body | {"stream": True})
    lines = [line for line in response.text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


# -- neighbours ----------------------------------------------------------------------------------------------

EXOTIC = [
    name
    for name in ACCEPTED
    if name not in ("chat_template", "chat_template_kwargs", "logits_processors")
    and field_support(CompletionRequest).get(name) != "not supported yet"
]


def test_r01_no_neighbours_options_change_an_answer(server):
    mine = minimal(COMPLETIONS, max_tokens=48, ignore_eos=True, logprobs=1)
    alone = server.answer(COMPLETIONS, mine)["choices"]
    neighbours = [
        minimal(
            COMPLETIONS,
            prompt=f"Neighbour {name}",
            max_tokens=40,
            **{**GOES_WITH.get(name, {}), name: ACCEPTED[name]},
        )
        if name not in ("max_tokens",)
        else minimal(COMPLETIONS)
        for name in EXOTIC
    ]
    with concurrent.futures.ThreadPoolExecutor(12) as threads:
        others = [threads.submit(server.post, COMPLETIONS, body) for body in neighbours]
        answers = [threads.submit(server.post, COMPLETIONS, mine) for _ in range(8)]
    assert {other.result().status_code for other in others} == {200}
    assert all(answer.result().json()["choices"] == alone for answer in answers)


def test_r02_an_answer_is_the_same_alone_and_among_many(server):
    mine = minimal(COMPLETIONS, max_tokens=24, ignore_eos=True, logprobs=2)
    alone = server.answer(COMPLETIONS, mine)["choices"]
    bodies = [
        mine if i % 2 else minimal(COMPLETIONS, prompt="word " * (3 * i + 1), temperature=1)
        for i in range(64)
    ]
    with concurrent.futures.ThreadPoolExecutor(64) as threads:
        answers = list(threads.map(lambda body: server.post(COMPLETIONS, body).json(), bodies))
    assert all(
        answer["choices"] == alone for answer, body in zip(answers, bodies, strict=True) if body is mine
    )


# -- sampling ------------------------------------------------------------------------------------------------


def test_q01_penalties_count_what_they_should(server):
    """Of two tokens one leads by half a nat, so that a penalty on it shows. The prompt is full of it."""
    prompt, usual, other = [500] * 20, 500, 600

    def lead(context: list[int]) -> float:
        scored = [
            server.answer(
                COMPLETIONS, {"prompt": [*context, token], "max_tokens": 0, "echo": True, "logprobs": 0}
            )["choices"][0]["logprobs"]["token_logprobs"][-1]
            for token in (usual, other)
        ]
        return scored[0] - scored[1]

    bias = min(lead(prompt), lead([*prompt, usual])) - 0.5

    def ids(**fields: float) -> list[int]:
        body = minimal(COMPLETIONS, prompt=prompt, max_tokens=2, logit_bias={str(other): bias})
        body |= {"allowed_token_ids": [usual, other], "return_token_ids": True, **fields}
        return server.answer(COMPLETIONS, body)["choices"][0]["token_ids"]

    assert ids() == [usual, usual]
    # Generated tokens alone count for these two, the prompt's too for the third.
    assert ids(presence_penalty=2) == ids(frequency_penalty=2) == [usual, other]
    assert ids(repetition_penalty=100)[0] == other


def test_q02_min_tokens_hold_back_every_ending(server):
    newline = server.answer("/tokenize", {"prompt": "\n"})["tokens"]
    body = minimal(COMPLETIONS, max_tokens=30, min_tokens=20, allowed_token_ids=[*newline, 500])
    for stop in ({"stop": ["\n"]}, {"stop_token_ids": newline}):
        for stream in (False, True):
            request = body | stop | {"logit_bias": {str(newline[0]): 100}}
            if stream:
                reasons = [
                    event["choices"][0]["finish_reason"] for event in server.events(COMPLETIONS, request)
                ]
                assert reasons[-1] in ("stop", "length")
            answer = server.answer(COMPLETIONS, request)
            assert answer["usage"]["completion_tokens"] >= 20
    forced_eos = minimal(COMPLETIONS, max_tokens=30, min_tokens=20, logit_bias={"2": 100})
    answer = server.answer(COMPLETIONS, forced_eos)
    assert answer["usage"]["completion_tokens"] == 21 and answer["choices"][0]["finish_reason"] == "stop"
