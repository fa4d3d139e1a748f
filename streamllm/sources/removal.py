"""Deleting a model from the cache that it lies in."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from streamllm.errors import ModelLoadError
from streamllm.sources import pypi
from streamllm.sources.cache import exclusive
from streamllm.sources.hub import HubName
from streamllm.sources.hub_cache import CachedRepository, snapshot_files
from streamllm.sources.hub_files import choose_gguf


@dataclass(frozen=True)
class Removal:
    """A model that can be deleted.

    Attributes:
        name: as the user gave it.
        files: what will be deleted, without links.
        lock: held by whoever downloads the model.
    """

    name: str
    files: tuple[Path, ...]
    lock: Path
    _delete: Callable[[], None]

    @property
    def size(self) -> int:
        """Bytes that will be free."""
        return sum(file.stat().st_size for file in self.files if file.exists())

    def execute(self) -> None:
        """Deletes the model.

        Raises:
            ModelLoadError: another process downloads or reads it, or the cache cannot be written.
        """
        try:
            self.lock.parent.mkdir(parents=True, exist_ok=True)
            with exclusive(self.lock, on_wait=self._refuse):
                if users := _users_of(self.files):
                    raise ModelLoadError(
                        f"The model {self.name} is in use by process {users[0]}. Stop it first."
                    )
                self._delete()
        except OSError as error:
            raise ModelLoadError(
                f"The model {self.name} cannot be deleted: {error.strerror or error} ({error.filename})."
            ) from error

    def _refuse(self) -> None:
        raise ModelLoadError(f"The model {self.name} is being downloaded by another process. Stop it first.")


def find_removal(name: str) -> Removal:
    """What deleting the model ``name`` means.

    Raises:
        ModelLoadError: it is not in a cache, or ``name`` is not a name.
    """
    if name.startswith("pypi:"):
        return _of_wheel(name)
    hub_name = HubName.parse(name)
    if hub_name is None or Path(name).exists():
        raise ModelLoadError(
            f"{name} is not the name of a model in a cache (streamllm list shows them); files elsewhere are "
            "yours to delete."
        )
    repository = CachedRepository(hub_name.repo_id)
    if not repository.folder.is_dir():
        raise _not_there(name)
    lock = repository.locks / "streamllm.lock"
    if hub_name.file is None:
        blobs = [path for path in repository.folder.rglob("*") if path.is_file() and not path.is_symlink()]
        return Removal(name, tuple(blobs), lock, repository.remove)
    pointers = _gguf_pointers(repository, hub_name)
    kept = {_blob_of(path) for path in _pointers(repository) if path not in pointers}
    blobs = sorted({_blob_of(path) for path in pointers} - kept)
    return Removal(name, tuple(blobs), lock, partial(_delete_from, repository, [*pointers, *blobs]))


def _of_wheel(name: str) -> Removal:
    source = pypi.WheelSource.parse(name)
    folder = pypi.folder_of(source)
    ggufs = sorted(folder.glob("*.gguf"))
    wanted = [path for path in ggufs if source.file in (None, path.name)]
    if not wanted:
        raise _not_there(name)
    delete = partial(_delete_files, wanted) if len(wanted) < len(ggufs) else partial(shutil.rmtree, folder)
    return Removal(name, tuple(wanted), folder / ".lock", delete)


def _gguf_pointers(repository: CachedRepository, name: HubName) -> list[Path]:
    """The links to a GGUF's files in all revisions."""
    found: list[Path] = []
    for snapshot in (repository.folder / "snapshots").glob("*"):
        files = choose_gguf(snapshot_files(snapshot), name.file, name.repo_id) or ()
        found += [snapshot / file for file in files]
    if not found:
        raise _not_there(str(name))
    return found


def _blob_of(pointer: Path) -> Path:
    """The blob in this repository; it may itself be a link into a store that repositories share."""
    if not pointer.is_symlink():
        return pointer
    return Path(os.path.normpath(pointer.parent / os.readlink(pointer)))


def _pointers(repository: CachedRepository) -> list[Path]:
    return [path for path in (repository.folder / "snapshots").rglob("*") if path.is_file()]


def _delete_from(repository: CachedRepository, files: Iterable[Path]) -> None:
    _delete_files(files)
    if not _pointers(repository):
        repository.remove()


def _delete_files(files: Iterable[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def _not_there(name: str) -> ModelLoadError:
    return ModelLoadError(f"The model {name} is not in a cache; streamllm list shows those that are.")


def _users_of(files: Iterable[Path]) -> list[int]:
    """Other processes that have mapped one of the files, as far as Linux lets us see."""
    wanted = {str(file.resolve()) for file in files}
    users = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            mapped = {line[73:].rstrip("\n") for line in maps.read_text(errors="replace").splitlines()}
        except OSError:
            continue
        if mapped & wanted and int(maps.parent.name) != os.getpid():
            users.append(int(maps.parent.name))
    return users
