"""What the engine's thread is told to do between two steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.engine.adapters import DropAdapter, LoadAdapter
from headrace.engine.delivery import OutputQueue
from headrace.types.events import Forecast
from headrace.types.request import GenerationRequest
from headrace.types.status import EngineStatus


@dataclass(frozen=True, slots=True)
class Submit:
    """Begin a request. now: when it was submitted, in monotonic seconds."""

    request: GenerationRequest
    outputs: OutputQueue
    now: float


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request; `reply` gets whether it was in progress. reason: counted by the metrics.

    An unknown id is no error: the request may just have finished.
    """

    request_id: str
    reply: Callable[[bool], None] | None = None
    reason: str = "abort"


@dataclass(frozen=True, slots=True)
class Inspect:
    """Reply with the status between two steps."""

    reply: Callable[[EngineStatus], None]


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread after the step in progress."""


@dataclass(frozen=True, slots=True)
class ClearCache:
    """Drop all entries of the prefix cache that are not in use; `reply` gets the bytes freed."""

    reply: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Reply with what a request's prompts would cost; nothing is reserved."""

    requests: tuple[GenerationRequest, ...]
    reply: Callable[[Forecast], None]


@dataclass(frozen=True, slots=True)
class SetBudget:
    """Change the bytes for states and caches, or come as close as requests in progress allow.

    `reply` gets the budget from now on, once caches have given up what is over it.
    """

    budget_bytes: int
    reply: Callable[[int], None]


Command = Submit | Abort | Inspect | LoadAdapter | DropAdapter | ClearCache | Estimate | SetBudget | Stop
