"""A process that only has engines: the side that serves requests. `process.py` is the other side."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from operator import methodcaller
from pathlib import Path
from typing import Any

from headrace.cancellation import interrupted_by
from headrace.config import Config
from headrace.engine.commands import Abort, Ask, AskBeside, Command, Stop, Submit, new_answer
from headrace.engine.delivery import Item, OutputQueue, deliver
from headrace.errors import EngineDead, HeadraceError
from headrace.messages import OneWayCalls
from headrace.types.events import TokenOutput
from headrace.types.memory import MemoryShare, ModelMemory
from headrace.types.model import ModelDescription
from headrace.types.status import DeviceStatus, WarmUpStatus

_PROGRAM = (
    "import sys; package = sys.argv.pop(1); sys.path[:0] = [package] * (package not in sys.path); "
    "from headrace.cli.engine_process import main; main()"
)
"""Runs the same package as this process, and no module of the working directory."""

_END_S = 0.3
"""Time for the process to end once its connection is closed, which takes milliseconds; then it is killed."""


class EngineProcess:
    """A process for engines, with a thread here that takes what comes from it. Also the host of those engines."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        # nothing is sent: the process ends when our end is closed, even while it imports
        life, self._life = os.pipe()
        package = str(Path(__file__).parents[2])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, package, str(theirs.fileno()), str(life)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), life],
                start_new_session=True,  # Ctrl-C is for the server, which ends its engines itself
            )
        os.close(life)
        self._calls = OneWayCalls(ours, self)
        self._numbers = count()
        self._cores: dict[int, RemoteCore] = {}
        self._answers: dict[int, tuple[int | None, Future[Any]]] = {}
        """By question: of which engine, and its answer."""
        self._memory_in_use = 0
        self._is_closed = False
        self._end: str | None = None
        """Why the process has ended."""
        threading.Thread(target=self._serve, name="headrace-engines", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def launch(self, config: Config, share: MemoryShare | None = None) -> RemoteCore:
        """Begin to load a model. `RemoteCore.wait` waits for it."""
        core = RemoteCore(next(self._numbers), self, self._calls)
        self._cores[core.number] = core
        self._calls.call("launch", core.number, config, share)
        if self._end is not None:
            core.ended(self._end)
            core.is_stopped.set()
        return core

    def device_memory(self, utilization: float | None) -> int:
        num_bytes: int = self.ask(methodcaller("device_memory", utilization))
        return num_bytes

    def device(self) -> DeviceStatus:
        device: DeviceStatus = self.ask(methodcaller("device"))
        return device

    def memory_in_use(self) -> int:
        """As of some tenths of a second ago."""
        return self._memory_in_use

    def exact_memory_in_use(self) -> int:
        num_bytes: int = self.ask(methodcaller("memory_in_use"))
        return num_bytes

    def weights_bytes(self, config: Config) -> int:
        num_bytes: int = self.ask(methodcaller("weights_bytes", config))
        return num_bytes

    def failure(self) -> str | None:
        try:
            failure: str | None = self.ask(methodcaller("failure"))
        except EngineDead as error:
            return error.message
        return failure

    def release_memory(self) -> None:
        with suppress(EngineDead):
            self.ask(methodcaller("release_memory"))

    def close(self) -> None:
        """End the process, whatever it does."""
        self._calls.close()
        if not self._is_closed:
            self._is_closed = True
            os.close(self._life)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def question(self, number: int | None, answer: Future[Any]) -> int:
        """A number for a question to an engine, or to the process (None)."""
        question = next(self._numbers)
        self._answers[question] = number, answer
        return question

    def forget(self, core: RemoteCore, error: HeadraceError) -> None:
        """An engine runs no more: what waits for its answers gets an error."""
        for question, (number, _) in tuple(self._answers.items()):
            if number == core.number:
                self.on_answer(question, error)

    def ask(self, call: Callable[[Any], Any]) -> Any:
        """Ask the process, and wait. Raises EngineDead, and what the call raises."""
        answer = new_answer()
        self._calls.call("ask_host", self.question(None, answer), call)
        if self._end is not None:
            raise EngineDead(self._end)
        return answer.result()

    def _serve(self) -> None:
        try:
            self._calls.serve()
        finally:  # also after an error here, without which nothing would come any more
            self._calls.close()
            self._has_ended(f"the engine's process {_ending(self._process.wait())}")

    def _has_ended(self, reason: str) -> None:
        self._end, error = reason, EngineDead(reason)
        for core in tuple(self._cores.values()):
            core.ended(reason)
            core.is_stopped.set()
        for question in tuple(self._answers):
            self.on_answer(question, error)

    def on_launched(
        self, number: int, model: ModelDescription, memory: ModelMemory, warm_up: WarmUpStatus, has_constraints: bool
    ) -> None:
        if (core := self._cores.get(number)) is not None:  # else it was stopped at the end of its load
            core.launched(model, memory, warm_up, has_constraints)

    def on_failed(self, number: int, error: HeadraceError) -> None:
        if (core := self._cores.pop(number, None)) is not None:
            core.failed(error)
            core.is_stopped.set()

    def on_changed(self, number: int, death: str | None, warm_up: WarmUpStatus) -> None:
        if (core := self._cores.get(number)) is not None:
            core.warm_up = warm_up
            if death is not None:
                core.ended(death)

    def on_stopped(self, number: int) -> None:
        if (core := self._cores.pop(number, None)) is not None:
            core.ended("it was stopped")
            core.is_stopped.set()

    def on_uses(self, num_bytes: int) -> None:
        self._memory_in_use = num_bytes

    def on_items(self, number: int, items: Sequence[tuple[str, Item]]) -> None:
        if (core := self._cores.get(number)) is not None:
            core.take(items)

    def on_answer(self, question: int, value: Any) -> None:
        _, answer = self._answers.pop(question, (None, None))
        if answer is None:  # the engine was stopped meanwhile
            return
        if isinstance(value, HeadraceError):
            answer.set_exception(value)
        else:
            answer.set_result(value)

    def on_log(self, record: logging.LogRecord) -> None:
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)


