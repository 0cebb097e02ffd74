"""What is known of a served model, loaded or not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ModelState(StrEnum):
    SLEEPING = "sleeping"
    """A request loads it."""
    LOADING = "loading"
    LOADED = "loaded"
    FAILED = "failed"
    """The latest attempt to load it failed, or its engine died; a later request tries again."""


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A served model. is_kept: never unloaded for another one. reason: why it failed.

    weights_bytes, budget_bytes: in memory, and for its states and caches; 0 unless it is loaded. num_requests: that it
    works on or that wait for it. idle_s: since the last of these; None while there are some, and before the first.
    loading_s, progress: of a load in progress, the latter from 0 to 1 as far as it is known.
    """

    names: tuple[str, ...]
    state: ModelState
    is_kept: bool
    reason: str | None = None
    weights_bytes: int = 0
    budget_bytes: int = 0
    num_requests: int = 0
    idle_s: float | None = None
    loading_s: float | None = None
    progress: float | None = None
