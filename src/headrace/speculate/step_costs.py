"""Learns decode step times from measured steps."""

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
"""Of times: a bucket context for those without drafts, a kind of drafts for the others."""

_NUM_KEPT = 9
"""Latest times kept of each kind."""

_NUM_SOUND, _DISTURBED = 5, 2.5
"""With fewer times, the median ignores those this many times the shortest, which were disturbed, for example by a
compiler."""

_NUM_SURE, _CREDIBLE = 3, 1.5
"""Samples required before an estimate above 1.5× the prior upper bound is trusted."""

_STALE_AFTER, _DRAFTED_STALE_AFTER = 4000, 500
"""Steps after which times without new samples are dropped: sooner with drafts, because a shape believed slow is
never chosen, so never measured again."""

_REMEMBERED_FOR = 64
"""Steps for which a median is cached, once there are enough times."""

_DRAFT_SHARE, _HEAD_SHARE = 0.08, 0.04
"""Assumed share of a step's time that a draft per row, and a pass of the head, add before any was timed.

Deliberately low: a cost believed too low is soon measured, one too high never.
"""

_FEARED_HEAD_SHARE = 0.1
"""The same for a pass of the head, as an upper bound."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step's time depends on.

    num_rows: decoding sequences.
    num_drafts: over all of them.
    head_depth: consecutive passes of the head.
    num_context: tokens of all sequences.
    """

    num_rows: int
    num_drafts: int
    head_depth: int
    num_context: int


@dataclass(slots=True)
class _Times:
    """Latest times of one kind of step, and each one's context bucket; touched: steps observed up to the last one."""

    contexts: deque[int]
    seconds: deque[float]
    touched: int


_Kind = tuple[int, int]
"""Bucket of the number of drafts, and passes of the head."""

OfferedDrafts = tuple[tuple[tuple[float, ...], bool], ...]
"""For each row that could have drafts, their survival, and whether the head has to draft them."""