@dataclass(slots=True)
class _OpenRequest:
    """num_choices: that have not ended."""

    outputs: OutputQueue
    num_choices: int


class RemoteCore:
    """An engine in another process. See `EngineCore`."""

    is_remote = True

    def __init__(self, number: int, process: EngineProcess, calls: OneWayCalls) -> None:
        self.number = number
        self.death: str | None = None
        self.warm_up = WarmUpStatus()
        self.has_constraints = False
        self._process = process
        self._calls = calls
        self._model: ModelDescription | None = None
        self._memory: ModelMemory | None = None
        self._error: HeadraceError | None = None
        self._is_ready = threading.Event()
        self.is_stopped = threading.Event()
        self._open: dict[str, _OpenRequest] = {}

    def wait(self) -> None:
        """Until the model is loaded. Raises ModelError and ConfigError, and WorkCancelled once the load has ended."""
        with interrupted_by(lambda: self.send(Stop())):
            self._is_ready.wait()
        if self._error is not None:
            raise self._error

    @property
    def model(self) -> ModelDescription:
        assert self._model is not None, "the model is not loaded yet"
        return self._model

    @property
    def memory(self) -> ModelMemory:
        assert self._memory is not None, "the model is not loaded yet"
        return self._memory

    def launched(
        self, model: ModelDescription, memory: ModelMemory, warm_up: WarmUpStatus, has_constraints: bool
    ) -> None:
        self._model, self._memory, self.warm_up, self.has_constraints = model, memory, warm_up, has_constraints
        self._is_ready.set()

    def failed(self, error: HeadraceError) -> None:
        self._error = error
        self._is_ready.set()

    def send(self, command: Command | AskBeside) -> None:
        match command:
            case Submit(request, outputs, now):
                self._open[request.request_id] = _OpenRequest(outputs, request.num_choices)
                spec = request.constraint
                # as an array, long prompts take half of the time to cross; a compiled grammar can't
                sent = replace(request, prompt=(), constraint=None if spec is None else replace(spec, compiled=None))
                self._calls.call("submit", self.number, sent, array("i", request.prompt), now)
            case Abort(request_id):
                self._open.pop(request_id, None)
                self._calls.call("send", self.number, command)
            case Ask(call, answer):
                self._calls.call("ask", self.number, self._process.question(self.number, answer), call)
            case AskBeside(call, answer):
                self._calls.call("call", self.number, self._process.question(self.number, answer), call)
            case Stop():
                self._calls.call("stop", self.number)

    def take(self, items: Sequence[tuple[str, Item]]) -> None:
        """Items from the engine. Those of requests that were aborted meanwhile are dropped."""
        taken = []
        for request_id, item in items:
            if (request := self._open.get(request_id)) is None:
                continue
            taken.append((request.outputs, item))
            if isinstance(item, TokenOutput) and item.finish_reason is not None:
                request.num_choices -= 1
            if request.num_choices == 0 or isinstance(item, HeadraceError):
                self._open.pop(request_id, None)
        for request_id in deliver(taken):
            self.send(Abort(request_id))

    def stop(self, timeout_s: float | None = None) -> bool:
        self.send(Stop())
        return self.is_stopped.wait(timeout_s)

    def ended(self, death: str) -> None:
        """The engine runs no more: what waits for it gets an error."""
        if self.death is not None:
            return
        self.death = death
        error = EngineDead(f"the engine is not running: {death}")
        if not self._is_ready.is_set():
            self.failed(error)
        self._process.forget(self, error)
        requests, self._open = self._open, {}
        deliver([(each.outputs, error) for each in requests.values()])


def _ending(code: int) -> str:
    """How a process has ended, by its return code."""
    if code >= 0:
        return f"has ended with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"was killed by {name}{', as systems do when memory runs out' if name == 'SIGKILL' else ''}"
