"""Starts the process that runs the engines, and calls it. `process.py` is its counterpart there."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
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
from headrace.engine.commands import Abort, Command, LoopCall, Stop, Submit, ThreadCall, new_result
from headrace.engine.delivery import Item, OutputQueue, deliver
from headrace.errors import EngineDead, HeadraceError
from headrace.messages import OneWayCalls
from headrace.ranks.channel import PULSE_S, SILENCE_S
from headrace.types.events import TokenOutput
from headrace.types.memory import MemoryShare, ModelMemory
from headrace.types.model import ModelDescription
from headrace.types.status import DeviceStatus, WarmUpStatus

_PROGRAM = (
    "import sys; package = sys.argv.pop(1); sys.path[:0] = [package] * (package not in sys.path); "
    "from headrace.cli.engine_process import main; main()"
)
"""Runs the same package as this process, and no module of the working directory."""

_EXIT_TIMEOUT_S = 0.3
"""Time for the process to end once its connection is closed, which takes milliseconds; then it is killed."""


logger = logging.getLogger(__name__)


class EngineProcess:
    """The process that runs the engines, and the thread here that receives its messages. See `EngineHost`."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        # nothing is sent: the process ends when our end is closed, even while it imports
        shutdown_pipe, self._shutdown_pipe = os.pipe()
        package = str(Path(__file__).parents[2])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, package, str(theirs.fileno()), str(shutdown_pipe)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), shutdown_pipe],
                start_new_session=True,  # Ctrl-C must reach only the server, which ends this process
            )
        os.close(shutdown_pipe)
        self._calls = OneWayCalls(ours, self)
        self._ids = count()
        self._cores: dict[int, RemoteCore] = {}
        self._results: dict[int, tuple[int | None, Future[Any]]] = {}
        """By call: of which engine, and its result."""
        self._memory_in_use = 0
        self._is_closed = False
        self._exit_reason: str | None = None
        self._hang: str | None = None
        self._has_pulse = threading.Event()
        """Set once the pulse last asked for has come, or the process has ended."""
        threading.Thread(target=self._serve, name="headrace-engines", daemon=True).start()
        threading.Thread(target=self._watch, name="headrace-pulse", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def launch(self, config: Config, share: MemoryShare | None = None) -> RemoteCore:
        """Start loading a model. See `RemoteCore.wait`."""
        core = RemoteCore(next(self._ids), self, self._calls)
        self._cores[core.engine_id] = core
        self._calls.call("launch", core.engine_id, config, share)
        if self._exit_reason is not None:
            core.ended(self._exit_reason)
            core.is_stopped.set()
        return core

    def device_memory(self, utilization: float | None) -> int:
        num_bytes: int = self.call_host(methodcaller("device_memory", utilization))
        return num_bytes

    def device(self) -> DeviceStatus:
        device: DeviceStatus = self.call_host(methodcaller("device"))
        return device

    def memory_in_use(self) -> int:
        """As of the last report, some tenths of a second ago."""
        return self._memory_in_use

    def weights_bytes(self, config: Config) -> int:
        num_bytes: int = self.call_host(methodcaller("weights_bytes", config))
        return num_bytes

    def failure(self) -> str | None:
        try:
            failure: str | None = self.call_host(methodcaller("failure"))
        except EngineDead as error:
            return error.message
        return failure

    def hang(self) -> str | None:
        return self._hang

    def release_memory(self) -> None:
        with suppress(EngineDead):
            self.call_host(methodcaller("release_memory"))

    def close(self) -> None:
        """End the process, even during a step."""
        self._calls.close()
        if not self._is_closed:
            self._is_closed = True
            os.close(self._shutdown_pipe)
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def new_call(self, engine_id: int | None, result: Future[Any]) -> int:
        """The id of a call to an engine, or to the process (None)."""
        call_id = next(self._ids)
        self._results[call_id] = engine_id, result
        return call_id

    def fail_calls(self, core: RemoteCore, error: HeadraceError) -> None:
        for call_id, (engine_id, _) in tuple(self._results.items()):
            if engine_id == core.engine_id:
                self.on_result(call_id, error)

    def call_host(self, call: Callable[[Any], Any]) -> Any:
        """Call a method of the process's host, and wait. Raises EngineDead, and what the call raises."""
        result = new_result()
        self._calls.call("call_host", self.new_call(None, result), call)
        if self._exit_reason is not None:
            raise EngineDead(self._exit_reason)
        return result.result()

    def _serve(self) -> None:
        try:
            self._calls.serve()
        finally:  # also after an error here, after which no message would be received
            self._calls.close()
            self._on_exit(f"the engine's process {_exit_text(self._process.wait())}")

    def _watch(self) -> None:
        """Ask for a pulse once a second.

        The peer's thread that answers never waits for a step or a load, only for the GIL, at most some seconds.
        """
        self._calls.call("pulse")
        self._has_pulse.wait()  # imports may take longer than any pulse
        while self._exit_reason is None:
            self._has_pulse.clear()
            self._calls.call("pulse")
            silent_s = 0.0
            while not self._has_pulse.wait(PULSE_S) and self._exit_reason is None:
                silent_s += PULSE_S  # not by the clock: what stops this process, too, is no silence of the other
                if silent_s >= SILENCE_S and self._hang is None:
                    self._hang = f"the engines' process has not answered for more than {SILENCE_S:g} s"
                    logger.error("%s", self._hang)
            if self._hang is not None and self._exit_reason is None:
                logger.warning("the engines' process answers again")
            self._hang = None
            time.sleep(PULSE_S)

    def _on_exit(self, reason: str) -> None:
        self._exit_reason, error = reason, EngineDead(reason)
        self._has_pulse.set()
        for core in tuple(self._cores.values()):
            core.ended(reason)
            core.is_stopped.set()
        for call_id in tuple(self._results):
            self.on_result(call_id, error)

    def on_pulse(self) -> None:
        self._has_pulse.set()

    def on_launched(
        self, engine_id: int, model: ModelDescription, memory: ModelMemory, warm_up: WarmUpStatus, has_constraints: bool
    ) -> None:
        if (core := self._cores.get(engine_id)) is not None:  # else it was stopped at the end of its load
            core.launched(model, memory, warm_up, has_constraints)

    def on_failed(self, engine_id: int, error: HeadraceError) -> None:
        if (core := self._cores.pop(engine_id, None)) is not None:
            core.failed(error)
            core.is_stopped.set()

    def on_status(self, engine_id: int, death: str | None, warm_up: WarmUpStatus) -> None:
        if (core := self._cores.get(engine_id)) is not None:
            core.warm_up = warm_up
            if death is not None:
                core.ended(death)

    def on_stopped(self, engine_id: int) -> None:
        if (core := self._cores.pop(engine_id, None)) is not None:
            core.ended("it was stopped")
            core.is_stopped.set()

    def on_memory_in_use(self, num_bytes: int) -> None:
        self._memory_in_use = num_bytes

    def on_items(self, engine_id: int, items: Sequence[tuple[str, Item]]) -> None:
        if (core := self._cores.get(engine_id)) is not None:
            core.take(items)

    def on_result(self, call_id: int, value: Any) -> None:
        _, result = self._results.pop(call_id, (None, None))
        if result is None:  # the engine was stopped meanwhile
            return
        if isinstance(value, HeadraceError):
            result.set_exception(value)
        else:
            result.set_result(value)

    def on_log(self, record: logging.LogRecord) -> None:
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)


