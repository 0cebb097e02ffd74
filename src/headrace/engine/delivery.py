"""Delivery of outputs from the engine's thread to the event loops of their streams."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.errors import HeadraceError
from headrace.types.events import TokenOutput

SHORTEST_PAUSE_S = 0.001
"""The resolution of an event loop's timers."""
LONGEST_PAUSE_S = 0.03
"""Readers of a stream hardly notice it."""
_DELIVERY_SHARE = 1 / 8
"""Share of an event loop's time for deliveries, as far as the longest pause allows."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is queued; the first item in an output queue unless that is an error."""


Item = Accepted | TokenOutput | HeadraceError
"""What a request's stream receives: Accepted, then outputs, or an error."""


class Receiver(Protocol):
    """Receives the items of many requests in batches."""

    def receive(self, items: Sequence[tuple[OutputQueue, Item]]) -> None:
        """Called in the engine's thread. Raises RuntimeError if no caller waits for items any more."""


@dataclass(frozen=True, slots=True)
class OutputQueue:
    """The output queue of a request. put: called by the receiver."""

    receiver: Receiver
    put: Callable[[Item], None]
    request_id: str


def deliver(items: Sequence[tuple[OutputQueue, Item]]) -> list[str]:
    """Deliver items, those of each receiver together. Returns the ids of requests whose caller no longer waits."""
    undeliverable: list[str] = []
    by_receiver: dict[Receiver, list[tuple[OutputQueue, Item]]] = {}
    for outputs, item in items:
        by_receiver.setdefault(outputs.receiver, []).append((outputs, item))
    for receiver, received in by_receiver.items():
        try:
            receiver.receive(received)
        except RuntimeError:
            undeliverable += [outputs.request_id for outputs, _ in received]
    return undeliverable


class EventLoopReceiver:
    """An event loop, woken once for the items of all its streams.

    After each delivery it pauses, and what comes meanwhile is delivered together: another token in a message costs
    the server and its client far less than another message. (64 streams need about 7 ms for a message each, and a step
    takes as long.)
    """

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self._event_loop = event_loop
        self._lock = threading.Lock()
        self._items: list[tuple[OutputQueue, Item]] = []
        self._is_delivering = False

    def receive(self, items: Sequence[tuple[OutputQueue, Item]]) -> None:
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
            # runs after the streams' tasks, which the items wake
            self._event_loop.call_soon(self._pause, started_s)

    def _pause(self, started_s: float) -> None:
        spent_s = time.thread_time() - started_s
        pause_s = min(spent_s / _DELIVERY_SHARE - spent_s, LONGEST_PAUSE_S)
        if pause_s < SHORTEST_PAUSE_S:
            self._deliver()
        else:
            self._event_loop.call_later(pause_s, self._deliver)
