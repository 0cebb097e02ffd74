"""Chooses how many drafts each row gets in the next step, for the most tokens per second.

A step's time depends on how many drafts it verifies, not on whose, so the likeliest drafts go first, over all rows:
each number of drafts has one best choice, and the planner takes the number with the most tokens per second. An
exploration budget limits what wrong drafts may cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from headrace.speculate.step_costs import OfferedDrafts, StepCosts, StepEstimate, StepShape

_SHARE_AT_RISK = 0.015
"""Share of the undrafted time that drafts may cost."""

_FIRST_BUDGET, _FULL_BUDGET = 1.2, 3.0
"""The budget at first and its least maximum, in undrafted steps."""

_NUM_LOSSES = 5
"""A full budget also covers this many steps with only wrong drafts; older gains don't pay for more."""

_NUM_TIMED = 2
"""Undrafted steps timed before the first draft, and overlapped ones timed as soon as possible."""

_FIRST_RETIME, _RETIME_AFTER = 4, 64
"""Steps with drafts after which an undrafted one is timed again: this many per known time, up to the maximum."""

_FIRST_PAUSE, _LONGEST_PAUSE = 4, 64
"""Steps between two tries where drafts don't seem to pay off, at first and at most."""

_COMPILING = 2.5
"""A first step of its kind that takes this many times an undrafted one has waited for a compiler."""

_MANY_ROWS = 4
"""With at least this many rows, only multiples of the row count are tried, to limit compiled variants."""

_LEAST_GAIN = 1.01
"""Drafts must promise at least this speed-up."""


class DraftForecast(NamedTuple):
    """The drafts available for a row.

    survival: for each draft, the probability that it and all before it are accepted; never rising.
    uses_head: whether the head has to draft them, one pass each.
    num_context: tokens of the row.
    """

    survival: tuple[float, ...]
    uses_head: bool
    num_context: int


