"""How many drafts each row gets in the next step, so that tokens come fastest.

The time of a step depends on how many drafts it verifies, not on whose they are, so the drafts that are most likely to
survive go first, over all rows: for every number of drafts there is one best choice, and the planner takes the number
with the most tokens per second. What it may lose by that is kept in an account.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from headrace.speculate.step_costs import Offer, Prices, StepCosts, StepShape

_SHARE_AT_RISK = 0.015
"""Of the time that decoding takes without drafts, what may be lost by them."""

_FIRST_CREDIT, _FULL_CREDIT = 1.2, 3.0
"""The account's first balance, and what it can be filled up to at least, in steps without drafts."""

_NUM_LOSSES = 5
"""Steps with nothing but wrong drafts that a full account bears as well; gains of long ago don't pay for more."""

_NUM_TIMED = 2
"""Steps without drafts that are timed before the first draft, and of those that run ahead as soon as can be."""

_FIRST_RETIME, _RETIME_AFTER = 4, 64
"""Steps with drafts after which one without is timed again: so many for each time that is known, and at most."""

_FIRST_PAUSE, _LONGEST_PAUSE = 4, 64
"""Steps between two tries where drafts don't seem to pay, at first and at most."""

_COMPILING = 2.5
"""A first step of its kind that takes so many times as long as one without drafts has waited for a compiler."""

_MANY_ROWS = 4
"""From which on only whole multiples of their number are looked at as numbers of drafts, and all that there are."""

_LEAST_GAIN = 1.01
"""Drafts are made if they promise to be at least so much faster."""


class RowOutlook(NamedTuple):
    """What could be drafted for a row.

    survival: for each draft, how likely it and all before it are right; never rising.
    uses_head: whether the head has to guess them, one pass for each. num_context: tokens that the row holds.
    """

    survival: tuple[float, ...]
    uses_head: bool
    num_context: int


