"""Delivery of outputs from the engine's thread to the event loops of their streams."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.errors import HeadraceError
from headrace.types.events import TokenOutput

SHORTEST_PAUSE_S = 0.001
"""An event loop's timers are no finer."""
LONGEST_PAUSE_S = 0.03
"""Readers of a stream hardly notice it."""
_DELIVERY_SHARE = 1 / 8
"""Of an event loop's time that deliveries may take, as far as the longest pause allows."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is queued; the first item in an output queue unless that is an error."""


Item = Accepted | TokenOutput | HeadraceError
"""What a request's stream receives: Accepted, then outputs, or an error."""


@dataclass(frozen=True, slots=True)
class OutputQueue:
    """Where a request's items go. put: never blocks; called in the event loop's thread."""

    event_loop: asyncio.AbstractEventLoop
    put: Callable[[Item], None]
    request_id: str


class Delivery:
    """Hands items over to their queues."""

    def __init__(self) -> None:
        self._loops: dict[asyncio.AbstractEventLoop, _LoopDelivery] = {}

    def hand_over(self, items: Sequence[tuple[OutputQueue, Item]]) -> list[str]:
        """Returns the ids of requests whose event loop is closed: no caller waits for them any more."""
        undeliverable: list[str] = []
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[OutputQueue, Item]]] = {}
        for outputs, item in items:
            by_loop.setdefault(outputs.event_loop, []).append((outputs, item))
        for event_loop, loop_items in by_loop.items():
            delivery = self._loops.get(event_loop)
            if delivery is None:
                self._loops = {each: known for each, known in self._loops.items() if not each.is_closed()}
                delivery = self._loops[event_loop] = _LoopDelivery(event_loop)
            try:
                delivery.hand_over(loop_items)
            except RuntimeError:
                del self._loops[event_loop]
                undeliverable += [outputs.request_id for outputs, _ in loop_items]
        return undeliverable


class _LoopDelivery:
    """Delivery to one event loop, with pauses for the engine.

    A call wakes the event loop's thread, which then holds the interpreter when the engine's thread wants it back. So
    there is one call for all streams (with eight calls, a step with 1 ms of host work took 1.8 ms, with one call
    1.1 ms), and a pause after each delivery, in which items are collected: 64 streams need about 7 ms for a message
    each, which costs more than another token in it, and a step takes as long.
    """

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self._event_loop = event_loop
        self._lock = threading.Lock()
        self._items: list[tuple[OutputQueue, Item]] = []
        self._is_delivering = False

    def hand_over(self, items: Sequence[tuple[OutputQueue, Item]]) -> None:
        """In the engine's thread. Raises RuntimeError if the event loop is closed."""
        with self._lock:
            self._items.extend(items)
            was_delivering = self._is_delivering
            self._is_delivering = True
        if self._event_loop.is_closed():
            raise RuntimeError("the event loop is closed")
        if not was_delivering:
            self._event_loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            items, self._items = self._items, []
            self._is_delivering = bool(items)
        if items:
            started_s = time.thread_time()
            for outputs, item in items:
                outputs.put(item)
            # runs behind the streams' tasks, which the items wake
            self._event_loop.call_soon(self._pause, started_s)

    def _pause(self, started_s: float) -> None:
        spent_s = time.thread_time() - started_s
        pause_s = min(spent_s / _DELIVERY_SHARE - spent_s, LONGEST_PAUSE_S)
        if pause_s < SHORTEST_PAUSE_S:
            self._deliver()
        else:
            self._event_loop.call_later(pause_s, self._deliver)
