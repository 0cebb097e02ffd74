"""Shares the device between the engines of one process: a step of each in turn."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class DeviceTurns:
    """A lock that is given to threads in the order in which they asked for it.

    A plain lock would often go back to the thread that has just released it, and so to one model for seconds. While no
    other engine has work, a turn costs less than a microsecond.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._waiting: deque[threading.Event] = deque()

    @contextmanager
    def take(self) -> Iterator[None]:
        """Around work on the device. Not reentrant."""
        self._take()
        try:
            yield
        finally:
            self._pass_on()

    def _take(self) -> None:
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return
            turn = threading.Event()
            self._waiting.append(turn)
        turn.wait()

    def _pass_on(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._is_taken = False