class DepthPlanner:
    """Plans the drafts of a step for all rows together. The text never depends on it, only its speed."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        # Of the account, in steps without drafts.
        self._balance, self._highest = _FIRST_CREDIT, _FULL_CREDIT
        self._since_timed = 0
        self._since_tried = 0
        self._pause = _FIRST_PAUSE
        self._is_try = False
        self._seen: set[tuple[int, int, int]] = set()

    def plan(self, rows: Sequence[RowOutlook]) -> tuple[int, ...]:
        """Number of drafts for each of the step's decoding rows, at most as many as its survival has entries."""
        nothing = (0,) * len(rows)
        self._is_try = False
        offered = tuple([(row.survival, row.uses_head) for row in rows if row.survival])
        if not offered:
            return nothing
        prices = self.prices(rows)
        resting = prices.resting
        if resting is None or self.is_timing(rows):
            return nothing
        if offered not in prices.too_slow:
            best = self._fastest(rows, prices, resting, offered)
            if best is not None:
                return best
        if self._since_tried < self._pause:
            return nothing
        tried = self._tried(rows)
        uses_head = any(row.uses_head and depth for row, depth in zip(rows, tried, strict=True))
        if not self._is_affordable(prices, sum(tried), int(uses_head), resting):
            return nothing
        self._is_try = True
        return tried

    def prices(self, rows: Sequence[RowOutlook]) -> Prices:
        """What steps of these rows take; to be asked for anew in each."""
        return self._costs.prices(len(rows), sum([row.num_context for row in rows]))

    def is_timing(self, rows: Sequence[RowOutlook]) -> bool:
        """Whether no drafts are planned for these rows because a step without is to be timed."""
        num_timed = self.prices(rows).num_timed
        return num_timed < _NUM_TIMED or self._since_timed >= min(_FIRST_RETIME * num_timed, _RETIME_AFTER)

    def wants_resting(self, rows: Sequence[RowOutlook]) -> bool:
        """Whether steps that run ahead are to be timed, so that drafts are compared with them."""
        prices = self.prices(rows)
        return prices.num_resting < _NUM_TIMED <= prices.num_timed

    def observe_resting(self, rows: Sequence[RowOutlook], seconds: float) -> None:
        """Tell what a step took that was launched ahead, and ahead of whose tokens the next one was."""
        self._since_timed, self._since_tried = 0, self._since_tried + 1
        self._balance = min(self._balance + _SHARE_AT_RISK, self._highest)
        self._costs.observe_resting(_shape(rows, [0] * len(rows)), seconds)

    def _fastest(
        self, rows: Sequence[RowOutlook], prices: Prices, resting: float, offered: Offer
    ) -> tuple[int, ...] | None:
        """The affordable choice with the most tokens per second; None if none is clearly faster than no drafts."""
        fastest, chosen, is_any_fast = _LEAST_GAIN * len(rows) / resting, list[_Draft](), False
        ranked: list[_Draft] = []
        for head_depth in range(max([len(row.survival) for row in rows if row.uses_head], default=0) + 1):
            survivals = [row.survival[:head_depth] if row.uses_head else row.survival for row in rows]
            numbers = _cut_numbers(sum(map(len, survivals)), len(rows))
            # so most steps without drafts are done with
            if not numbers or len(rows) + sum(map(sum, survivals)) <= fastest * prices.least(numbers, head_depth):
                continue
            ranked = ranked or _ranked(rows)
            choice = [draft for draft in ranked if draft.head_depth <= head_depth]
            gained = list(accumulate([draft.survival for draft in choice], initial=float(len(rows))))
            # fewer drafts than lead to this depth were looked at before
            deep = (number for number, draft in enumerate(choice, start=1) if draft.head_depth == head_depth)
            first = next(deep, 1)
            for number in numbers:
                if number < first:
                    continue
                seconds = prices.expected(number, head_depth) or resting
                if gained[number] <= fastest * seconds:
                    continue
                is_any_fast = True
                if self._is_affordable(prices, number, head_depth, resting):
                    fastest, chosen = gained[number] / seconds, choice[:number]
        if not is_any_fast:
            prices.too_slow.add(offered)
        if not chosen:
            return None
        counts = Counter(draft.row for draft in chosen)
        return tuple(counts[row] for row in range(len(rows)))

    def _is_affordable(self, prices: Prices, num_drafts: int, head_depth: int, resting: float) -> bool:
        """Whether the account bears that every draft of the step is wrong."""
        return (prices.feared(num_drafts, head_depth) or resting) / resting - 1 <= self._balance

    def _tried(self, rows: Sequence[RowOutlook]) -> tuple[int, ...]:
        """The draft that is most likely right; of many rows one each, since most of the price is that of any draft."""
        firsts = [row.survival[:1] for row in rows]
        if len(rows) >= _MANY_ROWS:
            return tuple(map(len, firsts))
        tried = max(range(len(rows)), key=firsts.__getitem__)
        return tuple(int(number == tried) for number in range(len(rows)))

    def observe(
        self, rows: Sequence[RowOutlook], depths: Sequence[int], num_gained: int, seconds: float, *, is_mixed: bool
    ) -> None:
        """Tell what became of a step.

        rows, depths: as planned and carried out. num_gained: tokens of these rows, right drafts included. seconds: of
        the whole step, with the head's share. is_mixed: whether prompts were computed in it as well; then its time
        says nothing about drafts.
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
        prices = self.prices(rows)
        resting, usual = prices.resting, prices.expected(shape.num_drafts, shape.head_depth)
        if resting is None or usual is None:
            return
        undrafted = num_gained / len(rows)
        self._balance += _SHARE_AT_RISK * undrafted
        if is_drafted:
            # What disturbs a step would have disturbed it without drafts as well.
            self._balance += undrafted - min(seconds, 2 * usual) / resting
            self._highest = max(_FULL_CREDIT, _NUM_LOSSES * (usual / resting - 1))
        self._balance = min(self._balance, self._highest)

    def _is_compiled(self, shape: StepShape, seconds: float) -> bool:
        """Whether a step has waited for its kernels to be compiled, as no other of its kind will."""
        kind = shape.num_rows, shape.num_drafts, shape.head_depth
        if kind in self._seen:
            return False
        self._seen.add(kind)
        base = self._costs.prices(shape.num_rows, shape.num_context).base
        return base is not None and seconds > _COMPILING * base


class _Draft(NamedTuple):
    """A draft that could be made. head_depth: passes of the head that it takes, 0 for a copy."""

    survival: float
    row: int
    head_depth: int


@cache
def _cut_numbers(num_drafts: int, num_rows: int) -> tuple[int, ...]:
    """Up to so many, the numbers of drafts that are looked at: for many rows few, for each is a form of a step."""
    stride = 1 if num_rows < _MANY_ROWS else num_rows
    return (*range(stride, num_drafts, stride), num_drafts) if num_drafts else ()


def _ranked(rows: Sequence[RowOutlook]) -> list[_Draft]:
    """All drafts by falling survival; each row's in their order."""
    drafts = [
        _Draft(survival, number, place if row.uses_head else 0)
        for number, row in enumerate(rows)
        for place, survival in enumerate(row.survival, start=1)
    ]
    return sorted(drafts, key=itemgetter(0), reverse=True)


def _shape(rows: Sequence[RowOutlook], depths: Sequence[int]) -> StepShape:
    num_drafts = sum(depths)
    by_head = [depth for row, depth in zip(rows, depths, strict=True) if row.uses_head] if num_drafts else ()
    return StepShape(len(rows), num_drafts, max(by_head, default=0), sum([row.num_context for row in rows]))
