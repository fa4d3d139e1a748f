"""Scripts that node runs, in a folder with the packages that they need."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def node_project(scripts: Path, folder: Path) -> Path:
    """``folder``, with copies of all files in ``scripts`` and what their ``package.json`` names installed.
    Skips the test where that cannot be done."""
    if not shutil.which("node") or not shutil.which("npm"):
        pytest.skip("node and npm are not installed")
    for path in scripts.iterdir():
        shutil.copy(path, folder)
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefer-offline"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"what package.json names cannot be installed: {done.stderr.splitlines()[:1]}")
    return folder
