"""The engine's thread: receive, schedule, execute, update, publish."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from dataclasses import dataclass

from headrace.engine.runner import Runner
from headrace.errors import EngineDead, GenerationFailed, HeadraceError
from headrace.scheduler.scheduler import Scheduler, StepOutcome
from headrace.types.events import TokenOutput
from headrace.types.request import GenerationRequest

logger = logging.getLogger(__name__)

Sink = Callable[[TokenOutput | HeadraceError], None]
"""Takes a request's outputs, or the error that ended it, on their way to whoever asked. Never blocks."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Begin a request."""

    request: GenerationRequest
    sink: Sink


@dataclass(frozen=True, slots=True)
class Abort:
    """Give a request up. An id that is not known (any more) is no error: it may just have finished."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread after the step in progress."""


Command = Submit | Abort | Stop


class Loop:
    """What the thread does until it is stopped. Only `inbox` may be touched from outside."""

    def __init__(self, runner: Runner, scheduler: Scheduler, inbox: queue.SimpleQueue[Command]) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._inbox = inbox
        self._requests: dict[str, GenerationRequest] = {}
        self._sinks: dict[str, Sink] = {}
        self._is_stopping = False

    def run(self) -> None:
        """Work until a Stop arrives. Whatever raises here ends the thread; see `fail_all`."""
        while True:
            self._receive()
            self._runner.free(self._scheduler.released())
            if self._is_stopping:
                break
            plan = self._scheduler.schedule()
            if plan.chunks:
                result = self._runner.execute(plan, self._requests)
                self._publish(self._scheduler.update(result))
        self.fail_all(EngineDead("the server is shutting down"))

    def fail_all(self, error: HeadraceError) -> None:
        """End every request with an error, also those that still lie in the inbox."""
        while not self._inbox.empty():
            command = self._inbox.get()
            if isinstance(command, Submit):
                command.sink(error)
        for sink in self._sinks.values():
            sink(error)
        self._sinks.clear()
        self._requests.clear()

    def _receive(self) -> None:
        """Take all commands; wait for one if there is nothing to compute."""
        is_idle = self._scheduler.num_running + self._scheduler.num_waiting == 0
        if is_idle:
            # rows of what was just finished or aborted are freed before the wait, not after it
            self._runner.free(self._scheduler.released())
            self._take(self._inbox.get())
        while not self._inbox.empty():
            self._take(self._inbox.get())

    def _take(self, command: Command) -> None:
        if isinstance(command, Stop):
            self._is_stopping = True
        elif isinstance(command, Abort):
            self._scheduler.abort(command.request_id)
            self._forget(command.request_id)
        else:
            try:
                self._scheduler.add(command.request)
            except HeadraceError as error:
                command.sink(error)
                return
            self._requests[command.request.request_id] = command.request
            self._sinks[command.request.request_id] = command.sink

    def _publish(self, outcome: StepOutcome) -> None:
        for output in outcome.outputs:
            self._sinks[output.request_id](output)
            if output.finish_reason is not None:
                self._forget(output.request_id)
        for failure in outcome.failures:
            error = failure.error
            if not isinstance(error, HeadraceError):
                error = GenerationFailed(f"the engine could not go on with this request: {type(error).__name__}")
                error.__cause__ = failure.error
            self._sinks[failure.request_id](error)
            self._forget(failure.request_id)

    def _forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._sinks.pop(request_id, None)
