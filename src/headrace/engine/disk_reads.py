"""Requests that wait for a part of the prefix cache to be read from disk."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.prefix.key import Namespace, common_length
from headrace.prefix.node import Match
from headrace.state.disk import DiskTier
from headrace.state.disk_records import Load

SLICE_S = 0.01
"""Limit on delaying a step by making arrays from what was read, or by handing over what is to be written."""


@dataclass(frozen=True, slots=True)
class DiskRead:
    """A pending read. match: what the request needs besides, locked by the reader."""

    namespace: Namespace
    key: tuple[int, ...]
    match: Match
    load: Load


class DiskReads:
    """At most one read for each request, and none after it."""

    def __init__(self, disk: DiskTier, *, needs_snapshots: bool) -> None:
        self._disk = disk
        self._needs_snapshots = needs_snapshots
        self._reads: dict[str, DiskRead] = {}
        self._asked: set[str] = set()

    @property
    def is_waiting(self) -> bool:
        """Whether a read is still with the disk."""
        return any(not read.load.is_over.is_set() for read in self._reads.values())

    @property
    def num_bytes(self) -> int:
        """Bytes being read or read and not taken over yet."""
        return sum(read.load.num_bytes for read in self._reads.values())

    def begin(self, request_id: str, namespace: Namespace, key: tuple[int, ...], match: Match) -> bool:
        """Begin a read if the disk has more than the match and reading pays off. Returns whether one has begun."""
        if request_id in self._asked:
            return False
        on_disk = self._disk.match(namespace, key, match.limit)
        self._asked.add(request_id)
        if on_disk is None or on_disk.num_tokens <= match.num_tokens:
            return False
        load = self._disk.load(on_disk, match.num_tokens)
        if load is None:
            return False
        self._reads[request_id] = DiskRead(namespace, key, match, load)
        return True

    def helps(self, namespace: Namespace, key: tuple[int, ...], match: Match, least_tokens: int) -> bool:
        """Whether a read in progress for another request will provide this many tokens more than the match."""
        for read in self._reads.values():
            if read.namespace != namespace:
                continue
            num_tokens = min(common_length(read.key, key), read.load.num_tokens, match.limit)
            if self._needs_snapshots and num_tokens < read.load.num_tokens:
                continue
            if num_tokens - match.num_tokens >= least_tokens:
                return True
        return False

    def is_pending(self, request_id: str) -> bool:
        """Whether the request's read needs more time; does a slice of its work."""
        read = self._reads.get(request_id)
        return read is not None and read.load.advance(SLICE_S)

    def take(self, request_id: str) -> DiskRead | None:
        """The request's read, if it had one, cancelled unless it is done; forgotten here."""
        read = self._reads.pop(request_id, None)
        if read is not None:
            read.load.is_abandoned = True
        return read

    def end(self, request_id: str) -> DiskRead | None:
        """Forget a request; returns what `take` does."""
        self._asked.discard(request_id)
        return self.take(request_id)
