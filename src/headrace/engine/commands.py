"""What an engine's thread is told to do between two steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.engine.delivery import OutputQueue
from headrace.types.request import GenerationRequest

if TYPE_CHECKING:
    from headrace.engine.loop import Loop
    from headrace.engine.thread import EngineThread


@dataclass(frozen=True, slots=True)
class Submit:
    """Begin a request. now: when it was submitted, in monotonic seconds."""

    request: GenerationRequest
    outputs: OutputQueue
    now: float


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request. reason: counted by the metrics.

    An unknown id is no error: the request may just have finished.
    """

    request_id: str
    reason: str = "abort"


@dataclass(frozen=True, slots=True)
class Ask:
    """Call a function with the loop. `reply` gets its result, or the error: its ModelError, or why the engine ends."""

    call: Callable[[Loop], Any]
    reply: Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread after the step in progress."""


Command = Submit | Abort | Ask | Stop


@dataclass(frozen=True, slots=True)
class AskBeside:
    """Call a function in a thread beside the engine's, which goes on meanwhile. reply: as in Ask."""

    call: Callable[[EngineThread], Any]
    reply: Callable[[Any], None]
