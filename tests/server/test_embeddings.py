"""``/v1/embeddings`` over HTTP, with the openai client and by hand."""

from __future__ import annotations

import base64
import json
import threading

import httpx
import numpy as np
import openai
import pytest
from helpers.fake_model import HIDDEN_SIZE, hidden_state
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import MODEL, run_server
from test_errors import ANY_JSON, check_error
from test_metrics import scrape

from streamllm.server.protocol import EmbeddingRequest, field_support, leave_out, refused_fields

PATH = "/v1/embeddings"


@pytest.fixture(autouse=True)
def everything_goes_on(server):
    yield
    server.canary()


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def expected(ids: list[int]) -> list[float]:
    """What a request without further fields gets."""
    state = hidden_state(ids).astype(np.float64)
    return (state / np.sqrt((state**2).sum())).astype(np.float32).tolist()


def embed(server, **fields) -> list[list[float]]:
    answer = server.post(PATH, {"input": "some text", **fields})
    assert answer.status_code == 200, answer.text
    return [entry["embedding"] for entry in answer.json()["data"]]


# -- the openai client -------------------------------------------------------------------------------------


def test_b01_the_clients_default_is_base64_and_equals_floats(client):
    texts = ["one", "two and more", "ďá 漢字 😀"]
    raw = client.embeddings.with_raw_response.create(model=MODEL, input=texts)
    assert json.loads(raw.http_request.content)["encoding_format"] == "base64"
    by_default = raw.parse()
    as_floats = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    for index, text in enumerate(texts):
        values = by_default.data[index].embedding
        assert len(values) == HIDDEN_SIZE
        assert values == as_floats.data[index].embedding == expected(list(text.encode()))
    assert [entry.index for entry in by_default.data] == [0, 1, 2]


def test_base64_is_little_endian_float32(server):
    (text,) = embed(server, encoding_format="base64")
    values = np.frombuffer(base64.b64decode(text, validate=True), "<f4")
    assert values.tolist() == embed(server)[0] == expected(list(b"some text"))


async def test_the_async_client(server):
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
        answer = await client.embeddings.create(model=MODEL, input=[1, 2, 3], user="someone")
    assert answer.data[0].embedding == expected([1, 2, 3])


def test_the_answers_shape(server):
    body = server.post(PATH, {"input": ["ab", "cde"], "model": MODEL}).json()
    assert body.pop("id").startswith("embd-") and body.pop("created") > 0
    assert [entry.pop("embedding") for entry in body["data"]] == [
        expected([97, 98]),
        expected([99, 100, 101]),
    ]
    assert body == {
        "object": "list",
        "model": MODEL,
        "data": [{"object": "embedding", "index": 0}, {"object": "embedding", "index": 1}],
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }


# -- inputs and fields -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_input", "prompts"),
    [
        ("ab", [[97, 98]]),
        (["ab"], [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97, 98], [5], [256]], [[97, 98], [5], [256]]),
        (["ab"] * 2048, [[97, 98]] * 2048),
    ],
)
def test_every_kind_of_input(server, given_input, prompts):
    assert embed(server, input=given_input) == [expected(ids) for ids in prompts]


def test_fields_that_shape_the_embedding(server):
    raw = hidden_state(list(b"some text"))
    assert embed(server, normalize=False)[0] == embed(server, use_activation=False)[0] == raw.tolist()
    assert embed(server, normalize=False, dimensions=2)[0] == raw[:2].tolist()
    short = embed(server, dimensions=2)[0]
    assert short == pytest.approx(raw[:2] / np.linalg.norm(raw[:2]), abs=1e-7)
    means = np.mean([hidden_state(list(b"some text"[:end])) for end in range(1, 10)], 0)
    assert embed(server, normalize=False, pooling="mean")[0] == pytest.approx(means, rel=1e-6)
    assert embed(server, truncate_prompt_tokens=4)[0] == expected(list(b"text"))
    assert embed(server, cache_salt="a", priority=3, add_special_tokens=False)[0] == expected(
        list(b"some text")
    )


def test_a_server_may_pool_otherwise():
    with run_server(engine_settings={"pooling": "mean"}) as server:
        assert embed(server) == embed(server, pooling="mean") != embed(server, pooling="last")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": ["a", [1]]}, "input[1]"),
        ({"input": [1, "a"]}, "input[1]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [257]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [2**31]}, "input"),
        ({"input": [2**63]}, "input"),
        ({"input": [1.5]}, "input[0]"),
        ({"input": [1, True]}, "input[1]"),
        ({"input": [[1], [-1]]}, "input[1]"),
        ({"encoding_format": "bytes"}, "encoding_format"),
        ({"encoding_format": 1}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": -4}, "dimensions"),
        ({"dimensions": HIDDEN_SIZE + 1}, "dimensions"),
        ({"dimensions": 2**80}, "dimensions"),
        ({"dimensions": "2"}, "dimensions"),
        ({"dimensions": True}, "dimensions"),
        ({"pooling": "cls"}, "pooling"),
        ({"normalize": "yes"}, "normalize"),
        ({"normalize": True, "use_activation": False}, "use_activation"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 4097}, "truncate_prompt_tokens"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"priority": 1.5}, "priority"),
    ],
)
def test_p01_bad_values_are_named(server, fields, param):
    before = server.stats().prompt_tokens
    error = check_error(server.post(PATH, {"input": "some text", **fields}), 400)
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert server.stats().prompt_tokens == before


