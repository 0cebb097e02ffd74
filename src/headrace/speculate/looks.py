"""When rows are looked at for what could be drafted: a look that finds nothing has its price.

It takes the host's time, and no step is launched ahead of it, so that the device may have to wait.
"""

from __future__ import annotations

_NEW_STEPS = 16
"""Steps after a row's first in which there are looks at new rows alone, if none is due at all of them."""

_LONGEST_REST = 32
"""Steps from one look to the next at most."""

_SHARE = 0.01
"""What looks at all rows may take of the time of steps, and as much again those at new rows alone."""

_LARGEST_CREDIT = 3.0
"""Steps without drafts in whose time there may be looks beyond that, where right drafts have gained it."""


class _Pace:
    """How often to look: when it is paid for, and at least each _LONGEST_REST steps."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._debt_s = 0.0

    @property
    def is_due(self) -> bool:
        """Whether it is time for a look."""
        return self._debt_s <= 0 or self._num_steps >= _LONGEST_REST

    def step(self, *, is_look: bool) -> None:
        """A step is over, and a look was taken or not."""
        self._num_steps = 0 if is_look else self._num_steps + 1

    def charge(self, seconds: float) -> None:
        """A look has cost so much."""
        self._debt_s += seconds

    def earn(self, gained_s: float, step_s: float) -> None:
        """Take what drafts have gained, and a share of a step's time."""
        self._debt_s = max(self._debt_s - gained_s - _SHARE * step_s, -_LARGEST_CREDIT * step_s)


class Looks:
    """Looks at all rows, and those at new ones alone."""

    def __init__(self) -> None:
        self._at_all, self._at_new = _Pace(), _Pace()
        self._last = self._at_all
        self.is_promising = False
        """Whether a draft was right in the last step, which is reason enough for the next look."""

    def is_due(self, num_steps: int) -> bool:
        """Whether it is time for a look at a row that has been decoded for so many steps."""
        return self._is_due_at_all or (num_steps < _NEW_STEPS and self._at_new.is_due)

    @property
    def _is_due_at_all(self) -> bool:
        return self.is_promising or self._at_all.is_due

    def step(self, *, is_look: bool) -> None:
        """A step is over, and those rows were looked at for which it was due, or nobody was."""
        if is_look:
            self._last = self._at_all if self._is_due_at_all else self._at_new
        self._at_all.step(is_look=is_look and self._last is self._at_all)
        self._at_new.step(is_look=is_look)

    def charge(self, seconds: float) -> None:
        """The last look has led to nothing, and cost so much."""
        self._last.charge(seconds)

    def earn(self, gained_s: float, step_s: float) -> None:
        """A step is over that takes so long without drafts, of which they have saved so much."""
        self._at_all.earn(gained_s, step_s)
        self._at_new.earn(gained_s, step_s)
