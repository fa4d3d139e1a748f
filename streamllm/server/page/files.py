"""The page's own files, out of the package: no build step, and nothing from elsewhere."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
INDEX = "index.html"

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # kept, and asked for anew by its ETag: an update is seen at once
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file as it is sent."""

    content: bytes
    media_type: str
    etag: str


@functools.cache
def page_files() -> dict[str, PageFile]:
    """Every file of the page by its name."""
    loaded = {}
    for path in files(__package__).joinpath("static").iterdir():
        media_type = MEDIA_TYPES.get(path.name[path.name.rfind(".") :])
        if media_type is not None:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            loaded[path.name] = PageFile(content, media_type, etag)
    return loaded


def page_paths() -> frozenset[str]:
    """The paths of the page: they hold nothing of the server's state, and need no API key."""
    return frozenset({"/", *(f"/page/{name}" for name in page_files() if name != INDEX)})


async def page(request: Request) -> Response:
    """The page for people, or one of its files."""
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    found = page_files()[path.removeprefix("/page/") if path != "/" else INDEX]
    headers = {**HEADERS, "ETag": found.etag}
    known = request.headers.get("if-none-match", "")
    if found.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(found.content, headers={**headers, "Content-Type": found.media_type})
