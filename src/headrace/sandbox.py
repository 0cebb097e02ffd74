"""Runs functions in helper processes with limits on time and memory, so that no input can stop the server."""

from __future__ import annotations

import contextlib
import pickle
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from headrace.cancellation import WorkCancelled, check_cancelled, interrupted_by
from headrace.messages import Message, reader, receive, send

Result = TypeVar("Result")

STACK_BYTES = 2 * 1024 * 1024
"""Stack of the thread that runs a function: smaller than the server's own, so that recursion fails here first."""

_POLL_S = 0.1
"""How often a call that waits for a free process checks for cancellation."""

_START_S = 60.0
"""Time for a process to receive a call: the first one imports the function's modules."""

_ALARM_DELAY_S = 2
"""The helper process ends itself this long after a call's limit, should the server be gone by then."""

_RECEIVED = b"!"
"""Sent by the helper process when it has received a call, whose time counts from then on."""

# Numeric libraries would start a thread for each core, whose stacks and buffers count as memory.
_MAIN = """
import os, sys
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
sys.path[:] = sys.argv[2:]
from headrace.sandbox import serve
serve(int(sys.argv[1]))
"""


class LimitExceeded(Exception):
    """A call passed a limit. reason: which one; "crash" if the process died, from deep recursion for instance."""

    def __init__(self, reason: Literal["time", "memory", "crash"]) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Preparation:
    """A call that must have run in the same process before another one."""

    function: Callable[..., object]
    args: tuple[object, ...]
    timeout_s: float


class Sandbox:
    """A pool of helper processes, started when first needed and kept for the next call. Thread-safe."""

    def __init__(self, *, num_processes: int, max_bytes: int) -> None:
        """max_bytes: of private memory in each process. Linux enforces it, macOS does not."""
        self._max_bytes = max_bytes
        self._idle: queue.LifoQueue[_HelperProcess | None] = queue.LifoQueue()
        for _ in range(num_processes):
            self._idle.put(None)
        self._running: set[_HelperProcess] = set()
        weakref.finalize(self, _kill_all, self._running)
        self._is_closed = False

    def run(
        self,
        function: Callable[..., Result],
        /,
        *args: object,
        timeout_s: float,
        preparation: Preparation | None = None,
    ) -> Result:
        """The function's result. Function, arguments and result must be picklable; waits for a free process first.

        preparation: called first, in the same process. Raises LimitExceeded, and what the function raises. A caller
        that is cancelled ends the process (WorkCancelled).
        """
        process = self._wait_for_process()
        try:
            if process is not None and not process.is_alive:
                self._discard(process)
                process = None
            if process is None:
                process = self._start()
            with interrupted_by(process.interrupt):
                if preparation is not None:
                    succeeded, result = process.call(preparation.function, preparation.args, preparation.timeout_s)
                if preparation is None or succeeded:
                    succeeded, result = process.call(function, args, timeout_s)
        except (LimitExceeded, WorkCancelled):
            if process is not None:
                self._discard(process)
                process = None
            raise
        finally:
            self._idle.put(process)
        if succeeded:
            return result  # type: ignore[return-value]
        assert isinstance(result, BaseException)
        raise result

    def run_in_background(self, function: Callable[..., object], /, *args: object, timeout_s: float) -> None:
        """Run a function once in the background, to import and cache what it needs."""

        def call() -> None:
            with contextlib.suppress(Exception):  # the first real call reports it
                self.run(function, *args, timeout_s=timeout_s)

        threading.Thread(target=call, name="sandbox-background", daemon=True).start()

    def close(self) -> None:
        self._is_closed = True
        for process in tuple(self._running):
            self._discard(process)

    def _wait_for_process(self) -> _HelperProcess | None:
        while True:
            check_cancelled()
            with contextlib.suppress(queue.Empty):
                return self._idle.get(timeout=_POLL_S)

    def _start(self) -> _HelperProcess:
        process = _HelperProcess(self._max_bytes)
        self._running.add(process)
        if self._is_closed:
            self._discard(process)
            raise LimitExceeded("crash")
        return process

    def _discard(self, process: _HelperProcess) -> None:
        self._running.discard(process)
        process.kill()


def _kill_all(processes: set[_HelperProcess]) -> None:
    for process in tuple(processes):
        process.kill()


class _HelperProcess:
    """One process, for one call at a time."""

    def __init__(self, max_bytes: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as on_failure:
            on_failure.callback(ours.close)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, str(theirs.fileno()), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a library's panic may quote a client's text
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the server, which ends its helpers itself
            )
            on_failure.pop_all()
        self._socket = ours
        self._read = reader(ours)
        self._in_call = threading.Lock()
        send(ours, max_bytes)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def call(self, function: Callable[..., object], args: tuple[object, ...], timeout_s: float) -> tuple[bool, object]:
        """Whether the function returned, and its result or else its error."""
        try:
            with self._in_call:
                send(self._socket, (timeout_s, function, args))
                self._socket.settimeout(_START_S)
                self._read(len(_RECEIVED))
                self._socket.settimeout(timeout_s)
                succeeded, result = receive(self._read)
                self._socket.settimeout(None)
        except TimeoutError as error:
            raise LimitExceeded("time") from error
        except (EOFError, OSError) as error:
            raise LimitExceeded("crash") from error
        if isinstance(result, MemoryError):
            raise LimitExceeded("memory")
        return succeeded, result

    def interrupt(self) -> None:
        """Make the running call fail, without waiting for it."""
        self._process.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        with self._in_call:  # a call that waits for an answer now reads the end of the stream
            self._socket.close()


def serve(descriptor: int) -> None:
    """The helper process's main function: calls functions until the server closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=descriptor) as connection, contextlib.suppress(EOFError, OSError):
        read = reader(connection)
        _limit_memory(receive(read))
        while True:
            timeout_s, function, args = receive(read)
            connection.sendall(_RECEIVED)
            # The default action ends the process even while it runs foreign code that holds the interpreter.
            signal.setitimer(signal.ITIMER_REAL, timeout_s + _ALARM_DELAY_S)
            answer = _call_in_thread(function, args)
            signal.setitimer(signal.ITIMER_REAL, 0)
            _send_answer(connection, answer)
            del function, args, answer


def _limit_memory(max_bytes: int) -> None:
    with contextlib.suppress(ValueError, OSError):  # macOS refuses some values and enforces none
        resource.setrlimit(resource.RLIMIT_DATA, (max_bytes, max_bytes))


def _call_in_thread(function: Callable[..., object], args: tuple[object, ...]) -> tuple[bool, object]:
    answers: list[tuple[bool, object]] = []

    def call() -> None:
        try:
            answers.append((True, function(*args)))
        except BaseException as error:  # the process's exception boundary: foreign code may raise anything
            answers.append((False, error.with_traceback(None)))

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return answers[0]


def _send_answer(connection: socket.socket, answer: tuple[bool, object]) -> None:
    try:
        if isinstance(answer[1], MemoryError):  # libraries often define their own MemoryError class
            answer = (False, MemoryError())
        if not answer[0]:
            pickle.loads(pickle.dumps(answer))  # some errors pickle and cannot be read back
        message = Message(answer)
    except MemoryError:
        message = Message((False, MemoryError()))
    except Exception as error:  # an error or a result of foreign code that cannot be pickled
        kind = type(error if answer[0] else answer[1]).__name__
        message = Message((False, RuntimeError(f"the helper process cannot return a {kind}")))
    message.send(connection)
