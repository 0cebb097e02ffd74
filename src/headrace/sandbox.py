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
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Literal, TypeVar

Result = TypeVar("Result")

STACK_BYTES = 2 * 1024 * 1024
"""Of the thread that runs a function: less than the server's own threads have, so that recursion ends here first."""

_ALARM_DELAY_S = 2
"""The helper process ends itself this long after a call's limit, should the server be gone by then."""

_MAIN = "import sys; sys.path[:] = sys.argv[2:]; from headrace.sandbox import serve; serve(int(sys.argv[1]))"


class LimitExceeded(Exception):
    """A call passed a limit. reason: which one; "crash" if the process died, from deep recursion for instance."""

    def __init__(self, reason: Literal["time", "memory", "crash"]) -> None:
        super().__init__(reason)
        self.reason = reason


class Sandbox:
    """A pool of helper processes, started when first needed and kept for the next call. Thread-safe."""

    def __init__(self, *, num_processes: int, max_bytes: int) -> None:
        """max_bytes: of private memory in each process. Linux enforces it, macOS does not."""
        self._max_bytes = max_bytes
        self._idle: queue.LifoQueue[_HelperProcess | None] = queue.LifoQueue()
        for _ in range(num_processes):
            self._idle.put(None)
        self._running: set[_HelperProcess] = set()
        self._is_closed = False

    def run(self, function: Callable[..., Result], /, *args: object, timeout_s: float) -> Result:
        """The function's result. Function, arguments and result must be picklable; waits for a free process first.

        Raises LimitExceeded, and what the function raises.
        """
        process = self._idle.get()
        try:
            if process is None or not process.is_alive:
                process = self._start()
            succeeded, result = process.call(function, args, timeout_s)
        except LimitExceeded:
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

    def warm(self, function: Callable[..., object], /, *args: object, timeout_s: float) -> None:
        """Run a function once in the background, for what it imports and keeps."""

        def call() -> None:
            with contextlib.suppress(Exception):  # the first real call reports it
                self.run(function, *args, timeout_s=timeout_s)

        threading.Thread(target=call, name="sandbox-warm", daemon=True).start()

    def close(self) -> None:
        """End all processes, also those in mid-call."""
        self._is_closed = True
        for process in tuple(self._running):
            self._discard(process)

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


class _HelperProcess:
    """One process, for one call at a time."""

    def __init__(self, max_bytes: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, str(theirs.fileno()), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a library's panic may quote a client's text
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the server, which ends its helpers itself
            )
        self._connection = Connection(ours.detach())
        self._connection.send(max_bytes)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def call(self, function: Callable[..., object], args: tuple[object, ...], timeout_s: float) -> tuple[bool, object]:
        """Whether the function returned, and its result or else its error."""
        try:
            self._connection.send_bytes(pickle.dumps((timeout_s, function, args)))
            if not self._connection.poll(timeout_s):
                raise LimitExceeded("time")
            succeeded, result = self._connection.recv()
        except (EOFError, OSError) as error:
            raise LimitExceeded("crash") from error
        if isinstance(result, MemoryError):
            raise LimitExceeded("memory")
        return succeeded, result

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()  # a call that waits for an answer now reads the end of the stream


def serve(descriptor: int) -> None:
    """The helper process's main function: calls functions until the server closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, OSError):
        _limit_memory(connection.recv())
        while True:
            timeout_s, function, args = pickle.loads(connection.recv_bytes())
            # The default action ends the process even while it runs foreign code that holds the interpreter.
            signal.setitimer(signal.ITIMER_REAL, timeout_s + _ALARM_DELAY_S)
            answer = _call_in_thread(function, args)
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send_bytes(_pickled(answer))
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


def _pickled(answer: tuple[bool, object]) -> bytes:
    try:
        data = pickle.dumps(answer)
        if not answer[0]:
            pickle.loads(data)  # some errors pickle and cannot be read back
        return data
    except MemoryError:
        return pickle.dumps((False, MemoryError()))
    except Exception as error:  # an error or a result of foreign code that cannot be pickled
        kind = type(error if answer[0] else answer[1]).__name__
        return pickle.dumps((False, RuntimeError(f"the helper process cannot return a {kind}")))