class DepthPlanner:
    """Plans the drafts of a step for all rows together. Affects only the speed, never the output."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        # In undrafted steps.
        self._budget, self._highest = _FIRST_BUDGET, _FULL_BUDGET
        self._since_timed = 0
        self._since_tried = 0
        self._pause = _FIRST_PAUSE
        self._is_try = False
        self._seen: set[tuple[int, int, int]] = set()

    def plan(self, rows: Sequence[DraftForecast]) -> tuple[int, ...]:
        """Number of drafts for each of the step's decoding rows, at most as many as its survival has entries."""
        nothing = (0,) * len(rows)
        self._is_try = False
        offered = tuple([(row.survival, row.uses_head) for row in rows if row.survival])
        if not offered:
            return nothing
        estimate = self.estimate(rows)
        overlapped = estimate.overlapped
        if overlapped is None or self.is_timing(rows):
            return nothing
        if offered not in estimate.too_slow:
            best = self._fastest(rows, estimate, overlapped, offered)
            if best is not None:
                return best
        if self._since_tried < self._pause:
            return nothing
        tried = self._tried(rows)
        uses_head = any(row.uses_head and depth for row, depth in zip(rows, tried, strict=True))
        if not self._is_affordable(estimate, sum(tried), int(uses_head), overlapped):
            return nothing
        self._is_try = True
        return tried

    def estimate(self, rows: Sequence[DraftForecast]) -> StepEstimate:
        """The step times of these rows; ask again in each step."""
        return self._costs.estimate(len(rows), sum([row.num_context for row in rows]))

    def is_timing(self, rows: Sequence[DraftForecast]) -> bool:
        """Whether these rows get no drafts because an undrafted step is to be timed."""
        num_timed = self.estimate(rows).num_timed
        return num_timed < _NUM_TIMED or self._since_timed >= min(_FIRST_RETIME * num_timed, _RETIME_AFTER)

    def wants_overlapped(self, rows: Sequence[DraftForecast]) -> bool:
        """Whether overlapped steps are to be timed, for comparison with drafts."""
        estimate = self.estimate(rows)
        return estimate.num_overlapped < _NUM_TIMED <= estimate.num_timed

    def observe_overlapped(self, rows: Sequence[DraftForecast], seconds: float) -> None:
        """Record the time of a step that was launched ahead and ahead of whose tokens the next one was launched."""
        self._since_timed, self._since_tried = 0, self._since_tried + 1
        self._budget = min(self._budget + _SHARE_AT_RISK, self._highest)
        self._costs.observe_overlapped(_shape(rows, [0] * len(rows)), seconds)

    def _fastest(
        self, rows: Sequence[DraftForecast], estimate: StepEstimate, overlapped: float, offered: OfferedDrafts
    ) -> tuple[int, ...] | None:
        """The affordable choice with the most tokens per second; None if none is clearly faster than no drafts."""
        fastest, chosen, is_any_fast = _LEAST_GAIN * len(rows) / overlapped, list[_Draft](), False
        ranked: list[_Draft] = []
        for head_depth in range(max([len(row.survival) for row in rows if row.uses_head], default=0) + 1):
            survivals = [row.survival[:head_depth] if row.uses_head else row.survival for row in rows]
            numbers = _cut_numbers(sum(map(len, survivals)), len(rows))
            # most undrafted steps end here
            if not numbers or len(rows) + sum(map(sum, survivals)) <= fastest * estimate.least(numbers, head_depth):
                continue
            ranked = ranked or _ranked(rows)
            choice = [draft for draft in ranked if draft.head_depth <= head_depth]
            gained = list(accumulate([draft.survival for draft in choice], initial=float(len(rows))))
            # smaller numbers were tried at a smaller depth
            deep = (number for number, draft in enumerate(choice, start=1) if draft.head_depth == head_depth)
            first = next(deep, 1)
            for number in numbers:
                if number < first:
                    continue
                seconds = estimate.expected(number, head_depth) or overlapped
                if gained[number] <= fastest * seconds:
                    continue
                is_any_fast = True
                if self._is_affordable(estimate, number, head_depth, overlapped):
                    fastest, chosen = gained[number] / seconds, choice[:number]
        if not is_any_fast:
            estimate.too_slow.add(offered)
        if not chosen:
            return None
        counts = Counter(draft.row for draft in chosen)
        return tuple(counts[row] for row in range(len(rows)))

    def _is_affordable(self, estimate: StepEstimate, num_drafts: int, head_depth: int, overlapped: float) -> bool:
        """Whether the budget covers that every draft of the step is wrong."""
        return (estimate.upper_bound(num_drafts, head_depth) or overlapped) / overlapped - 1 <= self._budget

    def _tried(self, rows: Sequence[DraftForecast]) -> tuple[int, ...]:
        """The likeliest draft; with many rows one each, because most of the cost is that of any draft."""
        firsts = [row.survival[:1] for row in rows]
        if len(rows) >= _MANY_ROWS:
            return tuple(map(len, firsts))
        tried = max(range(len(rows)), key=firsts.__getitem__)
        return tuple(int(number == tried) for number in range(len(rows)))

    def observe(
        self, rows: Sequence[DraftForecast], depths: Sequence[int], num_gained: int, seconds: float, *, is_mixed: bool
    ) -> None:
        """Record a step's result.

        rows, depths: as planned and executed. num_gained: tokens of these rows, accepted drafts included. seconds: of
        the whole step, with the head's share. is_mixed: it also computed prompts; then its time says nothing about
        drafts.
        """
        shape = _shape(rows, depths)
        is_drafted = shape.num_drafts > 0
        self._since_timed = self._since_timed + 1 if is_drafted else 0
        self._since_tried = 0 if is_drafted else self._since_tried + 1
        if self._is_try and is_drafted:
            has_won = num_gained > len(rows)
            self._pause = 0 if has_won else min(max(2 * self._pause, _FIRST_PAUSE), _LONGEST_PAUSE)
        if is_mixed or not rows or self._is_compiled(shape, seconds):
            return
        self._costs.observe(shape, seconds)
        estimate = self.estimate(rows)
        overlapped, usual = estimate.overlapped, estimate.expected(shape.num_drafts, shape.head_depth)
        if overlapped is None or usual is None:
            return
        undrafted = num_gained / len(rows)
        self._budget += _SHARE_AT_RISK * undrafted
        if is_drafted:
            # A disturbance would have affected an undrafted step as well.
            self._budget += undrafted - min(seconds, 2 * usual) / overlapped
            self._highest = max(_FULL_BUDGET, _NUM_LOSSES * (usual / overlapped - 1))
        self._budget = min(self._budget, self._highest)

    def _is_compiled(self, shape: StepShape, seconds: float) -> bool:
        """Whether a step has waited for compilation, as no other of its kind will."""
        kind = shape.num_rows, shape.num_drafts, shape.head_depth
        if kind in self._seen:
            return False
        self._seen.add(kind)
        undrafted_s = self._costs.estimate(shape.num_rows, shape.num_context).undrafted_s
        return undrafted_s is not None and seconds > _COMPILING * undrafted_s


class _Draft(NamedTuple):
    """A possible draft. head_depth: passes of the head that it takes, 0 for a copy."""

    survival: float
    row: int
    head_depth: int


@cache
def _cut_numbers(num_drafts: int, num_rows: int) -> tuple[int, ...]:
    """The numbers of drafts to try, up to `num_drafts`: few for many rows, because each is a compiled variant."""
    stride = 1 if num_rows < _MANY_ROWS else num_rows
    return (*range(stride, num_drafts, stride), num_drafts) if num_drafts else ()


def _ranked(rows: Sequence[DraftForecast]) -> list[_Draft]:
    """All drafts by falling survival; each row's in order."""
    drafts = [
        _Draft(survival, number, place if row.uses_head else 0)
        for number, row in enumerate(rows)
        for place, survival in enumerate(row.survival, start=1)
    ]
    return sorted(drafts, key=itemgetter(0), reverse=True)


def _shape(rows: Sequence[DraftForecast], depths: Sequence[int]) -> StepShape:
    num_drafts = sum(depths)
    by_head = [depth for row, depth in zip(rows, depths, strict=True) if row.uses_head] if num_drafts else ()
    return StepShape(len(rows), num_drafts, max(by_head, default=0), sum([row.num_context for row in rows]))
