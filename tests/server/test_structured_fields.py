"""Constraints over HTTP with a scripted model: fields, refusals, endings and failures in mid-stream."""

import itertools
import json

import httpx
import pytest
from serving import RunningServer, events, run_server, text_script

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def chat(**fields):
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, **fields}


def json_schema(**fields):
    return {"type": "json_schema", "json_schema": fields}


@pytest.fixture(scope="module")
def scripted():
    """The model says ``{"a": 1}`` and then more."""
    with run_server(script=text_script('{"a": 1} and more')) as server:
        yield server


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": json_schema(name="x", schema=SCHEMA)},
        {"response_format": json_schema(name="x", strict=True, description="y", schema=SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"structured_outputs": {"json_object": True}},
        {"structured_outputs": {"regex": r'\{"a": [0-9]\}', "choice": None}},
        {"structured_outputs": {"choice": ["no", '{"a": 1}']}},
        {"structured_outputs": {"grammar": 'root ::= "{" [^}]+ "}"'}},
        {"guided_json": SCHEMA},
        {"guided_json": SCHEMA, "guided_whitespace_pattern": " ", "guided_decoding_backend": "outlines"},
        {"guided_regex": r'\{"a": [0-9]\}'},
        {"guided_choice": ['{"a": 1}']},
        {"guided_grammar": 'start: /[{][^}]*[}]/'},
    ],
)  # fmt: skip
def test_a_text_ends_where_its_constraint_does(scripted, fields):
    for stream in (False, True):
        answer = scripted.post(CHAT, chat(**fields, stream=stream))
        assert answer.status_code == 200, answer.text
        if stream:
            choices = [event["choices"][0] for event in events(answer)]
            text = "".join(choice["delta"].get("content", "") for choice in choices)
        else:
            choices = answer.json()["choices"]
            text = choices[0]["message"]["content"]
            assert answer.json()["usage"]["completion_tokens"] == len(text)
        assert text == '{"a": 1}'
        assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", None)
    scripted.wait_idle()


def test_the_token_that_completes_a_text_is_part_of_its_logprobs(scripted):
    body = {"prompt": "x", "max_tokens": 20, "logprobs": 0, "structured_outputs": {"json_object": True}}
    whole = scripted.post(COMPLETIONS, body).json()["choices"][0]["logprobs"]
    assert "".join(whole["tokens"]) == '{"a": 1}'
    assert whole["text_offset"] == list(range(8))
    answer = scripted.post(CHAT, chat(logprobs=True, response_format={"type": "json_object"})).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert bytes(itertools.chain(*(item["bytes"] for item in content))) == b'{"a": 1}'


@pytest.mark.parametrize("value", [{"type": "text"}, None])
def test_a_format_that_asks_for_nothing_constrains_nothing(scripted, value):
    answer = scripted.post(CHAT, chat(response_format=value)).json()
    assert answer["choices"][0]["message"]["content"] == '{"a": 1} and more{"a'


def test_the_end_of_a_grammar_wins_over_min_tokens_and_ignore_eos(scripted):
    fields = {"structured_outputs": {"json_object": True}, "min_tokens": 15, "ignore_eos": True}
    answer = scripted.post(COMPLETIONS, {"prompt": "x", "max_tokens": 20, **fields}).json()
    assert answer["choices"][0]["text"] == '{"a": 1}'


def test_a_stop_string_and_max_tokens_cut_a_constrained_text(scripted):
    body = {"prompt": "x", "structured_outputs": {"json_object": True}}
    answer = scripted.post(COMPLETIONS, {**body, "stop": '":', "max_tokens": 20}).json()["choices"][0]
    assert (answer["text"], answer["finish_reason"], answer["stop_reason"]) == ('{"a', "stop", '":')
    answer = scripted.post(COMPLETIONS, {**body, "max_tokens": 5}).json()["choices"][0]
    assert (answer["text"], answer["finish_reason"]) == ('{"a":', "length")


def test_eos_ends_a_complete_text_though_it_should_be_ignored():
    with run_server(script=text_script("ab", ends=True)) as server:
        body = {"prompt": "x", "max_tokens": 9, "ignore_eos": True, "structured_outputs": {"regex": "abc?"}}
        answer = server.post(COMPLETIONS, body).json()
        assert answer["choices"][0]["text"] == "ab"
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 3