class StepCosts:
    """Running medians of step times by shape. All times are in seconds.

    Shapes in one bucket cost the same: rows and drafts see `bucket`, context in half octaves. Undrafted times are kept
    by context; drafted ones as a ratio to them, which hardly depends on it. Overlapped steps are kept as such ratios,
    too.

    Disturbances only make a step longer: so times far over the minimum are ignored, and no undrafted time is believed
    that a longer context, or drafts, undercut.
    """

    def __init__(self) -> None:
        self._undrafted: dict[int, dict[int, _Times]] = {}
        self._drafted: dict[int, dict[_Kind, _Times]] = {}
        self._overlapped: dict[int, _Times] = {}
        self._num_observed = 0
        # cached estimates
        self._estimates: dict[tuple[int, int], StepEstimate] = {}
        self._bases: dict[tuple[int, int], float | None] = {}
        self._ratios: dict[int, dict[_Kind, float]] = {}

    def observe_overlapped(self, shape: StepShape, seconds: float) -> None:
        """Add an overlapped step."""
        self._num_observed += 1
        times = self._add(self._overlapped, bucket(shape.num_rows), _context(shape.num_context), seconds)
        self._forget_some(times)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Add a step with only these rows' tokens and drafts."""
        self._num_observed += 1
        rows, context = bucket(shape.num_rows), _context(shape.num_context)
        if shape.num_drafts:
            times = self._add(self._drafted.setdefault(rows, {}), _kind(shape), context, seconds)
        else:
            times = self._add(self._undrafted.setdefault(rows, {}), context, context, seconds)
        self._forget_some(times)

    def _forget_some(self, times: _Times) -> None:
        """Drop cached estimates, now and then, that are older than these times."""
        if len(times.seconds) <= _NUM_SOUND or self._num_observed % _REMEMBERED_FOR == 0:
            self._estimates.clear()
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

    def estimate(self, num_rows: int, num_context: int) -> StepEstimate:
        """The times of steps of this many rows with this many tokens in all; ask again in each step."""
        key = num_rows, _context(num_context)
        estimate = self._estimates.get(key)
        if estimate is None:
            estimate = self._estimates[key] = StepEstimate(self, *key)
        return estimate

    def num_timed(self, rows: int, context: int) -> int:
        """Number of undrafted times with up to twice or half the context; bounded by the number kept.

        rows, context: buckets, as in the following.
        """
        near = self._fresh(self._undrafted, rows)
        return sum(len(times.seconds) for other, times in near.items() if abs(other - context) <= 2)

    def undrafted_s(self, rows: int, context: int) -> float | None:
        """The undrafted time at the nearest context, or less; None if none was timed."""
        if (rows, context) not in self._bases:
            self._bases[rows, context] = self._base(rows, context)
        return self._bases[rows, context]

    def overlapped(self, rows: int, context: int) -> float | None:
        """The undrafted time of overlapped steps; `undrafted_s` if none was timed."""
        undrafted_s = self.undrafted_s(rows, context)
        if undrafted_s is None or not self.num_overlapped(rows):
            return undrafted_s
        return undrafted_s * (self._ratio(rows, self._overlapped[rows]) or 1.0)

    def num_overlapped(self, rows: int) -> int:
        times = self._overlapped.get(rows)
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
        """The drafted over the undrafted time, as timed or else extrapolated.

        From the nearest timed drafts, as a sum or in proportion.
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

    def upper_bound_ratio(self, rows: int, kind: _Kind) -> float:
        """The same as an upper bound where nothing was timed."""
        known = self._known(rows)
        return known[kind] if kind in known else _upper_bound(rows, kind, known)

    def _known(self, rows: int) -> dict[_Kind, float]:
        """The timed ratios.

        A high one with few samples may come from a compiler: it is ignored, so that these drafts are tried again, or
        capped by that of more drafts.
        """
        if rows not in self._ratios:
            found: dict[_Kind, float] = {}
            for kind, times in sorted(self._fresh(self._drafted, rows).items()):
                ratio = self._ratio(rows, times)
                if ratio is None:
                    continue
                if len(times.seconds) >= _NUM_SURE or ratio <= _CREDIBLE * _upper_bound(rows, kind, found):
                    found[kind] = ratio
            for (drafts, head), times in self._fresh(self._drafted, rows).items():
                if (drafts, head) in found and len(times.seconds) < _NUM_KEPT:
                    more = (ratio for (most, deepest), ratio in found.items() if most >= drafts and deepest >= head)
                    found[drafts, head] = min(more)
            self._ratios[rows] = found
        return self._ratios[rows]

    def _ratio(self, rows: int, times: _Times) -> float | None:
        """Times over the undrafted ones at the same contexts; None if none of those is known."""
        undrafted_s = {context: self.undrafted_s(rows, context) for context in set(times.contexts)}
        pairs = [
            (undrafted_s[context], seconds) for context, seconds in zip(times.contexts, times.seconds, strict=True)
        ]
        ratios = [seconds / without for without, seconds in pairs if without is not None]
        return _usual(ratios) if ratios else None

    def _fresh(self, kinds: Mapping[int, Mapping[_Key, _Times]], rows: int) -> dict[_Key, _Times]:
        return {key: times for key, times in kinds.get(rows, {}).items() if not self._is_stale(key, times)}

    def _is_stale(self, key: int | tuple[int, int], times: _Times) -> bool:
        stale_after = _STALE_AFTER if isinstance(key, int) else _DRAFTED_STALE_AFTER
        return self._num_observed - times.touched > stale_after


def _usual(numbers: Iterable[float]) -> float:
    """The median, of a few numbers without disturbed ones."""
    rising = sorted(numbers)
    if len(rising) < _NUM_SOUND:
        rising = rising[: bisect_right(rising, _DISTURBED * rising[0])]
    return median(rising)


def _growth(contexts: int) -> float:
    """How many times as long a step may take with this many half octaves more context, at most."""
    return 2 ** (contexts / 2) if contexts > 0 else 1.0


def _upper_bound(rows: int, kind: _Kind, known: Mapping[_Kind, float]) -> float:
    """The highest ratio assumed for untimed drafts.

    They add in proportion to fewer ones that were timed, or else as much as a row each.
    """
    most = max((each for each in known if each[0] <= kind[0] and each[1] <= kind[1]), default=None)
    if most is None:
        return 1 + _bucket_center(kind[0]) / _bucket_center(rows) + _FEARED_HEAD_SHARE * kind[1]
    return 1 + max(known[most] - 1, 0) * _share(rows, kind) / _share(rows, most)


class StepEstimate:
    """Estimated step times of some rows and context, by drafts and passes of the head.

    Cached; `StepCosts` makes a new one once it has learned enough.
    """

    __slots__ = (
        "_costs",
        "_expected",
        "_upper_bound",
        "_least",
        "_rows",
        "undrafted_s",
        "num_overlapped",
        "num_timed",
        "overlapped",
        "too_slow",
    )

    def __init__(self, costs: StepCosts, num_rows: int, context: int) -> None:
        self._costs = costs
        self._rows = bucket(num_rows)
        self._expected: dict[_Kind, float] = {}
        self._upper_bound: dict[_Kind, float] = {}
        self._least: dict[tuple[tuple[int, ...], int], float] = {}
        self.undrafted_s = costs.undrafted_s(self._rows, context)
        """Without drafts; None as long as no such step was timed for so many rows."""
        self.overlapped = costs.overlapped(self._rows, context)
        """The same as long as there are none: that is what drafts have to be faster than."""
        self.num_timed = costs.num_timed(self._rows, context)
        """Times of such steps that are known."""
        self.num_overlapped = costs.num_overlapped(self._rows)
        """The same of `overlapped`."""
        self.too_slow = set[OfferedDrafts]()
        """Drafts none of which was found to pay at these estimate."""

    def expected(self, num_drafts: int, head_depth: int) -> float | None:
        """With these drafts, over all rows; None if `undrafted_s` is."""
        if self.undrafted_s is None or not num_drafts:
            return self.undrafted_s
        seconds = self._expected.get((num_drafts, head_depth))
        if seconds is None:
            ratio = self._costs.expected_ratio(self._rows, (bucket(num_drafts), head_depth))
            seconds = self._expected[num_drafts, head_depth] = self.undrafted_s * ratio
        return seconds

    def least(self, numbers: tuple[int, ...], head_depth: int) -> float:
        """The least time of these numbers of drafts, at least one, with this many passes of the head."""
        key = numbers, head_depth
        if key not in self._least:
            self._least[key] = min(self.expected(number, head_depth) or 0.0 for number in numbers)
        return self._least[key]

    def upper_bound(self, num_drafts: int, head_depth: int) -> float | None:
        """The same as an upper bound where nothing was timed."""
        if self.undrafted_s is None or not num_drafts:
            return self.undrafted_s
        seconds = self._upper_bound.get((num_drafts, head_depth))
        if seconds is None:
            ratio = self._costs.upper_bound_ratio(self._rows, (bucket(num_drafts), head_depth))
            seconds = self._upper_bound[num_drafts, head_depth] = self.undrafted_s * ratio
        return seconds


def _share(rows: int, kind: _Kind) -> float:
    """Assumed share of the undrafted time that drafts add."""
    drafts, head = kind
    return _DRAFT_SHARE * _bucket_center(drafts) / _bucket_center(rows) + _HEAD_SHARE * head


def _kind(shape: StepShape) -> _Kind:
    return bucket(shape.num_drafts), shape.head_depth


def _context(num_tokens: int) -> int:
    return round(2 * math.log2(max(num_tokens, 256)))


@cache
def bucket(count: int) -> int:
    """A count as itself up to 8, then in steps of a quarter of an octave."""
    return count if count <= 8 else 8 + round(4 * math.log2(count / 8))


def _bucket_center(step: int) -> float:
    """The count in the middle of a bucket."""
    return step if step <= 8 else 8 * 2 ** ((step - 8) / 4)
