"""Estimates of how long things take, from the latest measurements."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median_low
from typing import Generic, TypeVar

Key = TypeVar("Key")

_NUM_KEPT = 9
"""Latest measurements kept of each key."""

_NUM_TRUSTED = 2
"""Measurements needed before they count: one alone may have waited for a compiler."""


class RecentTimes(Generic[Key]):
    """The usual time of each key, in seconds or seconds per unit: the median of its latest measurements.

    The median, because disturbances only lengthen a time; of two the shorter.
    """

    def __init__(self, stale_after: int | None = None) -> None:
        """stale_after: further measurements, of any key, after which those of a key are dropped."""
        self._stale_after = stale_after
        self._num_added = 0
        self._kept: dict[Key, deque[float]] = {}
        self._added_at: dict[Key, int] = {}

    def add(self, key: Key, seconds: float) -> None:
        if key in self._kept and self._is_stale(key):
            del self._kept[key]
        self._num_added += 1
        self._kept.setdefault(key, deque(maxlen=_NUM_KEPT)).append(seconds)
        self._added_at[key] = self._num_added

    def known(self) -> dict[Key, float]:
        return {key: median_low(kept) for key, kept in self._kept.items() if self._is_known(key)}

    def usual(self, key: Key) -> float | None:
        return median_low(self._kept[key]) if self._is_known(key) else None

    def nearest(self, distance: Callable[[Key], int]) -> list[float]:
        """Rising measurements of the known key at the least distance, or else of any key; none if there are none."""
        nearest = min(self._kept, key=lambda key: (not self._is_known(key), distance(key)), default=None)
        return [] if nearest is None else sorted(self._kept[nearest])

    def _is_known(self, key: Key) -> bool:
        return len(self._kept.get(key, ())) >= _NUM_TRUSTED and not self._is_stale(key)

    def _is_stale(self, key: Key) -> bool:
        return self._stale_after is not None and self._num_added - self._added_at[key] > self._stale_after