@pytest.mark.parametrize("ids", ["[18446744073709551616]", "[1e400]", "[NaN]"])
def test_p01_numbers_beyond_64_bits(server, ids):
    assert server.post(PATH, b'{"input": ' + ids.encode() + b"}").status_code == 400


def test_a_missing_input_and_an_unknown_model(server):
    assert check_error(server.post(PATH, {"model": MODEL}), 400)["param"] == "input"
    assert check_error(server.post(PATH, {"input": "a", "model": "x"}), 404, "model_not_found")["param"] == (
        "model"
    )
    assert httpx.get(server.url + PATH).status_code == 405


def test_an_input_may_fill_the_context_and_not_more(server):
    assert len(embed(server, input="a" * 4096)[0]) == HIDDEN_SIZE
    # The last is refused before it is tokenised: none of the tokens is longer than 5 bytes.
    for text, length in (("a" * 4097, 4097), ([97] * 4097, 4097), ("a" * 2_000_000, 400_000)):
        answer = server.post(PATH, {"input": text})
        error = check_error(answer, 400, "context_length_exceeded")
        assert error["param"] == "input" and "4096" in error["message"]
        assert str(length) in error["message"]
    assert embed(server, input="a" * 5000, truncate_prompt_tokens=-1)[0] == expected([97] * 4096)


def test_the_table_of_fields(server):
    support = field_support(EmbeddingRequest)
    plain = embed(server)
    for name, status in support.items():
        if status == "not supported yet":
            error = check_error(server.post(PATH, {"input": "some text", name: ["something"]}), 400)
            neutral = refused_fields(EmbeddingRequest)[name]
            assert error["param"] == name
            assert error["message"] == f"{name} is not supported yet; {leave_out(neutral)}."
            for value in (None, *neutral):
                assert embed(server, **{name: value}) == plain
        elif status == "ignored":
            assert embed(server, **{name: {"any": ["thing"]}}) == plain
        elif name != "input":
            assert embed(server, **{name: None}) == plain
    document = httpx.get(server.url + "/openapi.json").json()
    schema = document["components"]["schemas"]["EmbeddingRequest"]
    assert {name: field["x-support"] for name, field in schema["properties"].items()} == support
    assert schema["required"] == ["input"]
    assert embed(server, some_field_of_next_year={"a": 1}) == plain


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(name=st.sampled_from(sorted(field_support(EmbeddingRequest))), value=ANY_JSON)
def test_no_value_of_any_field_is_the_servers_fault(server, name, value):
    answer = server.post(PATH, json.dumps({"input": "a", name: value}).encode())
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        check_error(answer, answer.status_code, answer.json()["error"]["code"])


# -- numbers, and how it may end ---------------------------------------------------------------------------


def test_metrics_count_prompts_and_no_tokens():
    with run_server(step_seconds=0.001, enable_per_request_metrics=True) as server:
        answer = server.post(PATH, {"input": ["hello", "me"]}).json()
        samples = scrape(server)
        assert samples["prompt_tokens_total"] == answer["usage"]["total_tokens"] == 7
        assert samples["generation_tokens_total"] == 0
        assert samples["request_success_total{finished_reason=stop}"] == 2
        assert samples["time_to_first_token_seconds_count"] == 0
        assert samples["e2e_request_latency_seconds_count"] == 2
        assert answer["metrics"]["queue_time_ms"] >= 0 and answer["metrics"]["tokens_per_second"] is None
        server.canary()


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_d02_a_client_that_gives_up_frees_everything(pooling):
    with run_server(step_seconds=0.02, max_num_seqs=4) as server:
        inputs = [[index % 250, 7] * 50 for index in range(1000)]
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + PATH, json={"input": inputs, "pooling": pooling}, timeout=0.2)
        server.wait_idle()
        samples = scrape(server)
        assert samples["request_success_total{finished_reason=abort}"] > 900
        assert samples["prompt_tokens_total"] < 100 * 100
        server.canary()


def test_embeddings_and_streams_run_side_by_side():
    with run_server(step_seconds=0.002) as server:
        body = {"prompt": "a", "max_tokens": 60, "ignore_eos": True, "temperature": 0}
        alone = server.post("/v1/completions", body).json()["choices"][0]["text"]
        answers: list[list[list[float]]] = []
        inputs = [[index, 1, 2] * 40 for index in range(60)]
        other = threading.Thread(target=lambda: answers.append(embed(server, input=inputs)))
        other.start()
        assert server.post("/v1/completions", body).json()["choices"][0]["text"] == alone
        other.join()
        assert answers == [[expected(ids) for ids in inputs]]


def test_an_engine_that_fails_is_an_error_and_not_an_answer():
    with run_server() as server:
        server.executor.fail_next = [RuntimeError("boom")]
        error = check_error(server.post(PATH, {"input": ["a", "b"]}), 500)
        assert "boom" in error["message"] and error["type"] == "server_error"
        server.canary()
