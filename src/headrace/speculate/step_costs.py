"""What a decoding step takes, learned from the steps that were timed."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from functools import cache
from statistics import median

_NUM_KEPT = 9
"""Times that a running median is taken of."""

_NUM_SOUND = 3
"""From so many times on the median is taken; of fewer the least, because what disturbs a step only makes it longer."""

_STALE_AFTER = 4000
"""Steps after which times that were not added to are forgotten."""

_REMEMBERED_FOR = 16
"""Steps for which an answer is given again without asking the medians, once there are enough times."""

_DRAFT_SHARE, _HEAD_SHARE = 0.08, 0.04
"""What a draft per row, and a pass of the head, are thought to add to a step before any was timed: a share of it.

It errs on the low side: a cost that is thought too low is measured soon, one thought too high never.
"""

_FEARED_HEAD_SHARE = 0.1
"""The same for a pass of the head, if the worst is assumed."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step's time depends on.

    num_rows: decoding sequences. num_drafts: over all of them. head_depth: passes of the head one after the other.
    num_context: tokens that the sequences hold, together.
    """

    num_rows: int
    num_drafts: int
    head_depth: int
    num_context: int

    @property
    def undrafted(self) -> StepShape:
        """The same step without drafts."""
        return replace(self, num_drafts=0, head_depth=0)


@dataclass(slots=True)
class _Cell:
    """Times of one shape. touched: number of steps observed when the last one was added."""

    times: deque[float]
    touched: int

    @property
    def time(self) -> float:
        """Running median."""
        return median(self.times) if len(self.times) >= _NUM_SOUND else min(self.times)


_Kind = tuple[int, int]
"""Drafts, in coarse steps, and passes of the head."""

_UNDRAFTED: _Kind = (0, 0)


class StepCosts:
    """Running medians of step times by shape. All times are in seconds.

    Shapes cost the same within coarse steps: of rows and drafts see `coarse`, of the context half an octave.
    """

    def __init__(self) -> None:
        self._cells: dict[int, dict[_Kind, dict[int, _Cell]]] = {}
        self._prices: dict[tuple[int, int], Prices] = {}
        self._num_observed = 0

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Add a step that held nothing but these rows' tokens and drafts."""
        self._num_observed += 1
        cells = self._of_kind(coarse(shape.num_rows), _kind(shape))
        context = _context(shape.num_context)
        cell = cells.get(context)
        if cell is None or self._is_stale(cell):
            cell = cells[context] = _Cell(deque(maxlen=_NUM_KEPT), 0)
        cell.times.append(seconds)
        cell.touched = self._num_observed
        if len(cell.times) < _NUM_KEPT or self._num_observed % _REMEMBERED_FOR == 0:
            self._prices.clear()

    def prices(self, num_rows: int, num_context: int) -> Prices:
        """What steps of so many rows take that hold so many tokens together; to be asked for anew in each step."""
        key = num_rows, _context(num_context)
        prices = self._prices.get(key)
        if prices is None:
            prices = self._prices[key] = Prices(self, *key)
        return prices

    def expected(self, shape: StepShape) -> float | None:
        """What a step is thought to take; None as long as none without drafts was timed for so many rows."""
        return self.prices(shape.num_rows, shape.num_context).expected(shape.num_drafts, shape.head_depth)

    def num_timed(self, rows: int, context: int) -> int:
        """How many undrafted times are known with up to twice or half the context; the number kept bounds it.

        rows, context: in coarse steps, as in the following.
        """
        cells = self._of_kind(rows, _UNDRAFTED)
        near = [cells[each] for each in range(context - 2, context + 3) if each in cells]
        return sum(len(cell.times) for cell in near if not self._is_stale(cell))

    def base(self, rows: int, context: int) -> float | None:
        """The time without drafts; None if none was timed."""
        nearest = self._nearest(rows, _UNDRAFTED, context)
        return None if nearest is None else nearest[1]

    def expected_ratio(self, rows: int, kind: _Kind, context: int) -> float:
        """The time with drafts over the time without, as it was timed or else as it is thought to be."""
        known = self._ratio(rows, kind, context)
        return self._extrapolated(rows, kind, context) if known is None else known

    def feared_ratio(self, rows: int, kind: _Kind, context: int) -> float | None:
        """The same if the worst is assumed of what was not timed; None if no draft was.

        Drafts add to the time in proportion to fewer ones that were timed.
        """
        ratio = self._ratio(rows, kind, context)
        most = self._most_timed(rows, kind)
        if ratio is None and most is not None and (known := self._ratio(rows, most, context)) is not None:
            ratio = 1 + max(known - 1, 0) * _share(rows, kind) / _share(rows, most)
        return ratio

    def _most_timed(self, rows: int, kind: _Kind) -> _Kind | None:
        """The most drafts that were timed and are no more than these."""
        kinds = self._cells[rows].items()
        timed = [each for each, cells in kinds if cells and each[0] and each[0] <= kind[0] and each[1] <= kind[1]]
        return max(timed, default=None)

    def _of_kind(self, rows: int, kind: _Kind) -> dict[int, _Cell]:
        return self._cells.setdefault(rows, {}).setdefault(kind, {})

    def _is_stale(self, cell: _Cell) -> bool:
        return self._num_observed - cell.touched > _STALE_AFTER

    def _nearest(self, rows: int, kind: _Kind, context: int) -> tuple[int, float] | None:
        """The context, of those that were timed, which is nearest to the given one, and the time there."""
        cells = self._of_kind(rows, kind)
        fresh = [each for each, cell in cells.items() if not self._is_stale(cell)]
        nearest = min(fresh, key=lambda each: (abs(each - context), each), default=None)
        return None if nearest is None else (nearest, cells[nearest].time)

    def _ratio(self, rows: int, kind: _Kind, context: int) -> float | None:
        """The time with drafts over the time without, at about the same context; None if it was never timed."""
        if (with_drafts := self._nearest(rows, kind, context)) is None:
            return None
        without = self._nearest(rows, _UNDRAFTED, with_drafts[0])
        return None if without is None else with_drafts[1] / without[1]

    def _extrapolated(self, rows: int, kind: _Kind, context: int) -> float:
        """The same for drafts that were not timed, from the nearest that were: as a sum or in proportion."""
        guess = _share(rows, kind)
        timed = [each for each, cells in self._cells[rows].items() if cells and each != _UNDRAFTED]
        nearest = min(timed, key=lambda each: (2 * abs(each[0] - kind[0]) + abs(each[1] - kind[1]), each), default=None)
        known = None if nearest is None else self._ratio(rows, nearest, context)
        if nearest is None or known is None:
            return 1 + guess
        share = _share(rows, nearest)
        return max(min(known + guess - share, 1 + (known - 1) * guess / share), 0.5)


