"""What an engine's thread is told to do between two steps."""

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


def new_answer() -> Future[Any]:
    """A future that can't be cancelled, so that it can be set when its caller waits no longer."""
    answer = Future[Any]()
    answer.set_running_or_notify_cancel()
    return answer


@dataclass(frozen=True, slots=True)
class Ask:
    """Call a function with the loop. answer: its result, or its ModelError, or EngineDead."""

    call: Callable[[Loop], Any]
    answer: Future[Any] = field(default_factory=new_answer)


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread after the step in progress."""


Command = Submit | Abort | Ask | Stop


@dataclass(frozen=True, slots=True)
class AskBeside:
    """Call a function in a thread beside the engine's, which goes on meanwhile. answer: or a HeadraceError."""

    call: Callable[[EngineThread], Any]
    answer: Future[Any] = field(default_factory=new_answer)
