"""The process that runs the engines. `remote.py` is its counterpart in the server."""

from __future__ import annotations

import gc
import logging
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from headrace.cancellation import Cancellation, WorkCancelled, call_cancellable
from headrace.config import Config
from headrace.engine.commands import Abort, Command, LoopCall, Submit, ThreadCall, new_result
from headrace.engine.delivery import Item, OutputQueue
from headrace.engine.host import ThisProcess
from headrace.engine.thread import EngineThread
from headrace.engine.turns import DeviceTurns
from headrace.errors import GenerationFailed, HeadraceError, ModelError
from headrace.isolation import errors_as
from headrace.messages import OneWayCalls
from headrace.types.memory import MemoryShare
from headrace.types.request import GenerationRequest

logger = logging.getLogger(__name__)

Launch = Callable[[Config, DeviceTurns, MemoryShare | None], EngineThread]

REPORT_S = 0.1
"""Interval at which changes of warm-up, death and memory are reported to the server."""


class EngineServer:
    """The engines of this process, by id. The server calls the methods `on_…`."""

    def __init__(self, launch: Launch) -> None:
        """launch: loads a model, and raises HeadraceError."""
        self._launch = launch
        self._turns = DeviceTurns()
        self._host = ThisProcess()
        # One thread for all calls: MLX (0.32) leaves a native thread behind for each that used it and ended.
        self._host_calls = ThreadPoolExecutor(1, "headrace-host")
        self._lock = threading.Lock()
        """Held while a load or a compilation ends, so that its result is either used or cancelled."""
        self._loads: dict[int, Cancellation] = {}
        self._compiling: dict[tuple[int, str], GenerationRequest] = {}
        """Requests whose grammar is compiled, by engine and id. Also held under the lock."""
        self._engines: dict[int, EngineThread] = {}

    def serve(self, calls: OneWayCalls) -> None:
        """Return once the server has closed the connection."""
        self._calls = calls
        threading.Thread(target=self._report, name="headrace-report", daemon=True).start()
        calls.serve()

    def on_pulse(self) -> None:
        self._calls.call("pulse")

    def on_launch(self, engine_id: int, config: Config, share: MemoryShare | None) -> None:
        load = self._loads[engine_id] = Cancellation()
        self._start_thread(self._load, engine_id, load, config, share)

    def _load(self, engine_id: int, load: Cancellation, config: Config, share: MemoryShare | None) -> None:
        try:
            with errors_as(partial(_not_loaded, config)):  # the server waits for a result
                engine = call_cancellable(load, lambda: self._launch(config, self._turns, share))
            with self._lock:
                self._engines[engine_id] = engine
                self._loads.pop(engine_id)
                load.check()
        except WorkCancelled:
            self._stop(engine_id)
        except HeadraceError as error:
            self._calls.call("failed", engine_id, error)
        else:
            # What is loaded stays; a full collection that searches it would stop the engine for up to 0.3 s.
            gc.collect()
            gc.freeze()
            self._calls.call("launched", engine_id, engine.model, engine.memory, engine.warm_up, engine.has_constraints)
        finally:
            self._loads.pop(engine_id, None)

    def on_submit(self, engine_id: int, request: GenerationRequest, prompt: array[int], now: float) -> None:
        """request: without its prompt."""
        if (engine := self._engines.get(engine_id)) is None:
            return  # it was stopped, and the server knows
        submit = Submit(
            replace(request, prompt=tuple(prompt)),
            OutputQueue(_ItemSender(self._calls, engine_id), _never_put, request.request_id),
            now,
        )
        if request.constraint is None or request.constraint.grammar is None:
            engine.send(submit)
            return
        with self._lock:
            self._compiling[engine_id, request.request_id] = submit.request
        self._start_thread(self._compile, engine_id, engine, submit)

    def _compile(self, engine_id: int, engine: EngineThread, submit: Submit) -> None:
        """Compile a request's grammar, and submit the request unless it was aborted meanwhile."""
        key, outputs = (engine_id, submit.request.request_id), submit.outputs
        compiled: GenerationRequest | HeadraceError
        try:
            with errors_as(_call_failed):
                compiled = engine.compiled(submit.request)
        except HeadraceError as error:
            compiled = error
        with self._lock:
            if self._compiling.get(key) is not submit.request:
                return
            del self._compiling[key]
            if isinstance(compiled, HeadraceError):
                outputs.receiver.receive([(outputs, compiled)])
            else:
                engine.send(replace(submit, request=compiled))

    def on_abort(self, engine_id: int, command: Abort) -> None:
        with self._lock:
            if self._compiling.pop((engine_id, command.request_id), None) is not None:
                return  # the engine does not know it yet
        self._send(engine_id, command)

    def on_call_loop(self, engine_id: int, call_id: int, call: Callable[[Any], Any]) -> None:
        self._send(engine_id, LoopCall(call, self._new_result(call_id)))

    def on_call_thread(self, engine_id: int, call_id: int, call: Callable[[Any], Any]) -> None:
        self._send(engine_id, ThreadCall(call, self._new_result(call_id)))

    def _send(self, engine_id: int, command: Command | ThreadCall) -> None:
        if (engine := self._engines.get(engine_id)) is not None:
            engine.send(command)

    def on_call_host(self, call_id: int, call: Callable[[ThisProcess], Any]) -> None:
        self._host_calls.submit(self._call_host, self._new_result(call_id), call)

    def _call_host(self, result: Future[Any], call: Callable[[ThisProcess], Any]) -> None:
        try:
            with errors_as(_call_failed):
                result.set_result(call(self._host))
        except HeadraceError as error:
            result.set_exception(error)

    def on_stop(self, engine_id: int) -> None:
        with self._lock:
            if (load := self._loads.get(engine_id)) is not None:
                load.cancel()
                return
        self._start_thread(self._stop, engine_id)

    def _stop(self, engine_id: int) -> None:
        if (engine := self._engines.pop(engine_id, None)) is not None:
            engine.stop()
            del engine  # its memory must be free when the server learns of it
        self._calls.call("stopped", engine_id)

    def _new_result(self, call_id: int) -> Future[Any]:
        """A future that is sent to the server when it is set."""
        result = new_result()
        result.add_done_callback(lambda done: self._calls.call("result", call_id, done.exception() or done.result()))
        return result

    def _start_thread(self, function: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=function, args=args, name="headrace-call", daemon=True).start()

    def _report(self) -> None:
        reported: dict[int, object] = {}
        while True:
            current = {engine_id: (engine.death, engine.warm_up) for engine_id, engine in tuple(self._engines.items())}
            for engine_id, (death, warm_up) in current.items():
                if reported.get(engine_id) != (death, warm_up):
                    self._calls.call("status", engine_id, death, warm_up)
            if (num_bytes := self._host.memory_in_use()) != reported.get(-1):
                self._calls.call("memory_in_use", num_bytes)
            reported = {**current, -1: num_bytes}
            time.sleep(REPORT_S)


def _not_loaded(config: Config, error: BaseException) -> ModelError:
    logger.error("%s can't be loaded", config.model, exc_info=error)
    return ModelError(f"{config.model} can't be loaded: {type(error).__name__}")


def _call_failed(error: BaseException) -> GenerationFailed:
    logger.error("a call to the engines' process failed", exc_info=error)
    return GenerationFailed(f"the engines' process could not answer: {type(error).__name__}")


class _ItemSender:
    """Sends the outputs of one engine to the server."""

    def __init__(self, calls: OneWayCalls, engine_id: int) -> None:
        self._calls = calls
        self._engine_id = engine_id

    def receive(self, items: Sequence[tuple[OutputQueue, Item]]) -> None:
        for _, item in items:
            if isinstance(item, GenerationFailed):  # its cause is not sent
                logger.error("%s", item.message, exc_info=item)
        self._calls.call("items", self._engine_id, [(outputs.request_id, item) for outputs, item in items])


def _never_put(item: Item) -> None:
    raise AssertionError("items for another process are sent by their receiver")
