"""A cache that evicts the least recently used entries."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class LruCache(Generic[Key, Value]):
    """Keeps the entries used last, up to a total size. Thread-safe.

    max_size: in the unit of `put`'s sizes: entries, characters or bytes.
    """

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._size = 0
        self._entries: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key) -> Value | None:
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                return None
            self._entries.move_to_end(key)
            return found[0]

    def find(self, key: Key, make: Callable[[], Value]) -> Value:
        """The value, made and stored if there is none. Several threads may make the same one at once."""
        if (found := self.get(key)) is not None:
            return found
        made = make()
        self.put(key, made)
        return made

    def put(self, key: Key, value: Value, size: int = 1) -> None:
        with self._lock:
            self._remove(key)
            if size > self._max_size:
                return
            self._entries[key] = value, size
            self._size += size
            while self._size > self._max_size:
                _, (_, evicted) = self._entries.popitem(last=False)
                self._size -= evicted

    def remove(self, key: Key) -> None:
        with self._lock:
            self._remove(key)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._size = 0

    def _remove(self, key: Key) -> None:
        _, size = self._entries.pop(key, (None, 0))
        self._size -= size
