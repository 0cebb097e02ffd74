"""Limits how often we try to draft, because a failed attempt costs host time and prevents overlap."""

from __future__ import annotations

_NEW_STEPS = 16
"""New rows have separate attempts in this many first steps, if none is due for all rows."""

_LONGEST_REST = 32
"""Steps from one attempt to the next at most."""

_SHARE = 0.01
"""Share of the steps' time for attempts over all rows, and as much again for those at new rows alone."""

_LARGEST_CREDIT = 3.0
"""Undrafted steps in whose time there may be further attempts, if accepted drafts have gained it."""


class _TokenBucket:
    """Allows an attempt once it is paid for, and at least every _LONGEST_REST steps."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._debt_s = 0.0

    @property
    def is_due(self) -> bool:
        return self._debt_s <= 0 or self._num_steps >= _LONGEST_REST

    def step(self, *, attempted: bool) -> None:
        """Call after each step. attempted: whether there was an attempt."""
        self._num_steps = 0 if attempted else self._num_steps + 1

    def charge(self, seconds: float) -> None:
        self._debt_s += seconds

    def earn(self, gained_s: float, step_s: float) -> None:
        """Add what drafts have gained, and a share of a step's time."""
        self._debt_s = max(self._debt_s - gained_s - _SHARE * step_s, -_LARGEST_CREDIT * step_s)


class DraftThrottle:
    """Throttles attempts over all rows, and those over new rows alone."""

    def __init__(self) -> None:
        self._at_all, self._at_new = _TokenBucket(), _TokenBucket()
        self._last = self._at_all
        self.is_promising = False
        """Whether a draft was right in the last step, which is reason enough for the next look."""

    def is_due(self, num_steps: int) -> bool:
        """Whether to try a row that has decoded for this many steps."""
        return self._is_due_at_all or (num_steps < _NEW_STEPS and self._at_new.is_due)

    @property
    def _is_due_at_all(self) -> bool:
        return self.is_promising or self._at_all.is_due

    def step(self, *, attempted: bool) -> None:
        """Call after each step. attempted: whether any row was checked for drafts."""
        if attempted:
            self._last = self._at_all if self._is_due_at_all else self._at_new
        self._at_all.step(attempted=attempted and self._last is self._at_all)
        self._at_new.step(attempted=attempted)

    def charge(self, seconds: float) -> None:
        """The last attempt failed and cost this much."""
        self._last.charge(seconds)

    def earn(self, gained_s: float, step_s: float) -> None:
        """Call after a step: its undrafted time, and what drafts have saved."""
        self._at_all.earn(gained_s, step_s)
        self._at_new.earn(gained_s, step_s)
