"""API keys, CORS and request ids."""

from __future__ import annotations

import http.client

import httpx
import pytest
from serving import MODEL, run_server

from streamllm.server.app import ROUTES
from streamllm.server.middleware import OPEN_PATHS

KEY = "sk-ключ"


@pytest.fixture(scope="module")
def guarded():
    with run_server(api_key=("other", KEY)) as server:
        yield server


def status(server, path, *authorizations, method="GET"):
    """The status of a raw request: no client tidies path or headers."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    connection.putrequest(method, path)
    for value in authorizations:
        connection.putheader("Authorization", value.encode())
    connection.putheader("Content-Length", "0")
    connection.endheaders()
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


def test_every_route_but_the_open_ones_is_guarded(guarded):
    paths = {route.path: next(iter(route.methods - {"HEAD"})) for route in ROUTES}
    assert set(paths) > OPEN_PATHS
    for path, method in paths.items():
        expected = 200 if path in OPEN_PATHS else 401
        assert status(guarded, path.replace("{name:path}", "x"), method=method) == expected


@pytest.mark.parametrize(
    "path",
    ["//v1/models", "/V1/models", "/v1/models/", "/v1//models", "/nothing", "/page", "/health/", "//health",
     "/health/../v1/models", "/health%2f..%2fv1/models", "/v1/models?/health", "/metrics/x"],
)  # fmt: skip
def test_other_spellings_are_guarded_too(guarded, path):
    assert status(guarded, path) == 401


@pytest.mark.parametrize(
    "authorizations",
    [[], [""], ["Bearer"], ["Bearer "], ["Bearer wrong"], [KEY], [f"Basic {KEY}"], [f"Bearer  {KEY}"],
     [f"Bearer {KEY}", f"Bearer {KEY}"], ["Bearer wrong", f"Bearer {KEY}"], [f"Bearer {KEY}x"]],
)  # fmt: skip
def test_refused_keys(guarded, authorizations):
    assert status(guarded, "/v1/models", *authorizations) == 401


@pytest.mark.parametrize("authorization", ["Bearer other", f"Bearer {KEY}", f"bearer {KEY}"])
def test_accepted_keys(guarded, authorization):
    assert status(guarded, "/v1/models", authorization) == 200


def test_refusal_is_openais(guarded):
    response = httpx.get(guarded.url + "/v1/models", headers={"Origin": "http://a.example"})
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["access-control-allow-origin"] == "*"


def test_preflight_needs_no_key(guarded):
    headers = {
        "Origin": "http://a.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    response = httpx.options(guarded.url + "/v1/chat/completions", headers=headers)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "*"
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "authorization" in response.headers["access-control-allow-headers"]


def test_cors_on_errors_and_streams(server):
    origin = {"Origin": "http://a.example"}
    body = {"prompt": "a", "max_tokens": 1, "stream": True}
    for response, expected in (
        (httpx.post(server.url + "/v1/completions", json=body, headers=origin), 200),
        (httpx.post(server.url + "/v1/completions", content=b"{", headers=origin), 400),
        (httpx.get(server.url + "/nothing", headers=origin), 404),
    ):
        assert response.status_code == expected
        assert response.headers["access-control-allow-origin"] == "*"


def test_configured_origins():
    with run_server(allowed_origins=("http://good.example",), allow_credentials=True) as server:
        good = httpx.get(server.url + "/health", headers={"Origin": "http://good.example"})
        assert good.headers["access-control-allow-origin"] == "http://good.example"
        assert good.headers["access-control-allow-credentials"] == "true"
        headers = {"Origin": "http://bad.example", "Access-Control-Request-Method": "POST"}
        assert "access-control-allow-origin" not in httpx.get(server.url + "/health", headers=headers).headers
        refused = httpx.options(server.url + "/v1/completions", headers=headers)
        assert refused.status_code == 400
        assert refused.json()["error"]["type"] == "invalid_request_error"


def test_request_ids(server):
    def echoed(given):
        headers = {} if given is None else {"X-Request-Id": given}
        return httpx.get(server.url + "/health", headers=headers).headers["x-request-id"]

    assert echoed("abc-1") == "abc-1"
    assert echoed("x" * 10_000) == "x" * 128
    assert len(echoed(None)) == 32 and echoed(None) != echoed(None)


def test_equal_request_ids_are_two_requests(server):
    headers = {"X-Request-Id": "same"}
    with httpx.Client(base_url=server.url, headers=headers) as client:
        body = {"prompt": "a", "max_tokens": 2000, "stream": True, "model": MODEL}
        with client.stream("POST", "/v1/completions", json=body) as first:
            lines = first.iter_lines()  # closes the response when it is collected
            next(lines)
            whole = client.post("/v1/completions", json={"prompt": "b", "max_tokens": 3}).json()
            assert whole["choices"][0]["text"] == "The"
            assert first.headers["x-request-id"] == "same"
    server.canary()
