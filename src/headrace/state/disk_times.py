"""Decides whether reading a state is faster than computing it, from measured times."""

from __future__ import annotations

from headrace.recent_times import RecentTimes

READ_BYTES_PER_S = 500e6
"""Assumed until measured: a slow solid-state disk."""
READ_START_S = 0.005
"""A read takes at least this long, with the wait for the next step."""
FILE_S = 0.0005
"""Added per file."""
_LEAST_TOKENS = 16
"""Steps with fewer prompt tokens are dominated by fixed costs."""
_LEAST_BYTES = READ_BYTES_PER_S * READ_START_S
"""Smaller reads don't show the disk's speed: they take less time than their start."""
_LEAST_TIMEOUT_S = 2.0


class DiskTimes:
    """The usual times of prompt tokens and of reads. The reader's thread records reads, the engine's all else."""

    def __init__(self, prefill_tokens_per_s: float) -> None:
        """prefill_tokens_per_s: assumed until measured; rather too high than too low."""
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._token_s = RecentTimes[None]()
        self._byte_s = RecentTimes[None]()

    def observe_prefill(self, num_tokens: int, duration_s: float) -> None:
        if num_tokens >= _LEAST_TOKENS and duration_s > 0:
            self._token_s.add(None, duration_s / num_tokens)

    def observe_read(self, num_bytes: int, duration_s: float) -> None:
        if num_bytes >= _LEAST_BYTES and duration_s > 0:
            self._byte_s.add(None, duration_s / num_bytes)

    def compute_s(self, num_tokens: int) -> float:
        return num_tokens * (self._token_s.usual(None) or 1 / self._prefill_tokens_per_s)

    def read_s(self, num_bytes: int, num_files: int) -> float:
        return READ_START_S + num_files * FILE_S + num_bytes * (self._byte_s.usual(None) or 1 / READ_BYTES_PER_S)

    def timeout_s(self, num_tokens: int, num_bytes: int, num_files: int) -> float:
        """Timeout of a read, because a disk may hang."""
        return max(_LEAST_TIMEOUT_S, min(self.compute_s(num_tokens), 4 * self.read_s(num_bytes, num_files)))
