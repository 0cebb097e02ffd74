"""How models of one process share the memory of a device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """The part of the device's memory that a model has beside others of this process.

    num_bytes: for its weights, states and caches together. process_bytes: for those of all models. loaded_bytes: of the
    others' weights.
    """

    num_bytes: int
    process_bytes: int
    loaded_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """What a loaded model takes. least_bytes: beside its weights, for one request of the whole context.

    most_bytes: beside its weights, as configured for it alone.
    """

    weights_bytes: int
    least_bytes: int
    most_bytes: int
