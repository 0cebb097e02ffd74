"""What the engine did in each of the latest seconds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields

from headrace.types.recent import StepHistory

NUM_SECONDS = 300


@dataclass(slots=True)
class _Second:
    num_steps: int = 0
    step_s: float = 0.0
    num_rows: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_lookup_tokens: int = 0
    num_hit_tokens: int = 0


class Seconds:
    """A ring of the latest seconds. Times are monotonic seconds of the caller's clock."""

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque(maxlen=NUM_SECONDS)
        self._last = 0
        """Number of the last second in the ring."""

    def at(self, now: float) -> _Second:
        """The sums of the second in progress, to be added to."""
        number = int(now)
        num_new = number - self._last if self._seconds else 1
        if num_new > 0:
            self._seconds.extend(_Second() for _ in range(min(num_new, NUM_SECONDS)))
            self._last = number
        return self._seconds[-1]

    def snapshot(self, now: float) -> StepHistory:
        self.at(now)
        columns = {each.name: tuple(getattr(second, each.name) for second in self._seconds) for each in fields(_Second)}
        return StepHistory(self._last + 1 - len(self._seconds), **columns)
