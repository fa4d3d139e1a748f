"""The page in a headless Chromium: ``browser/page.test.mjs`` under node's own test runner."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers.node_project import node_project
from serving import run_server

HERE = Path(__file__).parent / "browser"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A folder with the script and what drives the browser."""
    return node_project(HERE, tmp_path_factory.mktemp("browser"))


def test_the_page(project):
    settings = {"num_blocks": 600}
    with (
        run_server(step_seconds=0.01, engine_settings=settings) as server,
        run_server(step_seconds=0.01, api_key=("the-key",)) as guarded,
    ):
        done = subprocess.run(
            ["node", "--test", "page.test.mjs"],
            cwd=project,
            env={
                **os.environ,
                "SERVER_URL": server.url,
                "GUARDED_URL": guarded.url,
                "KEY": "the-key",
                "CHROMIUM": CHROMIUM,
            },
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "# fail 0" in done.stdout and "# pass 0" not in done.stdout
        server.canary()
