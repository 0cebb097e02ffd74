"""What a decoding step takes, learned from the steps that were timed."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import TypeVar

_Key = TypeVar("_Key", int, tuple[int, int])
"""Of times: a coarse context for those without drafts, a kind of drafts for the others."""

_NUM_KEPT = 9
"""Latest times of each kind that are kept."""

_NUM_SOUND, _DISTURBED = 5, 2.5
"""Of fewer times the median is taken without those that are so many times as long as the shortest: something has
disturbed them, a compiler for one."""

_NUM_SURE, _CREDIBLE = 3, 1.5
"""Times from which on a cost is believed that is so many times what was to be feared of these drafts untimed."""

_STALE_AFTER, _DRAFTED_STALE_AFTER = 4000, 500
"""Steps after which times that were not added to are forgotten: sooner with drafts, for what is thought dear is not
timed again as long as it is."""

_REMEMBERED_FOR = 64
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


@dataclass(slots=True)
class _Times:
    """Latest times of one kind of step, and the coarse context of each; touched: steps observed up to the last one."""

    contexts: deque[int]
    seconds: deque[float]
    touched: int


_Kind = tuple[int, int]
"""Drafts, in coarse steps, and passes of the head."""

Offer = tuple[tuple[tuple[float, ...], bool], ...]
"""Of each row that could have drafts their survival, and whether the head has to guess them."""


class StepCosts:
    """Running medians of step times by shape. All times are in seconds.

    Shapes cost the same within coarse steps: of rows and drafts see `coarse`, of the context half an octave. Times
    without drafts are kept by context; those with drafts tell a ratio to them, which hardly depends on it.

    Those of steps that run ahead of their tokens, as none beside drafts can, are kept as such ratios too.

    What disturbs a step makes it longer, never shorter: so times far over the least are left out, and no time without
    drafts is believed that a longer context, or drafts, went below.
    """

    def __init__(self) -> None:
        self._undrafted: dict[int, dict[int, _Times]] = {}
        self._drafted: dict[int, dict[_Kind, _Times]] = {}
        self._resting: dict[int, _Times] = {}
        self._num_observed = 0
        # answers that are good for a while
        self._prices: dict[tuple[int, int], Prices] = {}
        self._bases: dict[tuple[int, int], float | None] = {}
        self._ratios: dict[int, dict[_Kind, float]] = {}

    def observe_resting(self, shape: StepShape, seconds: float) -> None:
        """Add a step that ran ahead."""
        self._num_observed += 1
        times = self._add(self._resting, coarse(shape.num_rows), _context(shape.num_context), seconds)
        self._forget_some(times)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Add a step that held nothing but these rows' tokens and drafts."""
        self._num_observed += 1
        rows, context = coarse(shape.num_rows), _context(shape.num_context)
        if shape.num_drafts:
            times = self._add(self._drafted.setdefault(rows, {}), _kind(shape), context, seconds)
        else:
            times = self._add(self._undrafted.setdefault(rows, {}), context, context, seconds)
        self._forget_some(times)

    def _forget_some(self, times: _Times) -> None:
        """Forget answers, now and then, that were given before these times were added to."""
        if len(times.seconds) <= _NUM_SOUND or self._num_observed % _REMEMBERED_FOR == 0:
            self._prices.clear()
            self._bases.clear()
            self._ratios.clear()

    def _add(self, kinds: dict[_Key, _Times], kind: _Key, context: int, seconds: float) -> _Times:
        times = kinds.get(kind)
        if times is None or self._is_stale(kind, times):
            times = kinds[kind] = _Times(deque(maxlen=_NUM_KEPT), deque(maxlen=_NUM_KEPT), 0)
        times.contexts.append(context)
        times.seconds.append(seconds)
        times.touched = self._num_observed
        return times

    def prices(self, num_rows: int, num_context: int) -> Prices:
        """What steps of so many rows take that hold so many tokens together; to be asked for anew in each step."""
        key = num_rows, _context(num_context)
        prices = self._prices.get(key)
        if prices is None:
            prices = self._prices[key] = Prices(self, *key)
        return prices

    def num_timed(self, rows: int, context: int) -> int:
        """How many undrafted times are known with up to twice or half the context; the number kept bounds it.

        rows, context: in coarse steps, as in the following.
        """
        near = self._fresh(self._undrafted, rows)
        return sum(len(times.seconds) for other, times in near.items() if abs(other - context) <= 2)

    def base(self, rows: int, context: int) -> float | None:
        """The time without drafts: that of the nearest context, or less; None if none was timed."""
        if (rows, context) not in self._bases:
            self._bases[rows, context] = self._base(rows, context)
        return self._bases[rows, context]

    def resting(self, rows: int, context: int) -> float | None:
        """The time without drafts of steps that run ahead; `base` if none was timed."""
        base = self.base(rows, context)
        if base is None or not self.num_resting(rows):
            return base
        return base * (self._ratio(rows, self._resting[rows]) or 1.0)

    def num_resting(self, rows: int) -> int:
        """How many of their times are known."""
        times = self._resting.get(rows)
        return 0 if times is None or self._is_stale(rows, times) else len(times.seconds)

    def _base(self, rows: int, context: int) -> float | None:
        undrafted = self._fresh(self._undrafted, rows)
        if not undrafted:
            return None
        nearest = min(undrafted, key=lambda other: (abs(other - context), other))
        at_most = [_usual(undrafted[nearest].seconds)]
        for times in (*undrafted.values(), *self._fresh(self._drafted, rows).values()):
            pairs = zip(times.contexts, times.seconds, strict=True)
            at_most.append(_usual([seconds * _growth(context - other) for other, seconds in pairs]))
        return min(at_most)

    def expected_ratio(self, rows: int, kind: _Kind) -> float:
        """The time with drafts over the time without: as it was timed, or else as it is thought to be.

        That is judged by the nearest drafts that were timed, as a sum or in proportion.
        """
        known = self._known(rows)
        if kind in known:
            return known[kind]
        guess = _share(rows, kind)
        nearest = min(known, key=lambda each: (2 * abs(each[0] - kind[0]) + abs(each[1] - kind[1]), each), default=None)
        if nearest is None:
            return 1 + guess
        share = _share(rows, nearest)
        return max(min(known[nearest] + guess - share, 1 + (known[nearest] - 1) * guess / share), 0.5)

    def feared_ratio(self, rows: int, kind: _Kind) -> float:
        """The same if the worst is assumed of what was not timed."""
        known = self._known(rows)
        return known[kind] if kind in known else _feared(rows, kind, known)

    def _known(self, rows: int) -> dict[_Kind, float]:
        """The ratios that were timed.

        A high one of which there are few times may come from a compiler: it is left out, so that these drafts are tried
        again, or taken for no more than that of more drafts.
        """
        if rows not in self._ratios:
            found: dict[_Kind, float] = {}
            for kind, times in sorted(self._fresh(self._drafted, rows).items()):
                ratio = self._ratio(rows, times)
                if ratio is None:
                    continue
                if len(times.seconds) >= _NUM_SURE or ratio <= _CREDIBLE * _feared(rows, kind, found):
                    found[kind] = ratio
            for (drafts, head), times in self._fresh(self._drafted, rows).items():
                if (drafts, head) in found and len(times.seconds) < _NUM_KEPT:
                    more = (ratio for (most, deepest), ratio in found.items() if most >= drafts and deepest >= head)
                    found[drafts, head] = min(more)
            self._ratios[rows] = found
        return self._ratios[rows]

    def _ratio(self, rows: int, times: _Times) -> float | None:
        """Times over those without drafts at the same contexts; None if none of those is known."""
        base = {context: self.base(rows, context) for context in set(times.contexts)}
        pairs = [(base[context], seconds) for context, seconds in zip(times.contexts, times.seconds, strict=True)]
        ratios = [seconds / without for without, seconds in pairs if without is not None]
        return _usual(ratios) if ratios else None

    def _fresh(self, kinds: Mapping[int, Mapping[_Key, _Times]], rows: int) -> dict[_Key, _Times]:
        return {key: times for key, times in kinds.get(rows, {}).items() if not self._is_stale(key, times)}

    def _is_stale(self, key: int | tuple[int, int], times: _Times) -> bool:
        stale_after = _STALE_AFTER if isinstance(key, int) else _DRAFTED_STALE_AFTER
        return self._num_observed - times.touched > stale_after


