"""The served models by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import InvalidRequest, ModelNotFound
from headrace.session.embeddings import AnySession
from headrace.session.model_entry import ModelEntry


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The model for a name in a request. name: as shown in the answer. adapter: its name; None for none."""

    entry: ModelEntry
    name: str
    adapter: str | None = None


class ServedModels:
    """takes_any_name: an unknown name, or none, means the first model.

    needs_name: a request without a name is refused even if there is one model only.
    """

    def __init__(
        self, entries: Sequence[ModelEntry], *, takes_any_name: bool = False, needs_name: bool = False
    ) -> None:
        self.entries = tuple(entries)
        self._takes_any_name = takes_any_name
        self._needs_name = needs_name

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for entry in self.entries for name in (*entry.names, *entry.adapters))

    @property
    def main(self) -> ModelEntry:
        """The model for routes and figures without a model's name: the first loaded one, else the first."""
        return next((entry for entry in self.entries if entry.session is not None), self.entries[0])

    def loaded(self) -> tuple[tuple[ModelEntry, AnySession], ...]:
        return tuple((entry, entry.session) for entry in self.entries if entry.session is not None)

    def resolve(self, name: str | None) -> ResolvedModel:
        """The model for a request. Raises ModelNotFound, and InvalidRequest without a name."""
        if name is not None and (found := self._find(name)) is not None:
            return found
        if self._takes_any_name or (name is None and len(self.entries) == 1 and not self._needs_name):
            return ResolvedModel(self.entries[0], self.entries[0].name)
        if name is None:
            raise InvalidRequest(f"model is missing; served: {', '.join(self.names)}", param="model")
        raise self._not_found(name)

    def named(self, name: str) -> ModelEntry:
        """The model of exactly this name. Raises ModelNotFound."""
        if (found := self._find(name)) is None:
            raise self._not_found(name)
        return found.entry

    def _find(self, name: str) -> ResolvedModel | None:
        for entry in self.entries:
            if name in entry.names:
                return ResolvedModel(entry, name)
            if name in entry.adapters:
                return ResolvedModel(entry, name, name)
        return next((ResolvedModel(entry, entry.name) for entry in self.entries if name == entry.source.spec), None)

    def _not_found(self, name: str) -> ModelNotFound:
        return ModelNotFound(f"The model `{name}` does not exist; served: {', '.join(self.names)}", param="model")
