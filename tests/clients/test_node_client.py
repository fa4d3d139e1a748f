"""The unchanged ``openai`` npm client: the scripts in ``node`` under node's own test runner."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from asking import DEFAULTS, MODEL
from helpers.field_values import IGNORED, REFUSED, accepted_fields
from helpers.node_project import node_project

from streamllm.server.protocol import ChatRequest, CompletionRequest, field_support

HERE = Path(__file__).parent / "node"
BODIES = {"chat": ChatRequest, "completions": CompletionRequest}


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A folder with the scripts and the installed client."""
    return node_project(HERE, tmp_path_factory.mktemp("node"))


def field_requests() -> list[dict]:
    """Every field of both routes in a request: as it is meant to be, and with a value of a wrong type."""
    requests = []
    for route, body_type in BODIES.items():
        required = {**DEFAULTS[route], "temperature": 0, "max_tokens": 1}
        for name, status in field_support(body_type).items():
            if status == "ignored":
                cases = [({**required, name: IGNORED[name]}, None)]
            elif status == "not supported yet":
                cases = [({**required, name: REFUSED[name]}, name)]
            else:
                accepted = accepted_fields(route, name, required)
                wrong = 5 if isinstance(accepted[name], dict) else {"never": ["a value"]}
                cases = [(accepted, None), ({**required, name: wrong}, name)]
            requests += [
                {"route": route, "name": name, "request": request, "refused": refused}
                for request, refused in cases
            ]
    return requests


@pytest.mark.parametrize("script", ["client.test.mjs", "agents.test.mjs"])
def test_the_npm_client(server, project, script):
    fields = project / "fields.json"
    fields.write_text(json.dumps({"model": MODEL, "fields": field_requests()}), encoding="utf-8")
    done = subprocess.run(
        ["node", "--test", script],
        cwd=project,
        env={**os.environ, "SERVER_URL": server.url, "MODEL": MODEL, "FIELDS": str(fields)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# fail 0" in done.stdout and "# pass 0" not in done.stdout
