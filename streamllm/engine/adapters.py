"""The LoRA adapters that the engine knows: by name, and the parsed ones in memory.

An adapter is read and checked in a thread before any request that asks for it is queued, so that what is
wrong with it is its own requests' business. At most so many are kept in memory as the configuration says,
those that nobody uses going first, the least recently used before others; if all are in use, who needs
another one waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from streamllm.errors import ConfigError, InvalidRequestError, ModelLoadError, RequestFailedError
from streamllm.lora.request import LoRARequest

if TYPE_CHECKING:
    from streamllm.ops.lora import LoraAdapter

logger = logging.getLogger("streamllm.engine")

MAX_NAME_LENGTH = 200

NOT_ENABLED = "LoRA is not enabled: start with --enable-lora (offline: LLM(enable_lora=True))."


@dataclass(frozen=True)
class ServedAdapter:
    """An adapter that requests may ask for by its name.

    Attributes:
        request: name and folder, as a request would give them.
        content: a digest of its files as they were when it was read last.
        created: when it was loaded, Unix time.
    """

    request: LoRARequest
    content: bytes
    created: int

    @property
    def name(self) -> str:
        return self.request.lora_name

    @property
    def path(self) -> str:
        return self.request.lora_path


class AdapterRegistry:
    """
    Args:
        read: the adapter with a name in a folder, read and checked; blocking; raises ModelLoadError.
        capacity: parsed adapters in memory; 0: LoRA is not enabled.
        drop: called with the content of one that nobody will ask for again.
        reserved: names that no adapter may have: the base model's.
    """

    def __init__(
        self,
        read: Callable[[str, str], LoraAdapter],
        *,
        capacity: int,
        drop: Callable[[bytes], None],
        reserved: Iterable[str],
    ) -> None:
        self._read_from = read
        self._capacity = capacity
        self._drop = drop
        self._reserved = set(reserved)
        self._served: dict[str, ServedAdapter] = {}
        # By content, the least recently used first.
        self._parsed: dict[bytes, LoraAdapter] = {}
        self._content_of_path: dict[str, bytes] = {}
        self._retired: set[bytes] = set()
        self._users_of_content: Counter[bytes] = Counter()
        self._users_of_name: Counter[str] = Counter()
        self._turn = asyncio.Lock()
        self._some_unused = asyncio.Event()
        self._waits_for_room = False

    # -- names ---------------------------------------------------------------------------------------------

    def reserve(self, names: Iterable[str]) -> None:
        """No adapter may have these names.

        Raises:
            ConfigError: one has already.
        """
        self._reserved.update(names)
        for name in self._served:
            if name in self._reserved:
                raise ConfigError(f"--lora-modules: {name} is the base model's name; choose another.")

    def served(self) -> list[ServedAdapter]:
        """The adapters that requests may name, in the order in which they were loaded."""
        return list(self._served.values())

    def get(self, name: str | None) -> ServedAdapter | None:
        """The one of that name, if there is one."""
        return None if name is None else self._served.get(name)

    def load_modules(self, modules: Mapping[str, str]) -> None:
        """Read and serve adapters by name and folder; blocking, before anything runs.

        Raises:
            ModelLoadError: one of them cannot be read or does not fit the model.
        """
        for name, path in modules.items():
            try:
                self._check_name(name, load_inplace=False)
                self._evict_unused()
                self._serve(name, path, self._keep(path, self._read(name, path)))
            except (InvalidRequestError, ModelLoadError) as error:
                raise ModelLoadError(f"--lora-modules {name}={path}: {error}") from None

    async def load(self, name: str, path: str, *, load_inplace: bool = False) -> ServedAdapter:
        """Read an adapter's files and serve it. Requests that run are not concerned, not even by a
        replacement: they end with the weights that they began with.

        Args:
            load_inplace: replace the adapter of this name, if there is one.

        Raises:
            InvalidRequestError: the name is taken or not allowed (``param="lora_name"``); the files cannot be
                read, or do not fit the model (``"lora_path"``); LoRA is not enabled.
        """
        self._check_name(name, load_inplace)
        async with self._turn:
            self._check_name(name, load_inplace)
            try:
                adapter = await self._read_in(name, path)
            except (ModelLoadError, OSError) as error:
                raise InvalidRequestError(str(error), param="lora_path") from None
            return self._serve(name, path, adapter)

    def unload(self, name: str) -> None:
        """Serve an adapter no more.

        Raises:
            InvalidRequestError: (404) there is none of this name; (409) requests use it.
        """
        served = self._served.get(name)
        if served is None:
            raise InvalidRequestError(
                f'There is no adapter "{name[:MAX_NAME_LENGTH]}".',
                param="lora_name",
                code="model_not_found",
                status=404,
            )
        if count := self._users_of_name.get(name, 0):
            requests = "1 request uses" if count == 1 else f"{count} requests use"
            raise InvalidRequestError(
                f'{requests} the adapter "{name}"; unload it when they are done.',
                param="lora_name",
                code="adapter_in_use",
                status=409,
            )
        del self._served[name]
        self._retire(served)

    def _check_name(self, name: str, load_inplace: bool) -> None:
        if not self._capacity:
            raise InvalidRequestError(NOT_ENABLED)
        if not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
            raise InvalidRequestError(
                f"lora_name must have 1 to {MAX_NAME_LENGTH} printable characters.", param="lora_name"
            )
        if name in self._reserved:
            raise InvalidRequestError(
                f'"{name}" is the base model\'s name; give the adapter another.', param="lora_name"
            )
        if name in self._served and not load_inplace:
            raise InvalidRequestError(
                f'An adapter "{name}" is loaded already; send load_inplace true to replace it.',
                param="lora_name",
            )

    def _serve(self, name: str, path: str, adapter: LoraAdapter) -> ServedAdapter:
        replaced = self._served.get(name)
        served = ServedAdapter(LoRARequest(name, lora_path=path), adapter.content, int(time.time()))
        self._served[name] = served
        self._retired.discard(adapter.content)
        if replaced is not None and replaced.content != adapter.content:
            self._retire(replaced)
        logger.info(
            "adapter %s: rank %d, %.1f MB, from %s", name, adapter.rank, adapter.num_bytes / 1e6, path
        )
        return served

    def _retire(self, served: ServedAdapter) -> None:
        """Let go of an adapter's weights when its last request is done, unless others have the same."""
        paths = {each.path for each in self._served.values()}
        if served.path not in paths:
            self._content_of_path.pop(served.path, None)
        if all(each.content != served.content for each in self._served.values()):
            self._retired.add(served.content)
            self._let_go(served.content)

    # -- weights -------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def use(self, request: LoRARequest | None) -> AsyncIterator[LoraAdapter | None]:
        """The adapter that requests ask for, in memory until they are queued; ``None`` for none.

        Raises:
            InvalidRequestError: it cannot be read, or does not fit the model; LoRA is not enabled
                (``param="lora_request"``).
            RequestFailedError: it was served, and cannot be read again.
        """
        if request is None:
            yield None
            return
        path = self._path_of(request)
        name = request.lora_name
        self._users_of_name[name] += 1
        try:
            adapter = await self._get(name, path, reload=request.load_inplace)
            try:
                yield adapter
            finally:
                self._release_content(adapter.content)
        finally:
            self._release_name(name)

    def retain(self, name: str, adapter: LoraAdapter) -> None:
        """A request with an adapter in :meth:`use` is queued: it is in use until :meth:`release`."""
        self._users_of_name[name] += 1
        self._users_of_content[adapter.content] += 1

    def release(self, name: str, adapter: LoraAdapter) -> None:
        """A request has ended."""
        self._release_name(name)
        self._release_content(adapter.content)

    def _path_of(self, request: LoRARequest) -> str:
        if not isinstance(request, LoRARequest):
            raise InvalidRequestError("lora_request must be a LoRARequest.", param="lora_request")
        if not self._capacity:
            raise InvalidRequestError(NOT_ENABLED, param="lora_request")
        if request.lora_path:
            return request.lora_path
        served = self._served.get(request.lora_name)
        if served is None:
            raise InvalidRequestError(
                f'There is no adapter "{request.lora_name[:MAX_NAME_LENGTH]}"; give its lora_path.',
                param="lora_request",
            )
        return served.path

    async def _get(self, name: str, path: str, *, reload: bool) -> LoraAdapter:
        """An adapter from memory or from its files, with a user more."""
        # Who waits for room must not wait for ever: others wait behind it, until a place is free.
        adapter = None if reload or self._waits_for_room else self._known(path)
        if adapter is None:
            async with self._turn:
                adapter = None if reload else self._known(path)
                if adapter is None:
                    adapter = await self._read_again(name, path)
        self._users_of_content[adapter.content] += 1
        return adapter

    def _known(self, path: str) -> LoraAdapter | None:
        content = self._content_of_path.get(path)
        adapter = None if content is None else self._parsed.pop(content, None)
        if adapter is not None:
            self._parsed[adapter.content] = adapter
        return adapter

    async def _read_again(self, name: str, path: str) -> LoraAdapter:
        served = self._served.get(name)
        if served is not None and served.path != path:
            served = None
        try:
            adapter = await self._read_in(name, path)
        except (ModelLoadError, OSError) as error:
            if served is not None:
                raise RequestFailedError(f"the adapter {name} cannot be read again: {error}") from None
            raise InvalidRequestError(str(error), param="lora_request") from None
        if served is not None and served.content != adapter.content:
            logger.warning("the files of adapter %s have changed since it was loaded", name)
            self._served[name] = replace(served, content=adapter.content)
        return adapter

    async def _read_in(self, name: str, path: str) -> LoraAdapter:
        """Read an adapter's files in a thread, when there is room for it."""
        await self._room()
        return self._keep(path, await asyncio.to_thread(self._read, name, path))

    def _read(self, name: str, path: str) -> LoraAdapter:
        return self._read_from(name, os.path.expanduser(path))

    def _keep(self, path: str, adapter: LoraAdapter) -> LoraAdapter:
        """The adapter, or one with the same content that is in memory."""
        adapter = self._parsed.pop(adapter.content, adapter)
        self._parsed[adapter.content] = adapter
        self._content_of_path[path] = adapter.content
        return adapter

    async def _room(self) -> None:
        while not self._evict_unused():
            self._waits_for_room = True
            self._some_unused.clear()
            try:
                await self._some_unused.wait()
            finally:
                self._waits_for_room = False

    def _evict_unused(self) -> bool:
        """Whether there is room for one more adapter, after those that nobody uses have made it."""
        unused = [content for content in self._parsed if not self._users_of_content[content]]
        for content in unused:
            if len(self._parsed) < self._capacity:
                break
            self._forget(content)
        return len(self._parsed) < self._capacity

    def _forget(self, content: bytes) -> None:
        self._parsed.pop(content, None)
        self._users_of_content.pop(content, None)
        for path in [path for path, known in self._content_of_path.items() if known == content]:
            del self._content_of_path[path]

    def _release_name(self, name: str) -> None:
        self._users_of_name[name] -= 1
        if not self._users_of_name[name]:
            del self._users_of_name[name]

    def _release_content(self, content: bytes) -> None:
        self._users_of_content[content] -= 1
        self._let_go(content)

    def _let_go(self, content: bytes) -> None:
        if self._users_of_content[content]:
            return
        if content in self._retired:
            self._retired.discard(content)
            self._forget(content)
            self._drop(content)
        self._some_unused.set()
