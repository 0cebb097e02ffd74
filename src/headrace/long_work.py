"""Runs long computations in threads one at a time: rendering a long conversation, parsing a large body.

A computing thread releases the GIL only after its switch interval. If several conversations were rendered at once, the
threads that streams need, the event loop's and the engine's, would wait for each of them again and again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from headrace.cancellation import check_cancelled

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")

SWITCH_INTERVAL_S = 0.0002
"""How long a thread waits for the GIL while another one computes. Python's default of 5 ms is a whole step."""

_POLL_S = 0.1

_lock = threading.Lock()
_holds_lock: ContextVar[bool] = ContextVar("holds_lock", default=False)


def shorten_switch_interval() -> None:
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def run_exclusively(
    function: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """The function's result, computed when no other long work computes. Raises WorkCancelled."""
    while not _lock.acquire(timeout=_POLL_S):
        check_cancelled()
    token = _holds_lock.set(True)
    try:
        check_cancelled()
        return function(*args, **kwargs)
    finally:
        _holds_lock.reset(token)
        _lock.release()


@contextmanager
def let_others_run() -> Iterator[None]:
    """Let other long work run during a part that runs no Python, such as waiting for another process."""
    if not _holds_lock.get():
        yield
        return
    _lock.release()
    try:
        yield
    finally:
        _lock.acquire()
