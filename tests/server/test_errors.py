"""What clients do wrong: always OpenAI's error shape, never a 5xx, and the server goes on."""

from __future__ import annotations

import json
import logging

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import MODEL, run_server

from streamllm.server import protocol

ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
}
BODY_TYPES = {"/v1/chat/completions": protocol.ChatRequest, "/v1/completions": protocol.CompletionRequest}


def check_error(response: httpx.Response, status: int, code: str | None = None) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and isinstance(error["type"], str)
    assert error["code"] == code
    return error


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "body, says",
    [
        (b"", "empty"),
        (b"  ", "empty"),
        (b"null", "null"),
        (b'["a"]', "a list"),
        (b'"a"', "a string"),
        (b"{", "ends at byte 1"),
        (b'{"n": 1', "ends at byte 7"),
        (b'{"n": 1,}', "byte 8"),
        (b"{'n': 1}", "byte 1"),
        (b'{"n": 1} x', "byte 9"),
        (b'{"temperature": NaN}', "byte 16"),
        (b'{"temperature": -Infinity}', "byte 17"),
        (b'{"temperature": 1e400}', "temperature"),
        (b'{"temperature": 1' + b"0" * 5000 + b"}", "temperature"),
        (b'{"prompt": "\\ud800"}', "byte 12"),
        (b'{"prompt": "a\\udc97"}', "byte 13"),
        (b'{"prompt": "\xff"}', "byte 12"),
        (b'{"prompt": "\xc4\xe3\xba\xc3"}', "UTF-8"),
        (b'\xef\xbb\xbf{"n": 1}', "byte 0"),
        (b"[" * 10_000, "deep"),
        (b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "deep"),
        (b'{"prompt": "a\x01"}', "byte 13"),
        (b"{}", "required"),
    ],
)
def test_broken_bodies(server, path, body, says):
    assert says in check_error(server.post(path, body), 400)["message"]


def test_the_last_of_a_repeated_key_counts(server):
    response = server.post("/v1/completions", b'{"prompt": "a", "max_tokens": 0, "max_tokens": 2}')
    assert response.json()["usage"]["completion_tokens"] == 2


def test_control_characters_are_text(server):
    assert server.post("/v1/completions", b'{"prompt": "\\u0000", "max_tokens": 1}').status_code == 200
    server.canary()


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5) | st.sampled_from([0, 1, -1, 2**63, 1e300, "", "a", 0.5]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@pytest.mark.parametrize("path", ROUTES)
@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(data=st.data())
def test_no_value_of_any_field_is_the_servers_fault(server, path, data):
    fields = sorted(protocol.field_support(BODY_TYPES[path]))
    name = data.draw(st.sampled_from(fields))
    body = {**ROUTES[path], name: data.draw(ANY_JSON)}
    if name != "max_tokens":
        body["max_tokens"] = 1
    response = server.post(path, json.dumps(body).encode())
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        check_error(response, response.status_code, response.json()["error"]["code"])


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("value", [None, True, 1, 1.5, "a", [], [None], {}, {"a": 1}, "\0", -(2**64)])
def test_no_type_of_any_field_is_the_servers_fault(server, path, value):
    with httpx.Client(base_url=server.url) as client:
        for name in protocol.field_support(BODY_TYPES[path]):
            response = client.post(path, json={**ROUTES[path], name: value})
            assert response.status_code in (200, 400, 404), (name, response.text)
    server.canary()


def test_every_field_has_one_status():
    for body_type in BODY_TYPES.values():
        honoured = set(body_type.__struct_fields__)
        shared = set(protocol.GenerationRequest.__struct_fields__)
        assert honoured >= shared
        assert not protocol.IGNORED & (honoured | set(protocol.NOT_SUPPORTED_YET))
        support = protocol.field_support(body_type)
        assert all(support[name] == "honoured" for name in honoured)


def test_unknown_fields_are_reported_once(server, caplog):
    with caplog.at_level(logging.WARNING, logger="streamllm.server"):
        for _ in range(2):
            body = {**ROUTES["/v1/completions"], "some_new_field\n": 1}
            assert server.post("/v1/completions", body).status_code == 200
    lines = [record.getMessage() for record in caplog.records if "some_new_field" in record.getMessage()]
    assert lines == ["ignoring the unknown request field 'some_new_field\\n'"]


# -- models, routes, sizes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ROUTES)
def test_model_names(server, path):
    for accepted in (MODEL, None):
        assert server.post(path, {**ROUTES[path], "model": accepted}).status_code == 200
    for unknown in ("nope", "", "x" * 1000):
        error = check_error(server.post(path, {**ROUTES[path], "model": unknown}), 404, "model_not_found")
        assert error["param"] == "model" and MODEL in error["message"]
    assert check_error(server.post(path, {**ROUTES[path], "model": 5}), 400)["param"] == "model"


def test_openai_client_sees_not_found(server):
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError) as refusal:
        client.completions.create(model="nope", prompt="a")
    assert refusal.value.code == "model_not_found"
    assert "nope" in refusal.value.body["message"]


def test_routes_and_methods(server):
    check_error(httpx.get(server.url + "/v1/nothing"), 404)
    check_error(httpx.post(server.url + "/v1/completions/"), 404)
    refusal = httpx.get(server.url + "/v1/completions")
    check_error(refusal, 405)
    assert refusal.headers["allow"] == "POST"


def test_models(server):
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    (card,) = client.models.list().data
    assert card.id == MODEL and card.max_model_len == 4096
    assert client.models.retrieve(MODEL).id == MODEL
    check_error(httpx.get(server.url + "/v1/models/nope"), 404, "model_not_found")
    check_error(httpx.get(server.url + "/v1/models/"), 404, "model_not_found")


def test_served_model_names():
    with run_server(served_model_name=("org/first", "second")) as server:
        for name in ("org/first", "second"):
            assert (
                server.post("/v1/completions", {"prompt": "a", "model": name}).json()["model"] == "org/first"
            )
            assert httpx.get(f"{server.url}/v1/models/{name}").json()["id"] == name
        assert server.post("/v1/completions", {"prompt": "a", "model": MODEL}).status_code == 404


def test_body_limit():
    with run_server(max_body_bytes=2000) as server:
        check_error(server.post("/v1/completions", {"prompt": "x" * 3000}), 413, "request_too_large")

        def pieces():
            for _ in range(100):
                yield b" " * 1000

        check_error(httpx.post(server.url + "/v1/completions", content=pieces()), 413, "request_too_large")
        assert server.post("/v1/completions", {"prompt": "x" * 1000}).status_code == 200


def test_unexpected_errors_are_500_in_shape_and_logged(monkeypatch, caplog):
    with run_server() as server:

        async def broken(*args, **kwargs):
            raise ZeroDivisionError("a secret detail")

        monkeypatch.setattr(server.engine, "add_requests", broken)
        response = httpx.post(
            server.url + "/v1/completions", json={"prompt": "a"}, headers={"Origin": "http://a.example"}
        )
        error = check_error(response, 500)
        assert "secret" not in error["message"] and error["type"] == "server_error"
        assert response.headers["access-control-allow-origin"] == "*"
    assert "a secret detail" in caplog.text


def test_version_and_ping(server):
    import streamllm

    assert httpx.get(server.url + "/version").json() == {"version": streamllm.__version__}
    assert httpx.get(server.url + "/ping").status_code == httpx.post(server.url + "/ping").status_code == 200
    assert httpx.head(server.url + "/health").status_code == 200
