"""The names under which adapters are served."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from headrace.engine.engine import Engine
from headrace.errors import HeadraceError, InvalidRequest, ModelError, ModelNotFound
from headrace.types.model import AdapterDescription
from headrace.types.status import AdapterStatus, Phase, RequestStatus

log = logging.getLogger("headrace.session")


class ServedAdapters:
    """Adapters by name; loaded and unloaded one at a time."""

    def __init__(self, engine: Engine, adapters: Iterable[AdapterDescription]) -> None:
        self._engine = engine
        self._adapters = {each.name: each.fingerprint for each in adapters}
        self._folders: dict[str, Path] = {}
        """Of those that were loaded while serving."""
        self._lock = asyncio.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._adapters)

    @property
    def folders(self) -> dict[str, Path | None]:
        """By name; None for those that the model was loaded with."""
        return {name: self._folders.get(name) for name in self._adapters}

    async def restore(self, folders: Mapping[str, Path | None]) -> None:
        """Serve the adapters that were served before the model was unloaded, and no others."""
        for name in self.names:
            if name not in folders or folders[name] is not None:
                await self.unload(name)
        for name, folder in folders.items():
            try:
                if folder is not None:
                    await self.load(name, folder)
            except HeadraceError as error:
                log.warning("the adapter %s is served no longer: %s", name, error.message)

    def status(self, requests: Iterable[RequestStatus]) -> AdapterStatus | None:
        """requests: all in progress. None while no adapter is served."""
        if not self._adapters:
            return None
        by_phase = [(request.phase is Phase.QUEUED, request.adapter) for request in requests]
        running = {adapter for is_queued, adapter in by_phase if not is_queued}
        waiting = {adapter for is_queued, adapter in by_phase if is_queued}
        return AdapterStatus(self.names, self._names_of(running), self._names_of(waiting))

    def _names_of(self, fingerprints: Collection[str | None]) -> tuple[str, ...]:
        return tuple(name for name, fingerprint in self._adapters.items() if fingerprint in fingerprints)

    def fingerprint(self, name: str | None) -> str | None:
        """The adapter's fingerprint; None for the model alone. Raises ModelNotFound."""
        if name is None:
            return None
        if name not in self._adapters:
            raise ModelNotFound(f"The model `{name}` does not exist", param="model")
        return self._adapters[name]

    async def load(self, name: str, folder: Path, *, replaces: bool = False) -> None:
        """Serve the adapter of a folder under a name. Raises InvalidRequest and EngineDead.

        replaces: whether the name may be another adapter's, whose running requests finish with it.
        """
        async with self._lock:
            before = self._adapters.get(name)
            if before is not None and not replaces:
                raise InvalidRequest(f"the adapter {name!r} is loaded already", param="lora_name")
            try:
                fingerprint = await self._engine.load_adapter(folder)
            except ModelError as error:
                raise InvalidRequest(
                    f"the adapter {name!r} can't be loaded: {error.message}", param="lora_path"
                ) from error
            self._adapters[name], self._folders[name] = fingerprint, folder
            await self._drop_unnamed(before)

    async def unload(self, name: str) -> None:
        """Refuse new requests for an adapter; running ones finish. Raises ModelNotFound and EngineDead."""
        async with self._lock:
            fingerprint = self._adapters.pop(name, None)
            self._folders.pop(name, None)
            if fingerprint is None:
                raise ModelNotFound(f"there is no adapter {name!r}", param="lora_name")
            await self._drop_unnamed(fingerprint)

    async def _drop_unnamed(self, fingerprint: str | None) -> None:
        """Drop an adapter in the engine unless it has another name."""
        if fingerprint is not None and fingerprint not in self._adapters.values():
            await self._engine.drop_adapter(fingerprint)