class Prices:
    """What steps of some rows with some context are thought to take, by their drafts and the head's passes.

    Answers are remembered; `StepCosts` makes a new object once it has learned enough.
    """

    __slots__ = ("_context", "_costs", "_expected", "_feared", "_num_rows", "_rows", "base", "num_timed")

    def __init__(self, costs: StepCosts, num_rows: int, context: int) -> None:
        self._costs = costs
        self._num_rows, self._rows, self._context = num_rows, coarse(num_rows), context
        self._expected: dict[_Kind, float] = {}
        self._feared: dict[_Kind, float] = {}
        self.base = costs.base(self._rows, context)
        """Without drafts; None as long as no such step was timed for so many rows."""
        self.num_timed = costs.num_timed(self._rows, context)
        """Times of such steps that are known."""

    def expected(self, num_drafts: int, head_depth: int) -> float | None:
        """With these drafts, over all rows; None if `base` is."""
        if self.base is None or not num_drafts:
            return self.base
        seconds = self._expected.get((num_drafts, head_depth))
        if seconds is None:
            ratio = self._costs.expected_ratio(self._rows, (coarse(num_drafts), head_depth), self._context)
            seconds = self._expected[num_drafts, head_depth] = self.base * ratio
        return seconds

    def feared(self, num_drafts: int, head_depth: int) -> float | None:
        """The same if the worst is assumed of what was not timed: each draft costs as much as a row of its own."""
        if self.base is None or not num_drafts:
            return self.base
        seconds = self._feared.get((num_drafts, head_depth))
        if seconds is None:
            ratio = self._costs.feared_ratio(self._rows, (coarse(num_drafts), head_depth), self._context)
            if ratio is None:
                ratio = 1 + num_drafts / self._num_rows + _FEARED_HEAD_SHARE * head_depth
            seconds = self._feared[num_drafts, head_depth] = self.base * ratio
        return seconds


def _share(rows: int, kind: _Kind) -> float:
    """What drafts are thought to add to a step: a share of its time without them."""
    drafts, head = kind
    return _DRAFT_SHARE * _middle(drafts) / _middle(rows) + _HEAD_SHARE * head


def _kind(shape: StepShape) -> _Kind:
    return coarse(shape.num_drafts), shape.head_depth


def _context(num_tokens: int) -> int:
    return round(2 * math.log2(max(num_tokens, 256)))


@cache
def coarse(count: int) -> int:
    """A count as itself up to 8, then in steps of a quarter of an octave."""
    return count if count <= 8 else 8 + round(4 * math.log2(count / 8))


def _middle(step: int) -> float:
    """The count in the middle of such a step."""
    return step if step <= 8 else 8 * 2 ** ((step - 8) / 4)
