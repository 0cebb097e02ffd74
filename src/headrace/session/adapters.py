"""The names under which adapters are served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from headrace.engine.engine import Engine
from headrace.errors import InvalidRequest, ModelError, ModelNotFound
from headrace.types.model import AdapterDescription


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """fingerprint: what requests carry. created: in Unix seconds."""

    name: str
    fingerprint: str
    created: int


class ServedAdapters:
    """Adapters by name; loaded and unloaded one at a time."""

    def __init__(self, engine: Engine, adapters: Iterable[AdapterDescription]) -> None:
        self._engine = engine
        now = int(time.time())
        self._adapters = {each.name: ServedAdapter(each.name, each.fingerprint, now) for each in adapters}
        self._lock = asyncio.Lock()

    def all(self) -> tuple[ServedAdapter, ...]:
        return tuple(self._adapters.values())

    def find(self, name: str | None) -> ServedAdapter | None:
        return None if name is None else self._adapters.get(name)

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
            self._adapters[name] = ServedAdapter(name, fingerprint, int(time.time()))
            await self._drop_unnamed(before)

    async def unload(self, name: str) -> None:
        """Refuse new requests for an adapter; running ones finish. Raises ModelNotFound and EngineDead."""
        async with self._lock:
            adapter = self._adapters.pop(name, None)
            if adapter is None:
                raise ModelNotFound(f"there is no adapter {name!r}", param="lora_name")
            await self._drop_unnamed(adapter)

    async def _drop_unnamed(self, adapter: ServedAdapter | None) -> None:
        """Drop an adapter in the engine unless it has another name."""
        if adapter is not None and all(each.fingerprint != adapter.fingerprint for each in self._adapters.values()):
            await self._engine.drop_adapter(adapter.fingerprint)
