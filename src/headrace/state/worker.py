"""A thread that does one thing after another."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

Task = Callable[[], object]


class Worker:
    """Runs tasks in their order. A daemon: it keeps no process alive."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, task: Task) -> None:
        """Have a task done. What it raises is logged and ends nothing."""
        self._tasks.put(task)

    def close(self, seconds: float) -> bool:
        """End after the tasks that are left, for which it waits so long; whether all were done."""
        self._tasks.put(None)
        self._thread.join(seconds)
        is_done = not self._thread.is_alive()
        self._is_closed = True
        return is_done

    def _run(self) -> None:
        while not self._is_closed:
            task = self._tasks.get()
            if task is None:
                return
            try:
                task()
            except Exception:  # the thread's exception boundary: the next task may succeed
                logger.exception("work on the disk cache failed")
            del task  # or it would keep its arrays until the next one comes
