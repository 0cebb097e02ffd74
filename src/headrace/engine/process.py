"""A process that only has engines: the side with the arrays. `remote.py` is the other side."""

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
from headrace.engine.commands import Abort, Ask, AskBeside, Command, Submit, new_answer
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
"""Time between two looks at what the other side is told of engines: warm-up, death, and memory."""


class EngineServer:
    """The engines of this process, by number. Calls of `on_…` come from the process that serves requests."""

    def __init__(self, launch: Launch) -> None:
        """launch: loads a model, and raises HeadraceError."""
        self._launch = launch
        self._turns = DeviceTurns()
        self._host = ThisProcess()
        # One thread for all questions: MLX (0.32) leaves a native thread behind for each that used it and ended.
        self._questions = ThreadPoolExecutor(1, "headrace-questions")
        self._lock = threading.Lock()
        """Held while a load or a grammar's compilation ends, so that either is used or cancelled."""
        self._loads: dict[int, Cancellation] = {}
        self._compiling: dict[tuple[int, str], GenerationRequest] = {}
        """Requests whose grammar is compiled, by engine and id. Also held under the lock."""
        self._engines: dict[int, EngineThread] = {}

    def serve(self, calls: OneWayCalls) -> None:
        """Until the other side is gone."""
        self._calls = calls
        threading.Thread(target=self._report, name="headrace-report", daemon=True).start()
        calls.serve()

    def on_launch(self, number: int, config: Config, share: MemoryShare | None) -> None:
        load = self._loads[number] = Cancellation()
        self._begin(self._load, number, load, config, share)

    def _load(self, number: int, load: Cancellation, config: Config, share: MemoryShare | None) -> None:
        try:
            with errors_as(partial(_not_loaded, config)):  # the other side waits for an answer
                engine = call_cancellable(load, lambda: self._launch(config, self._turns, share))
            with self._lock:
                self._engines[number] = engine
                self._loads.pop(number)
                load.check()
        except WorkCancelled:
            self._stop(number)
        except HeadraceError as error:
            self._calls.call("failed", number, error)
        else:
            # What is loaded stays; a full collection that searches it would stop the engine for up to 0.3 s.
            gc.collect()
            gc.freeze()
            self._calls.call("launched", number, engine.model, engine.memory, engine.warm_up, engine.has_constraints)
        finally:
            self._loads.pop(number, None)

    def on_submit(self, number: int, request: GenerationRequest, prompt: array[int], now: float) -> None:
        """request: without its prompt."""
        if (engine := self._engines.get(number)) is None:
            return  # it was stopped, which the other side knows
        submit = Submit(
            replace(request, prompt=tuple(prompt)),
            OutputQueue(_Sender(self._calls, number), _is_sent, request.request_id),
            now,
        )
        if request.constraint is None or request.constraint.grammar is None:
            engine.send(submit)
            return
        with self._lock:
            self._compiling[number, request.request_id] = submit.request
        self._begin(self._compile, number, engine, submit)

    def _compile(self, number: int, engine: EngineThread, submit: Submit) -> None:
        """Compile a request's grammar, and submit the request unless it was aborted meanwhile."""
        key, outputs = (number, submit.request.request_id), submit.outputs
        compiled: GenerationRequest | HeadraceError
        try:
            with errors_as(_failed):
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

    def on_send(self, number: int, command: Abort) -> None:
        with self._lock:
            if self._compiling.pop((number, command.request_id), None) is not None:
                return  # the engine does not know it yet
        self._send(number, command)

    def on_ask(self, number: int, question: int, call: Callable[[Any], Any]) -> None:
        self._send(number, Ask(call, self._new_answer(question)))

    def on_call(self, number: int, question: int, call: Callable[[Any], Any]) -> None:
        self._send(number, AskBeside(call, self._new_answer(question)))

    def _send(self, number: int, command: Command | AskBeside) -> None:
        if (engine := self._engines.get(number)) is not None:
            engine.send(command)

    def on_ask_host(self, question: int, call: Callable[[ThisProcess], Any]) -> None:
        self._questions.submit(self._ask_host, self._new_answer(question), call)

    def _ask_host(self, answer: Future[Any], call: Callable[[ThisProcess], Any]) -> None:
        try:
            with errors_as(_failed):
                answer.set_result(call(self._host))
        except HeadraceError as error:
            answer.set_exception(error)

    def on_stop(self, number: int) -> None:
        with self._lock:
            if (load := self._loads.get(number)) is not None:
                load.cancel()
                return
        self._begin(self._stop, number)

    def _stop(self, number: int) -> None:
        if (engine := self._engines.pop(number, None)) is not None:
            engine.stop()
            del engine  # the other side may ask for its memory next
        self._calls.call("stopped", number)

    def _new_answer(self, question: int) -> Future[Any]:
        """Sent when it is set."""
        answer = new_answer()
        answer.add_done_callback(lambda done: self._calls.call("answer", question, done.exception() or done.result()))
        return answer

    def _begin(self, function: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=function, args=args, name="headrace-call", daemon=True).start()

    def _report(self) -> None:
        told: dict[int, object] = {}
        while True:
            current = {number: (engine.death, engine.warm_up) for number, engine in tuple(self._engines.items())}
            for number, (death, warm_up) in current.items():
                if told.get(number) != (death, warm_up):
                    self._calls.call("changed", number, death, warm_up)
            if (num_bytes := self._host.memory_in_use()) != told.get(-1):
                self._calls.call("uses", num_bytes)
            told = {**current, -1: num_bytes}
            time.sleep(REPORT_S)


def _not_loaded(config: Config, error: BaseException) -> ModelError:
    logger.error("%s can't be loaded", config.model, exc_info=error)
    return ModelError(f"{config.model} can't be loaded: {type(error).__name__}")


def _failed(error: BaseException) -> GenerationFailed:
    logger.error("a call to the engines' process failed", exc_info=error)
    return GenerationFailed(f"the engines' process could not answer: {type(error).__name__}")


class _Sender:
    """Sends the items of one engine's requests to the other side."""

    def __init__(self, calls: OneWayCalls, number: int) -> None:
        self._calls = calls
        self._number = number

    def receive(self, items: Sequence[tuple[OutputQueue, Item]]) -> None:
        for _, item in items:
            if isinstance(item, GenerationFailed):  # its cause does not cross
                logger.error("%s", item.message, exc_info=item)
        self._calls.call("items", self._number, [(outputs.request_id, item) for outputs, item in items])


def _is_sent(item: Item) -> None:
    """What an OutputQueue's `put` would do here, its receiver does for many items together."""
    raise AssertionError("items for another process go by their receiver")
