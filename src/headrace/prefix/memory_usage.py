"""Counts every byte in use."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class MemoryKind(StrEnum):
    """What bytes are used for."""

    WEIGHTS = "weights"
    STATE = "state"
    """State of running sequences, and checkpoints of preempted ones."""
    RECORDS = "records"
    """Records of the prefix cache; they can be evicted."""
    DISK = "disk"
    """On the way to or from the disk."""
    ADAPTERS = "adapters"
    """LoRA and DoRA adapters."""
    FEATURES = "features"
    """Embeddings of images and videos."""


class MemoryUsage:
    """Bytes in use by kind, against one capacity.

    It records usage and never refuses; callers that need bytes call `reclaim` first. So usage may exceed the capacity,
    and `free_bytes` may be negative.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        """Bytes that may be in use together."""
        self._used = dict.fromkeys(MemoryKind, 0)

    def used(self, kind: MemoryKind) -> int:
        return self._used[kind]

    def free_bytes(self) -> int:
        """Bytes left; negative if usage exceeds the capacity."""
        return self.capacity_bytes - sum(self._used.values())

    def set_usage(self, kind: MemoryKind, num_bytes: int) -> None:
        self._used[kind] = num_bytes

    def reclaim(self, num_bytes: int, evict: Callable[[int], object]) -> None:
        """Evict from caches until `num_bytes` are left, or nothing more can be evicted.

        evict: drops pieces of at least the given number of bytes, or all it can; usage must be up to date when it
        returns. It is not called if there is room already, nor again once it has freed nothing.
        """
        free = self.free_bytes()
        while free < num_bytes:
            evict(num_bytes - free)
            before, free = free, self.free_bytes()
            if free <= before:
                return
