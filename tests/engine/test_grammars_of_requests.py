"""In the engines' process a request's grammar is compiled while other messages are read."""

from __future__ import annotations

import queue
import socket
import threading
from array import array
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from headrace.engine.commands import Abort, Submit
from headrace.engine.process import EngineServer
from headrace.errors import InvalidRequest
from headrace.messages import OneWayCalls
from headrace.types.request import GREEDY, ConstraintSpec, GenerationRequest
from headrace.types.status import WarmUpStatus

PATIENCE_S = 20

PLAIN = GenerationRequest("plain", (), GREEDY, max_tokens=1)
DIGITS = replace(PLAIN, request_id="digits", constraint=ConstraintSpec("start: /[0-9]/"))


class SlowGrammars:
    """An engine whose grammars compile once `may_compile` is set. `commands`: what was sent to it."""

    death, model, memory, warm_up, has_constraints = None, None, None, WarmUpStatus(), True

    def __init__(self) -> None:
        self.may_compile = threading.Semaphore(0)
        self.commands: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def compiled(self, request: GenerationRequest) -> GenerationRequest:
        assert self.may_compile.acquire(timeout=PATIENCE_S)
        assert request.constraint is not None
        if request.constraint.grammar == "start: nothing":
            raise InvalidRequest("it can't be compiled")
        return replace(request, constraint=replace(request.constraint, compiled="compiled"))

    def send(self, command: Any) -> None:
        self.commands.put(command)


class Server:
    """The other side: what it was called with."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()

    def on_launched(self, *args: Any) -> None:
        self.calls.put(("launched", *args))

    def on_items(self, engine_id: int, items: Any) -> None:
        self.calls.put(("items", engine_id, items))

    def on_memory_in_use(self, num_bytes: int) -> None: ...

    def on_status(self, *args: Any) -> None: ...


class Sides:
    def __init__(self, ours: socket.socket, theirs: socket.socket) -> None:
        self.engine, self.server = SlowGrammars(), Server()
        engines = EngineServer(lambda *_: self.engine)  # type: ignore[arg-type, return-value]
        threading.Thread(target=engines.serve, args=(OneWayCalls(theirs, engines),), daemon=True).start()
        self.calls = OneWayCalls(ours, self.server)
        threading.Thread(target=self.calls.serve, daemon=True).start()
        self.calls.call("launch", 0, None, None)
        assert self.server.calls.get(timeout=PATIENCE_S)[0] == "launched"

    def submit(self, request: GenerationRequest) -> None:
        self.calls.call("submit", 0, request, array("i", (1, 2)), 0.0)

    def submitted(self) -> GenerationRequest:
        """The next command's request, which must be a Submit."""
        command = self.engine.commands.get(timeout=PATIENCE_S)
        assert isinstance(command, Submit)
        return command.request


@pytest.fixture
def sides() -> Iterator[Sides]:
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        yield Sides(ours, theirs)


def test_other_messages_are_read_while_a_grammar_is_compiled(sides: Sides) -> None:
    sides.submit(DIGITS)
    sides.submit(PLAIN)
    assert sides.submitted().request_id == "plain"
    sides.engine.may_compile.release()
    request = sides.submitted()
    assert (request.request_id, request.prompt) == ("digits", (1, 2))
    assert request.constraint is not None
    assert request.constraint.compiled == "compiled"
    sides.calls.call("abort", 0, Abort("digits"))
    assert sides.engine.commands.get(timeout=PATIENCE_S) == Abort("digits")


def test_a_request_that_is_aborted_while_its_grammar_is_compiled_never_runs(sides: Sides) -> None:
    sides.submit(DIGITS)
    sides.calls.call("abort", 0, Abort("digits"))
    sides.submit(replace(DIGITS, max_tokens=7))
    sides.submit(PLAIN)
    assert sides.submitted().request_id == "plain"
    sides.engine.may_compile.release(2)
    assert sides.submitted().max_tokens == 7
    sides.submit(replace(PLAIN, max_tokens=9))
    assert sides.submitted().max_tokens == 9


def test_a_grammar_that_cannot_be_compiled_is_the_requests_error(sides: Sides) -> None:
    sides.submit(replace(DIGITS, constraint=ConstraintSpec("start: nothing")))
    sides.engine.may_compile.release()
    _, _, [(request_id, error)] = sides.server.calls.get(timeout=PATIENCE_S)
    assert (request_id, error.message) == ("digits", "it can't be compiled")
    sides.calls.call("abort", 0, Abort("digits"))
    assert sides.engine.commands.get(timeout=PATIENCE_S) == Abort("digits")
