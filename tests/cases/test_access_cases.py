"""A: keys and origins."""

from __future__ import annotations

import httpx
import pytest
from case_server import CHAT, COMPLETIONS, check_error, minimal

KEY = b"k\xc3\xa9y"
OPEN = {"/health", "/ready", "/ping", "/version"}


@pytest.fixture(scope="module")
def routes(strict_server) -> list[tuple[str, str]]:
    """(method, path) of every route, from the server's own document."""
    document = strict_server.client.get("/openapi.json").json()
    return [
        (method.upper(), path.replace("{name}", "x"))
        for path, operations in document["paths"].items()
        for method in operations
    ]


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer wrong")],
        [(b"authorization", b"Bearer " + KEY + b"x")],
        [(b"authorization", b"Bearer k\xe9y")],
        [(b"authorization", b"Basic " + KEY)],
        [(b"authorization", KEY)],
        [(b"authorization", b"Bearer wrong"), (b"authorization", b"Bearer " + KEY)],
        [(b"x-api-key", KEY + b"x")],
        [(b"x-api-key", KEY), (b"authorization", b"Bearer wrong")],
    ],
)
def test_a01_every_route_but_the_open_ones_wants_the_key(strict_server, routes, headers):
    assert len(routes) > 12
    with httpx.Client(base_url=strict_server.url) as client:
        for method, path in routes:
            response = client.request(method, path, headers=headers)
            if path in OPEN:
                assert response.status_code == 200
            elif path.startswith("/v1/messages"):  # Anthropic's shape
                assert response.status_code == 401
                assert response.json()["error"]["type"] == "authentication_error"
            else:
                check_error(response, 401)


def test_a01_other_spellings_open_nothing(strict_server):
    for path in (
        "//v1/models",
        "/V1/models",
        "/v1/models/",
        "/./v1/models",
        "/v1/models?x=/health",
        "/health/../v1/models",
    ):
        response = httpx.get(strict_server.url + path)
        assert response.status_code == 401, path


def test_a01_the_key_opens(strict_server):
    for scheme in (b"Bearer ", b"bearer ", b"BEARER "):
        headers = [(b"authorization", scheme + KEY)]
        assert httpx.get(strict_server.url + "/v1/models", headers=headers).status_code == 200


def test_a02_a_preflight_needs_no_key(strict_server):
    origin = {"Origin": "https://example.org"}
    asked = {
        **origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    response = httpx.options(strict_server.url + CHAT, headers=asked)
    assert response.status_code == 200 and response.headers["access-control-allow-origin"]
    assert "authorization" in response.headers["access-control-allow-headers"].lower()


def test_a02_every_answer_may_be_read_by_the_page(strict_server):
    client = strict_server.client
    headers = {"Origin": "https://example.org"}
    answers = [
        httpx.get(strict_server.url + "/v1/models", headers=headers),
        client.get("/v1/models", headers=headers),
        client.get("/nothing", headers=headers),
        client.post(CHAT, content=b"{", headers=headers),
        client.post(COMPLETIONS, json=minimal(COMPLETIONS, stream=True), headers=headers),
    ]
    assert [answer.status_code for answer in answers] == [401, 200, 404, 400, 200]
    assert all(answer.headers["access-control-allow-origin"] for answer in answers)
