"""Which key opens which route, and TLS."""

from __future__ import annotations

import shutil
import ssl
import subprocess

import httpx
import pytest
from serving import run_server
from test_errors import check_error
from test_middleware import status

from streamllm.config import ServerConfig
from streamllm.errors import ConfigError
from streamllm.server.app import DOCS_ROUTES, ROUTES
from streamllm.server.middleware import ADMIN_PATHS, OPEN_PATHS, ApiKeys

PATHS = {route.path: sorted(route.methods - {"HEAD"})[-1] for route in ROUTES + DOCS_ROUTES}


def test_the_open_list_is_short():
    assert {"/health", "/ready", "/ping", "/version"} == OPEN_PATHS
    assert set(PATHS) >= ADMIN_PATHS


@pytest.mark.parametrize("authorizations", [[], ["Bearer wrong"], ["Bearer"], ["bearer  key"]])
def test_every_route_needs_a_key(authorizations):
    with run_server(api_key=("key",)) as server:
        for path, method in PATHS.items():
            expected = 200 if path in OPEN_PATHS else 401
            path = path.replace("{name:path}", "x")
            assert status(server, path, *authorizations, method=method) == expected, path
        opened = {"Authorization": "Bearer key"}
        assert httpx.get(server.url + "/metrics", headers=opened).status_code == 200
        assert httpx.post(server.url + "/reset_prefix_cache", headers=opened).status_code == 200


def test_metrics_may_be_left_open():
    with run_server(api_key=("key",), metrics_without_key=True) as server:
        assert status(server, "/metrics") == 200
        assert status(server, "/metrics/") == 401


def test_admin_keys():
    with run_server(api_key=("a,b", "c"), admin_api_key=("root",)) as server:

        def reset(*authorizations):
            return status(server, "/reset_prefix_cache", *authorizations, method="POST")

        assert reset() == reset("Bearer wrong") == 401
        assert reset("Bearer a") == reset("Bearer b") == reset("Bearer c") == 403
        assert reset("Bearer root") == 200
        assert status(server, "/v1/models", "Bearer root") == status(server, "/v1/models", "Bearer b") == 200
        assert status(server, "/v1/models", "Bearer a,b") == 401
        headers = {"Authorization": "Bearer a"}
        refusal = httpx.post(server.url + "/reset_prefix_cache", headers=headers)
        error = check_error(refusal, 403, "insufficient_permissions")
        assert error["type"] == "permission_error"


def test_an_admin_key_alone_guards_the_admin_routes_alone():
    with run_server(admin_api_key=("root",)) as server:
        assert status(server, "/v1/models") == 200
        assert status(server, "/reset_prefix_cache", method="POST") == 401
        assert status(server, "/reset_prefix_cache", "Bearer root", method="POST") == 200


@pytest.mark.parametrize(
    "client, allowed",
    [
        (("127.0.0.1", 1), True), (("127.9.9.9", 1), True), (("::1", 1), True),
        (("::ffff:127.0.0.1", 1), True),
        (("10.0.0.1", 1), False), (("::ffff:10.0.0.1", 1), False), (("unix", 1), False), (None, False),
    ],
)  # fmt: skip
async def test_without_any_key_the_admin_routes_are_for_the_loopback_interface(client, allowed):
    called = []

    async def app(scope, receive, send):
        called.append(True)

    async def send(message):
        sent.append(message)

    sent = []
    scope = {"type": "http", "method": "POST", "path": "/reset_prefix_cache", "headers": [], "client": client}
    await ApiKeys(app, keys=())(scope, None, send)
    assert bool(called) == allowed
    assert allowed or sent[0]["status"] == 403
    await ApiKeys(app, keys=())({**scope, "path": "/v1/models"}, None, send)
    assert len(called) == 1 + allowed


def test_a_proxys_client_is_not_on_the_loopback_interface():
    with run_server() as server:
        for forwarded, expected in (({}, 200), ({"X-Forwarded-For": "10.1.2.3"}, 403)):
            response = httpx.post(server.url + "/reset_prefix_cache", headers=forwarded)
            assert response.status_code == expected


# -- TLS ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return str(key), str(cert)


def test_tls(certificate):
    key, cert = certificate
    with run_server(ssl_keyfile=key, ssl_certfile=cert) as server:
        secure = server.url.replace("http://", "https://")
        trusting = ssl.create_default_context(cafile=cert)
        body = {"prompt": "a", "max_tokens": 3, "stream": True}
        with httpx.Client(base_url=secure, verify=trusting) as client:
            assert client.get("/health").status_code == 200
            assert "[DONE]" in client.post("/v1/completions", json=body).text
        with pytest.raises(httpx.ConnectError):
            httpx.get(secure + "/health")
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url + "/health")


def test_client_certificates(certificate):
    key, cert = certificate
    with run_server(ssl_keyfile=key, ssl_certfile=cert, ssl_ca_certs=cert, ssl_cert_reqs=2) as server:
        secure = server.url.replace("http://", "https://")
        without = ssl.create_default_context(cafile=cert)
        with pytest.raises(httpx.HTTPError):
            httpx.get(secure + "/health", verify=without)
        having = ssl.create_default_context(cafile=cert)
        having.load_cert_chain(cert, key)
        assert httpx.get(secure + "/health", verify=having).status_code == 200


@pytest.mark.parametrize(
    "settings", [{"ssl_keyfile": "k"}, {"ssl_ca_certs": "c"}, {"ssl_certfile": "c", "ssl_cert_reqs": 1}]
)
def test_tls_settings_that_do_not_fit(settings):
    with pytest.raises(ConfigError, match="--ssl"):
        ServerConfig(**settings)
