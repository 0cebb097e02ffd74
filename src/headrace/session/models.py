"""The served models: which one a request means, and loading and unloading them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from headrace.errors import InvalidRequest, ModelNotFound
from headrace.session.embeddings import AnySession, EmbeddingSession
from headrace.types.model import ModelTraits
from headrace.types.status import WarmUpStatus


class ModelEntry:
    """A served model. names: under which clients ask for it, the main one first. source: another such name."""

    def __init__(self, names: Sequence[str], source: str, session: AnySession) -> None:
        self.names = tuple(names)
        self.source = source
        self.session = session

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names under which the model answers with an adapter."""
        return () if isinstance(self.session, EmbeddingSession) else self.session.adapters.names

    @property
    def traits(self) -> ModelTraits | None:
        """None while it is not loaded."""
        return self.session.traits


@dataclass(frozen=True, slots=True)
class Target:
    """What a request's model name means. name: as the answer shows it. adapter: its name; None for none."""

    entry: ModelEntry
    name: str
    adapter: str | None = None


class Models:
    """All served models. Belongs to one event loop.

    takes_any_name: an unknown name, or none, means the first model. needs_name: a request without a name is refused
    even if there is one model only.
    """

    def __init__(
        self, entries: Sequence[ModelEntry], *, takes_any_name: bool = False, needs_name: bool = False
    ) -> None:
        self.entries = tuple(entries)
        self._takes_any_name = takes_any_name
        self._needs_name = needs_name

    @classmethod
    def of(cls, session: AnySession, names: Sequence[str] = (), *, takes_any_name: bool = False) -> Models:
        """One model that is loaded already. names: empty for the model's own."""
        entry = ModelEntry(names or (session.model.name,), session.model.name, session)
        return cls((entry,), takes_any_name=takes_any_name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for entry in self.entries for name in (*entry.names, *entry.adapters))

    def resolve(self, name: str | None) -> Target:
        """The model of this name. Raises ModelNotFound, and InvalidRequest without a name."""
        for entry in self.entries:
            if name in entry.names:
                return Target(entry, str(name))
            if name in entry.adapters:
                return Target(entry, str(name), name)
            if name == entry.source:
                return Target(entry, entry.name)
        if self._takes_any_name or (name is None and len(self.entries) == 1 and not self._needs_name):
            return Target(self.entries[0], self.entries[0].name)
        if name is None:
            raise InvalidRequest(f"model is missing; served: {', '.join(self.names)}", param="model")
        raise ModelNotFound(f"The model `{name}` does not exist; served: {', '.join(self.names)}", param="model")

    @asynccontextmanager
    async def use(self, entry: ModelEntry, request_id: str) -> AsyncGenerator[AnySession, None]:
        """The entry's session, which stays loaded inside the block; loads it first if need be.

        request_id: of the request, under which `abort` ends the wait for loading.
        """
        yield entry.session

    def loaded(self) -> tuple[tuple[ModelEntry, AnySession], ...]:
        return tuple((entry, entry.session) for entry in self.entries)

    def health(self) -> str | None:
        """None, or why no request can be served."""
        return self.entries[0].session.health()

    @property
    def main(self) -> ModelEntry:
        """The one whose figures stand for the server where there is room for one."""
        return self.entries[0]

    def warm_up_status(self) -> WarmUpStatus:
        return self.main.session.warm_up_status()

    async def clear_cache(self) -> int:
        """Drop what is not in use of all prefix caches. Returns the bytes freed."""
        return sum(await asyncio.gather(*(session.clear_cache() for _, session in self.loaded())))

    async def abort(self, request_id: str) -> bool:
        """End a request by its id in whichever model works on it. Returns False if none does."""
        ended = await asyncio.gather(*(session.abort(request_id) for _, session in self.loaded()))
        return any(ended)
