"""Whether reading a state beats computing it, by what both were measured to take."""

from __future__ import annotations

from collections import deque
from statistics import median_low

READ_BYTES_PER_S = 500e6
"""Taken until it is measured: a slow solid-state disk."""
READ_START_S = 0.005
"""A read takes at least this long, with the wait for the next step."""
FILE_S = 0.0005
"""What each file adds."""
_TRUSTED = 2
"""Measurements before they are relied on."""
_LEAST_TOKENS = 16
"""Steps with fewer prompt tokens cost what a step costs at least, and say nothing about long prompts."""
_LEAST_BYTES = 1 << 20
"""Smaller reads say nothing about the disk's speed."""
_LEAST_PATIENCE_S = 2.0


class DiskPace:
    """Medians of the latest measurements. Reads are noted by the thread that reads, all else is the engine's."""

    def __init__(self, prefill_tokens_per_s: float) -> None:
        """prefill_tokens_per_s: taken until it is measured; too high rather than too low."""
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._prefill: deque[float] = deque(maxlen=9)
        self._reads: deque[float] = deque(maxlen=9)

    def observe_prefill(self, num_tokens: int, duration_s: float) -> None:
        """A step with this many prompt tokens took so long."""
        if num_tokens >= _LEAST_TOKENS and duration_s > 0:
            self._prefill.append(num_tokens / duration_s)

    def observe_read(self, num_bytes: int, duration_s: float) -> None:
        """Reading and checking this many bytes took so long."""
        if num_bytes >= _LEAST_BYTES and duration_s > 0:
            self._reads.append(num_bytes / duration_s)

    def compute_s(self, num_tokens: int) -> float:
        """Seconds to compute so many tokens of a prompt."""
        return num_tokens / _rate(self._prefill, self._prefill_tokens_per_s)

    def read_s(self, num_bytes: int, num_files: int) -> float:
        """Seconds to read so many bytes out of so many files."""
        return READ_START_S + num_files * FILE_S + num_bytes / _rate(self._reads, READ_BYTES_PER_S)

    def patience_s(self, num_tokens: int, num_bytes: int, num_files: int) -> float:
        """After this long a read that hasn't come is given up: a disk may hang."""
        expected_s = 4 * self.read_s(num_bytes, num_files)
        return max(_LEAST_PATIENCE_S, min(self.compute_s(num_tokens), expected_s))


def _rate(measured: deque[float], guess: float) -> float:
    return median_low(list(measured)) if len(measured) >= _TRUSTED else guess