@dataclass(slots=True)
class _OpenRequest:
    """num_choices: those that have not ended."""

    outputs: OutputQueue
    num_choices: int


class RemoteCore:
    """An engine in another process. See `EngineCore`."""

    is_remote = True

    def __init__(self, engine_id: int, process: EngineProcess, calls: OneWayCalls) -> None:
        self.engine_id = engine_id
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
        """Wait for the model. Raises ModelError and ConfigError, and WorkCancelled once the load has ended."""
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

    def send(self, command: Command | ThreadCall) -> None:
        match command:
            case Submit(request, outputs, now):
                self._open[request.request_id] = _OpenRequest(outputs, request.num_choices)
                spec = request.constraint
                # a long prompt is sent in half of the time as an array; a compiled grammar can't be sent
                sent = replace(request, prompt=(), constraint=None if spec is None else replace(spec, compiled=None))
                self._calls.call("submit", self.engine_id, sent, array("i", request.prompt), now)
            case Abort(request_id):
                self._open.pop(request_id, None)
                self._calls.call("abort", self.engine_id, command)
            case LoopCall(call, result):
                self._calls.call("call_loop", self.engine_id, self._process.new_call(self.engine_id, result), call)
            case ThreadCall(call, result):
                self._calls.call("call_thread", self.engine_id, self._process.new_call(self.engine_id, result), call)
            case Stop():
                self._calls.call("stop", self.engine_id)

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
        """Fail what waits for the engine, which has ended."""
        if self.death is not None:
            return
        self.death = death
        error = EngineDead.because(death)
        if not self._is_ready.is_set():
            self.failed(error)
        self._process.fail_calls(self, error)
        requests, self._open = self._open, {}
        deliver([(each.outputs, error) for each in requests.values()])


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"has ended with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"was killed by {name}{', as systems do when memory runs out' if name == 'SIGKILL' else ''}"