REFUSED = [
    ({"response_format": "json_object"}, "response_format"),
    ({"response_format": {}}, "response_format"),
    ({"response_format": {"type": None}}, "response_format"),
    ({"response_format": {"type": 5}}, "response_format"),
    ({"response_format": {"type": "foo"}}, "response_format"),
    ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": None}}, "response_format"),
    ({"response_format": json_schema(name="x")}, "response_format"),
    ({"response_format": json_schema(name=5, schema={})}, "response_format"),
    ({"response_format": json_schema(schema="{}")}, "response_format"),
    ({"response_format": json_schema(schema={}, strict=1)}, "response_format"),
    ({"response_format": json_schema(schema={}, more=1)}, "response_format"),
    ({"response_format": json_schema(schema={"type": "objekt"})}, "response_format"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "tag"}}}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "["}}, "structured_outputs"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"reg": "a"}}, "structured_outputs"),
    ({"structured_outputs": "json"}, "structured_outputs"),
    ({"guided_json": {"uniqueItems": True}}, "guided_json"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_regex": "(?<=a)b"}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": "yes"}, "guided_choice"),
    ({"guided_grammar": "?"}, "guided_grammar"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"use_beam_search": True, "response_format": {"type": "json_object"}}, "response_format"),
    ({"use_beam_search": True, "guided_regex": "a"}, "guided_regex"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=str)
def test_a_bad_constraint_is_the_same_400_streamed_or_not(scripted, fields, param):
    for path in (CHAT, COMPLETIONS):
        base = chat() if path == CHAT else {"prompt": "x", "max_tokens": 20}
        answers = [scripted.post(path, {**base, **fields, "stream": stream}) for stream in (False, True)]
        if "use_beam_search" in fields:
            answers.pop()  # beams cannot be streamed either
        for answer in answers:
            assert answer.status_code == 400, answer.text
            assert answer.json() == answers[0].json()
            error = answer.json()["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", param)
            assert param in error["message"] and "\n" not in error["message"]


def test_a_batch_with_one_constraint_compiles_it_once_and_refuses_it_as_a_whole(scripted):
    answer = scripted.post(COMPLETIONS, {"prompt": ["x", "y"], "guided_regex": "["})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "guided_regex"
    answer = scripted.post(COMPLETIONS, {"prompt": ["x", "y"], "n": 2, "guided_regex": r"\{?.{3}"})
    assert [choice["finish_reason"] for choice in answer.json()["choices"]] == ["stop"] * 4
    scripted.wait_idle()


def test_a_grammar_that_fails_in_mid_stream_ends_its_request_alone(server: RunningServer):
    """The scripted model does not know of masks: its second word breaks the grammar."""
    neighbour = {"prompt": "x", "max_tokens": 200, "stream": True}
    with httpx.stream("POST", server.url + COMPLETIONS, json=neighbour, timeout=10) as other:
        lines = other.iter_lines()
        next(lines)
        body = {"prompt": "x", "max_tokens": 50, "structured_outputs": {"regex": "The [0-9]+ tokens"}}
        answer = server.post(COMPLETIONS, {**body, "stream": True})
        assert answer.status_code == 200
        *deltas, failure = events(answer)
        assert "".join(event["choices"][0]["text"] for event in deltas).startswith("The ")
        assert "grammar failed" in failure["error"]["message"] and failure["error"]["type"] == "server_error"
        assert server.post(COMPLETIONS, body).status_code == 500
        rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert rest[-1]["choices"][0]["finish_reason"] == "length"
    server.canary()


def test_a_constrained_request_that_leaves_frees_everything(server: RunningServer):
    body = {
        "prompt": "x",
        "max_tokens": 4000,
        "stream": True,
        "n": 3,
        "structured_outputs": {"regex": "(.|\\s)*"},
    }
    with httpx.stream("POST", server.url + COMPLETIONS, json=body, timeout=10) as answer:
        next(answer.iter_lines())
    server.canary()
