"""``/v1/files`` and ``/v1/batches``."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from streamllm.errors import InvalidRequestError
from streamllm.server.batches.execution import LineRunner, Places
from streamllm.server.batches.files import FileStore, StoredFile
from streamllm.server.batches.paging import list_body
from streamllm.server.batches.protocol import (
    FILE_PURPOSE,
    BatchRequest,
    check_batch_request,
    output_expiry,
    window_seconds,
)
from streamllm.server.batches.runner import BatchRunner, FolderLock
from streamllm.server.batches.store import BatchStore, StoredBatch
from streamllm.server.batches.upload import boundary_of, read_form
from streamllm.server.body import decoded, read_body
from streamllm.server.database import Database
from streamllm.server.generation import ServerState
from streamllm.server.in_flight import ServerStoppingError
from streamllm.server.json_response import json_response
from streamllm.server.owners import owner_of
from streamllm.server.query import Page

if TYPE_CHECKING:
    from streamllm.config import ServerConfig

MAX_FILES_LISTED = 10_000
MAX_BATCHES_LISTED = 100


class Batches:
    """What the routes share: ``app.state.batches``.

    Args:
        app: whose routes answer the lines; its ``state.server`` is set.
    """

    def __init__(self, app: Starlette, database: Database, config: ServerConfig, *, max_age: float) -> None:
        server: ServerState = app.state.server
        self.files = FileStore(
            database,
            max_file_bytes=config.max_file_bytes,
            max_bytes=config.store_max_file_bytes,
            max_age=max_age,
        )
        self.store = BatchStore(database, max_age=max_age)
        lines = LineRunner(app)
        self.runner = BatchRunner(
            self.store,
            self.files,
            lines=lines,
            places=Places(server.in_flight, lines, server.engine.config.max_num_seqs),
            lock=FolderLock(database.path.parent / "batches.lock"),
            max_body_bytes=config.max_body_bytes,
        )


# -- files -------------------------------------------------------------------------------------------------


async def upload_file(request: Request) -> Response:
    """Store a file for a batch: a form with purpose and file."""
    _check_admission(request)
    files: FileStore = request.app.state.batches.files
    boundary = boundary_of(request)
    announced = request.headers.get("content-length", "")
    file = await files.begin_upload(int(announced) if announced.isdecimal() else None)
    try:
        form = await read_form(request, boundary, file)
        filename = form.check()
        stored = await files.describe(file, owner_of(request), FILE_PURPOSE, filename, form.expires_after())
        await files.insert(stored)
    finally:
        await files.end(file)
    return json_response(stored.body())


async def list_files(request: Request) -> Response:
    """The files, or those of a ``purpose``, the last one first unless ``order`` is ``asc``."""
    files: FileStore = request.app.state.batches.files
    page = Page.of_request(request, default=MAX_FILES_LISTED, most=MAX_FILES_LISTED)
    found, has_more = await files.select(owner_of(request), page, request.query_params.get("purpose"))
    return json_response(list_body(found, has_more, StoredFile.body))


async def retrieve_file(request: Request) -> Response:
    """What is known about a file."""
    return json_response((await _find_file(request)).body())


async def file_content(request: Request) -> Response:
    """A file's bytes."""
    stored = await _find_file(request)
    path = request.app.state.batches.files.path(stored.id)
    return FileResponse(path, media_type="application/octet-stream", filename=stored.filename)


async def delete_file(request: Request) -> Response:
    """Forget a file."""
    stored = await _find_file(request)
    await request.app.state.batches.files.delete(stored.id)
    return json_response({"id": stored.id, "object": "file", "deleted": True})


async def _find_file(request: Request) -> StoredFile:
    file_id = request.path_params["id"]
    stored = await request.app.state.batches.files.get(owner_of(request), file_id)
    if stored is None:
        raise _no_file(file_id, "id")
    return stored


def _no_file(file_id: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(f"There is no file {file_id[:100]} (any more).", param=param, status=404)


# -- batches -----------------------------------------------------------------------------------------------


async def create_batch(request: Request) -> Response:
    """Begin to work through a file of requests."""
    _check_admission(request)
    server: ServerState = request.app.state.server
    batches: Batches = request.app.state.batches
    body = await decoded(await read_body(request, server.config.max_body_bytes), BatchRequest)
    check_batch_request(body)
    owner = owner_of(request)
    file = await batches.files.get(owner, body.input_file_id)
    if file is None:
        raise _no_file(body.input_file_id, "input_file_id")
    if file.purpose != FILE_PURPOSE:
        raise InvalidRequestError(
            f'input_file_id must name a file of purpose "{FILE_PURPOSE}"; {file.id} is of purpose '
            f'"{file.purpose}".',
            param="input_file_id",
        )
    batch = new_batch(body, int(time.time()))
    await batches.store.create(owner, batch)
    batches.runner.wake()
    return json_response(batch_body(batch))


async def list_batches(request: Request) -> Response:
    """The batches, the last one first."""
    batches: Batches = request.app.state.batches
    page = Page.of_request(request, default=20, most=MAX_BATCHES_LISTED)
    found, has_more = await batches.store.select(owner_of(request), page)
    return json_response(list_body(found, has_more, lambda batch: batch_body(batch.body)))


async def retrieve_batch(request: Request) -> Response:
    """How far a batch is."""
    return json_response(batch_body((await _find_batch(request)).body))


async def cancel_batch(request: Request) -> Response:
    """End a batch; what it has answered already is kept."""
    batches: Batches = request.app.state.batches
    batch = await batches.store.cancel(await _find_batch(request))
    batches.runner.wake()
    return json_response(batch_body(batch.body))


async def _find_batch(request: Request) -> StoredBatch:
    batch_id = request.path_params["id"]
    batch = await request.app.state.batches.store.get(owner_of(request), batch_id)
    if batch is None:
        raise InvalidRequestError(f"There is no batch {batch_id[:100]} (any more).", param="id", status=404)
    return batch


def new_batch(body: BatchRequest, now: int) -> dict[str, Any]:
    """A batch before anything has happened, as it is stored.

    Args:
        now: Unix time in seconds.
    """
    expires_after = output_expiry(body)
    return {
        "id": f"batch_{uuid.uuid4().hex}",
        "object": "batch",
        "endpoint": body.endpoint,
        "errors": None,
        "input_file_id": body.input_file_id,
        "completion_window": body.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "in_progress_at": None,
        "expires_at": now + window_seconds(body.completion_window),
        "finalizing_at": None,
        "completed_at": None,
        "failed_at": None,
        "expired_at": None,
        "cancelling_at": None,
        "cancelled_at": None,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": body.metadata,
        "output_expires_after": expires_after and {"anchor": "created_at", "seconds": expires_after},
    }


def batch_body(batch: dict[str, Any]) -> dict[str, Any]:
    """A stored batch as clients see it."""
    return {name: value for name, value in batch.items() if name != "output_expires_after"}


def _check_admission(request: Request) -> None:
    if not request.app.state.server.in_flight.admits:
        raise ServerStoppingError
