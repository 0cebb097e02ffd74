"""Commands that the engine's thread takes between two steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
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


def new_result() -> Future[Any]:
    """A future that can't be cancelled, so that it can still be set after its caller has left."""
    result = Future[Any]()
    result.set_running_or_notify_cancel()
    return result


@dataclass(frozen=True, slots=True)
class LoopCall:
    """Call a function with the loop. result: may raise ModelError or EngineDead."""

    call: Callable[[Loop], Any]
    result: Future[Any] = field(default_factory=new_result)


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread after the step in progress."""


Command = Submit | Abort | LoopCall | Stop


@dataclass(frozen=True, slots=True)
class ThreadCall:
    """Call a function in another thread, while the engine's goes on. result: may raise a HeadraceError."""

    call: Callable[[EngineThread], Any]
    result: Future[Any] = field(default_factory=new_result)
