"""A hub model's config and tensor directory without its weights, for planning.

The files that this makes have their real size and only what stands in their headers; the rest is a hole that
takes no space on the disk and reads as zeros.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from streamllm.errors import ModelLoadError
from streamllm.sources.blob_download import TIMEOUT, RemoteFile
from streamllm.sources.gguf_file import GGUFFile
from streamllm.sources.hub import HubName, Repository, explain
from streamllm.sources.hub_cache import shards_of
from streamllm.sources.hub_files import description_files, weight_index
from streamllm.sources.model_files import ModelFiles

if TYPE_CHECKING:
    import httpx

_FIRST_READ = 1 << 18
_LARGEST_HEADER = 1 << 27
_PARALLEL = 8


def fetch_headers(name: HubName, *, revision: str | None, folder: Path) -> ModelFiles:
    """Config and headers of a hub model, in the empty ``folder``.

    Raises:
        ModelLoadError: as in :func:`streamllm.sources.hub.fetch`; or the weights are of a kind whose headers
            cannot be read from afar.
    """
    import httpx

    repository = Repository.ask(name.repo_id, revision)
    ggufs = repository.ggufs(name)
    headers = {**repository.headers, "Accept-Encoding": "identity"}
    try:
        with httpx.Client(headers=headers, follow_redirects=True, timeout=TIMEOUT) as client:
            if ggufs:
                path = folder / Path(ggufs[0]).name
                _fetch_gguf_header(client, repository.remote_file(ggufs[0]), path)
                return ModelFiles(str(name), str(name), "gguf", path)
            for file in description_files(repository.files):
                if file.endswith(".json") and not file.startswith(("tokenizer", "vocab", "added_tokens")):
                    content = _read(client, repository.remote_file(file), 0, None)
                    (folder / Path(file).name).write_bytes(content)
            _fetch_safetensors_headers(client, repository, name, folder)
    except httpx.HTTPError as error:
        raise ModelLoadError(explain(name.repo_id, revision, error)) from error
    return ModelFiles(str(name), str(name), "folder", folder)


def _fetch_safetensors_headers(
    client: httpx.Client, repository: Repository, name: HubName, folder: Path
) -> None:
    index = str(weight_index(repository.files))
    if "safetensors" not in index:
        raise ModelLoadError(
            f"The hub's {name} has *.bin weights, which say what they hold at their end only: fetch it with "
            f"`streamllm pull {name}` and plan then."
        )
    shards = (shards_of(folder / index) or []) if index.endswith(".index.json") else [index]
    files = [repository.remote_file(shard) for shard in shards if shard in repository.files]
    with ThreadPoolExecutor(_PARALLEL) as pool:
        list(pool.map(lambda file: _fetch_safetensors_header(client, file, folder), files))


def _fetch_safetensors_header(client: httpx.Client, file: RemoteFile, folder: Path) -> None:
    header = _read(client, file, 0, _FIRST_READ)
    length = 8 + int.from_bytes(header[:8], "little")
    if len(header) < length <= _LARGEST_HEADER:
        header += _read(client, file, len(header), length - len(header))
    _write_sparse(folder / file.name, header[:length], file.size)


def _fetch_gguf_header(client: httpx.Client, file: RemoteFile, path: Path) -> None:
    """Reads twice as much again and again until the header is whole: it does not say how long it is."""
    data = b""
    while True:
        data += _read(client, file, len(data), max(len(data), 16 * _FIRST_READ))
        _write_sparse(path, data, len(data))
        try:
            GGUFFile(path, arrays=False)
            break
        except ModelLoadError:
            if len(data) >= min(file.size, _LARGEST_HEADER):
                raise
    _write_sparse(path, data, file.size)


def _write_sparse(path: Path, start: bytes, size: int) -> None:
    with open(path, "wb") as target:
        target.write(start)
        target.truncate(size)


def _read(client: httpx.Client, file: RemoteFile, offset: int, length: int | None) -> bytes:
    """Bytes of a file on the hub, fewer at its end; ``None``: all of it."""
    last = file.size if length is None else min(offset + length, file.size)
    if last <= offset:
        return b""
    with client.stream("GET", file.url, headers={"Range": f"bytes={offset}-{last - 1}"}) as response:
        response.raise_for_status()
        skipped = 0 if response.status_code == 206 else offset
        data = bytearray()
        for chunk in response.iter_raw():
            data += chunk
            if len(data) >= skipped + last - offset:
                break
    return bytes(data[skipped : skipped + last - offset])
