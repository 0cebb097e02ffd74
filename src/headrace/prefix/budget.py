"""One account of every byte in use."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class Kind(StrEnum):
    """What bytes are in use for."""

    WEIGHTS = "weights"
    STATE = "state"
    """State of sequences that run, and checkpoints of those that have made room."""
    RECORDS = "records"
    """Stored pieces of the prefix cache; these can give way."""
    DISK = "disk"
    """On its way to or from the disk."""
    FEATURES = "features"
    """Embeddings of images and videos."""


class Ledger:
    """Bytes in use by kind, against one capacity.

    The account follows what is in use and never refuses: who wants bytes asks `make_room` first. So it may be
    overdrawn, and `room` negative.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        """Bytes that may be in use together."""
        self._used = dict.fromkeys(Kind, 0)

    def used(self, kind: Kind) -> int:
        """Bytes in use of one kind."""
        return self._used[kind]

    def room(self) -> int:
        """Bytes that are left; negative if more are in use than may be."""
        return self.capacity_bytes - sum(self._used.values())

    def restate(self, kind: Kind, num_bytes: int) -> None:
        """`num_bytes` of a kind are in use now."""
        self._used[kind] = num_bytes

    def make_room(self, num_bytes: int, evict: Callable[[int], int]) -> bool:
        """Let caches give way until `num_bytes` are left; whether they are.

        evict: drops what holds at least as many bytes as it is told, or all it can, and says how many that were; what
        it drops is no more in use here when it returns. It isn't called if there is room already, and not again once
        it has released nothing.
        """
        room = self.room()
        while room < num_bytes:
            evict(num_bytes - room)
            before, room = room, self.room()
            if room <= before:
                return False
        return True
