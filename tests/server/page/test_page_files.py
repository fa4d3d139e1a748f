"""The page's files: what they are served with, to whom, and what they refer to."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import httpx
import pytest
from serving import run_server

from streamllm.server.page.files import INDEX, page_files, page_paths

ROOT = Path(__file__).parents[3]


def test_every_file_of_the_page_lies_in_the_package():
    static = files("streamllm.server.page").joinpath("static")
    names = {path.name for path in static.iterdir()}
    assert names == set(page_files())
    assert {"index.html", "page.css", "main.js", "icon.svg"} <= names
    assert all(file.content for file in page_files().values())


def test_the_wheel_has_the_page_and_leaves_its_screenshots_out():
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    assert 'wheel.packages = ["streamllm"]' in settings  # whole: the page's files with it
    assert 'wheel.exclude = ["streamllm/server/page/screenshots/**"]' in settings


def test_what_the_files_refer_to_exists_and_is_their_own():
    for name, file in page_files().items():
        text = file.content.decode()
        for script in re.findall(r'from "\./([^"]+)"', text):
            assert script in page_files(), (name, script)
        for target in re.findall(r'(?:src|href)="([^"#]+)"', text):
            assert f"/{target}" in page_paths(), (name, target)
        if name.endswith(".html"):
            assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", text)
        if name.endswith(".js"):
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|\beval\(|Function\(", text)
        elsewhere = set(re.findall(r"https?://[^\s\"'`)]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not elsewhere, (name, elsewhere)


def test_the_files_headers():
    with run_server() as server, httpx.Client(base_url=server.url) as client:
        for path in page_paths():
            response = client.get(path)
            assert response.status_code == 200
            policy = response.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
            assert "unsafe" not in policy and "*" not in policy and "frame-ancestors 'none'" in policy
            assert response.headers["x-content-type-options"] == "nosniff"
            etag = response.headers["etag"]
            for known in (etag, f'"other", W/{etag}'):
                again = client.get(path, headers={"If-None-Match": known})
                assert (again.status_code, again.content) == (304, b"")
                assert again.headers["etag"] == etag
            assert client.get(path, headers={"If-None-Match": '"other"'}).status_code == 200
            assert client.head(path).headers["content-length"] == str(len(response.content))
        assert client.get("/").headers["content-type"] == "text/html; charset=utf-8"
        assert client.get("/page/main.js").headers["content-type"] == "text/javascript; charset=utf-8"
        assert client.get("/").content == page_files()[INDEX].content
        assert client.get("/page/index.html").status_code == 404
        assert client.get("/page/../pyproject.toml").status_code == 404
        assert client.post("/").status_code == 405


def test_the_page_needs_no_key_and_its_events_do():
    with run_server(api_key=("key",)) as server, httpx.Client(base_url=server.url) as client:
        for path in page_paths():
            assert client.get(path).status_code == 200
        for path in ("/engine/events", "/page/", "/page/other", "/page", "/v1/models"):
            assert client.get(path).status_code == 401
        headers = {"Authorization": "Bearer key"}
        with client.stream("GET", "/engine/events", headers=headers) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")


def test_a_server_without_the_page():
    with run_server(disable_page=True) as server, httpx.Client(base_url=server.url) as client:
        for path in (*page_paths(), "/engine/events"):
            assert client.get(path).status_code == 404
    with run_server(disable_page=True, api_key=("key",)) as server:
        assert httpx.get(server.url + "/").status_code == 401


def test_the_page_behind_a_prefix():
    with run_server(root_path="/llm") as server:
        assert httpx.get(server.url + "/").content == page_files()[INDEX].content
        assert httpx.get(server.url + "/page/main.js").status_code == 200


@pytest.mark.parametrize("path", ["/", "/engine/events"])
def test_the_api_document_is_for_clients(server, path):
    assert path not in httpx.get(server.url + "/openapi.json").json()["paths"]
