"""The page's routes. They are for the page, not for clients: the OpenAPI document leaves them out."""

from __future__ import annotations

from starlette.routing import Route

from streamllm.server.page.feed import engine_events
from streamllm.server.page.files import page, page_paths


def page_routes() -> list[Route]:
    """The page, its files, and the events that feed it."""
    routes = [Route(path, page, include_in_schema=False) for path in sorted(page_paths())]
    return [*routes, Route("/engine/events", engine_events, include_in_schema=False)]