def _usual(numbers: Iterable[float]) -> float:
    """The median, of a few numbers without those that were disturbed."""
    rising = sorted(numbers)
    if len(rising) < _NUM_SOUND:
        rising = rising[: bisect_right(rising, _DISTURBED * rising[0])]
    return median(rising)


def _growth(contexts: int) -> float:
    """How many times as long a step may take with so many half octaves more context, at most."""
    return 2 ** (contexts / 2) if contexts > 0 else 1.0


def _feared(rows: int, kind: _Kind, known: Mapping[_Kind, float]) -> float:
    """The highest ratio that is reckoned with if these drafts were not timed.

    They add to the time in proportion to fewer ones that were, or else each as much as a row of its own.
    """
    most = max((each for each in known if each[0] <= kind[0] and each[1] <= kind[1]), default=None)
    if most is None:
        return 1 + _middle(kind[0]) / _middle(rows) + _FEARED_HEAD_SHARE * kind[1]
    return 1 + max(known[most] - 1, 0) * _share(rows, kind) / _share(rows, most)


class Prices:
    """What steps of some rows with some context are thought to take, by their drafts and the head's passes.

    Answers are remembered; `StepCosts` makes a new object once it has learned enough.
    """

    __slots__ = (
        "_costs",
        "_expected",
        "_feared",
        "_least",
        "_rows",
        "base",
        "num_resting",
        "num_timed",
        "resting",
        "too_slow",
    )

    def __init__(self, costs: StepCosts, num_rows: int, context: int) -> None:
        self._costs = costs
        self._rows = coarse(num_rows)
        self._expected: dict[_Kind, float] = {}
        self._feared: dict[_Kind, float] = {}
        self._least: dict[tuple[tuple[int, ...], int], float] = {}
        self.base = costs.base(self._rows, context)
        """Without drafts; None as long as no such step was timed for so many rows."""
        self.resting = costs.resting(self._rows, context)
        """The same as long as there are none: that is what drafts have to be faster than."""
        self.num_timed = costs.num_timed(self._rows, context)
        """Times of such steps that are known."""
        self.num_resting = costs.num_resting(self._rows)
        """The same of `resting`."""
        self.too_slow = set[Offer]()
        """Drafts none of which was found to pay at these prices."""

    def expected(self, num_drafts: int, head_depth: int) -> float | None:
        """With these drafts, over all rows; None if `base` is."""
        if self.base is None or not num_drafts:
            return self.base
        seconds = self._expected.get((num_drafts, head_depth))
        if seconds is None:
            ratio = self._costs.expected_ratio(self._rows, (coarse(num_drafts), head_depth))
            seconds = self._expected[num_drafts, head_depth] = self.base * ratio
        return seconds

    def least(self, numbers: tuple[int, ...], head_depth: int) -> float:
        """The least of what these numbers of drafts, at least one, take with so many passes of the head."""
        key = numbers, head_depth
        if key not in self._least:
            self._least[key] = min(self.expected(number, head_depth) or 0.0 for number in numbers)
        return self._least[key]

    def feared(self, num_drafts: int, head_depth: int) -> float | None:
        """The same if the worst is assumed of what was not timed."""
        if self.base is None or not num_drafts:
            return self.base
        seconds = self._feared.get((num_drafts, head_depth))
        if seconds is None:
            ratio = self._costs.feared_ratio(self._rows, (coarse(num_drafts), head_depth))
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
