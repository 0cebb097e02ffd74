"""What a replica gets from the caller: its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.session.session import Session


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model. stop: ends its engine."""

    session: Session
    stop: Callable[[], object]
