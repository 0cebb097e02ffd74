"""The gate in front of helper processes: limits how many calls use or wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from headrace.cancellation import run_in_pool
from headrace.errors import Overloaded

Result = TypeVar("Result")

MAX_WAITING = 128


class HelperGate:
    """Runs a few calls at once, in its own threads, because they block on helper processes. Belongs to one event loop.

    name: of the threads. refusal: message for calls beyond MAX_WAITING; None to let any number wait.
    """

    def __init__(self, num_threads: int, name: str, refusal: str | None = None) -> None:
        self._free = asyncio.Semaphore(num_threads)
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._refusal = refusal
        self._num_waiting = 0
        self._started: set[asyncio.Task[Any]] = set()

    async def run(
        self, function: Callable[..., Result], *args: object, unless: Callable[[], Result | None] = lambda: None
    ) -> Result:
        """The function's result, or what `unless` gives once a thread is free. Raises Overloaded."""
        if self._refusal is not None and self._is_full:
            raise Overloaded(self._refusal, retry_after_s=10)
        self._num_waiting += 1
        try:
            async with self._free:
                known = unless()
                return await run_in_pool(self._threads, function, *args) if known is None else known
        finally:
            self._num_waiting -= 1

    def start(self, function: Callable[..., object], *args: object) -> bool:
        """Run a function in the background. Returns False if too many are waiting."""
        if self._is_full:
            return False
        task = asyncio.create_task(self.run(function, *args))
        self._started.add(task)
        task.add_done_callback(self._started.discard)
        return True

    @property
    def _is_full(self) -> bool:
        return self._num_waiting >= MAX_WAITING
