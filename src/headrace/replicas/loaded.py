"""What a replica gets from the caller: its models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.session.models import Models


@dataclass(frozen=True, slots=True)
class LoadedReplica:
    """stop: ends the engine and its process."""

    models: Models
    stop: Callable[[], object]
