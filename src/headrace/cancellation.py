"""Work in threads that ends soon after its caller is cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from typing import ParamSpec, TypeVar

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class WorkCancelled(BaseException):
    """The work's result is no longer wanted. Not an Exception, so that no handler treats it as a failure."""


class Cancellation:
    """Whether a piece of work was cancelled, and what interrupts its current call."""

    def __init__(self) -> None:
        self._is_cancelled = False
        self._interrupt: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            if self._interrupt is not None:
                self._interrupt()

    def check(self) -> None:
        if self._is_cancelled:
            raise WorkCancelled

    @contextmanager
    def interrupted_by(self, interrupt: Callable[[], None]) -> Iterator[None]:
        with self._lock:
            self.check()
            self._interrupt = interrupt
        try:
            yield
        finally:
            with self._lock:
                self._interrupt = None
            self.check()


_current: ContextVar[Cancellation] = ContextVar("cancellation", default=Cancellation())  # noqa: B039


def call_cancellable(cancellation: Cancellation, function: Callable[[], Result]) -> Result:
    """The function's result; once it is cancelled, the next `check_cancelled` in it raises."""

    def work() -> Result:
        _current.set(cancellation)
        cancellation.check()
        return function()

    return copy_context().run(work)


async def run_in_thread(
    function: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """As asyncio.to_thread, but after the caller is cancelled the function's next `check_cancelled` raises."""
    return await run_in_pool(None, function, *args, **kwargs)


async def run_in_pool(
    pool: Executor | None, function: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """As `run_in_thread`, in a pool's thread. pool: None for the event loop's own."""
    cancellation = Cancellation()
    work = partial(copy_context().run, call_cancellable, cancellation, partial(function, *args, **kwargs))
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, work)
    except asyncio.CancelledError:
        cancellation.cancel()
        raise


def check_cancelled() -> None:
    """Call between two pieces of long work. Raises WorkCancelled."""
    _current.get().check()


@contextmanager
def interrupted_by(interrupt: Callable[[], None]) -> Iterator[None]:
    """Around a blocking call: on cancellation `interrupt`, called in another thread, makes it fail. Raises
    WorkCancelled then."""
    with _current.get().interrupted_by(interrupt):
        yield
