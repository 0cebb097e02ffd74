"""Client work that waits for a helper process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from headrace.cancellation import run_in_thread
from headrace.errors import Overloaded

Result = TypeVar("Result")

MAX_WAITING = 128


class BoundedWork:
    """Runs a few calls in threads, lets MAX_WAITING wait without a thread, and refuses more."""

    def __init__(self, num_threads: int) -> None:
        self._free = asyncio.Semaphore(num_threads)
        self._num_waiting = 0
        self._started: set[asyncio.Task[Any]] = set()

    async def run(self, function: Callable[..., Result], *args: object) -> Result:
        """The function's result. Raises Overloaded."""
        if self._num_waiting >= MAX_WAITING:
            raise Overloaded("too many schemas and grammars wait to be compiled", retry_after_s=10)
        self._num_waiting += 1
        try:
            async with self._free:
                return await run_in_thread(function, *args)
        finally:
            self._num_waiting -= 1

    def start(self, function: Callable[..., object], *args: object) -> bool:
        """Run a function in the background. Returns False if too many are waiting."""
        if self._num_waiting >= MAX_WAITING:
            return False
        task = asyncio.create_task(self.run(function, *args))
        self._started.add(task)
        task.add_done_callback(self._started.discard)
        return True
