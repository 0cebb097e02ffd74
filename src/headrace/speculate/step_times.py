"""Learns the times of decode steps, with and without drafts."""

from __future__ import annotations

import math
from functools import cache

from headrace.recent_times import RecentTimes

RETIME_EVERY = 128
"""Steps with drafts after which ones without are timed again."""

_STALE_AFTER = 4 * RETIME_EVERY
"""Steps after which a time is forgotten: drafts that seem too slow are never made, so never measured again."""

PASS_SHARE = 0.1
"""The most that a pass of a prediction head is assumed to add to a step's time; a draft, as much as a row."""

_OPTIMISM = 0.1
"""Unmeasured drafts are expected to add this share of the most that they may add to a step's time. So those that seem
cheap are tried, and thereby measured, and those that seem expensive are not."""

_SIMILAR_CONTEXT = 2
"""Contexts up to this many half octaves apart have similar times."""

DraftShape = tuple[int, int]
"""Bucket of the number of drafts, over all rows, and consecutive passes of the drafter."""

_NONE: DraftShape = (0, 0)


class StepTimes:
    """Times of decode steps of similar numbers of rows.

    Steps without drafts are kept by context, in seconds: as they are if nothing is ever drafted, overlapped where they
    can be. Steps with drafts are kept as ratios to them, which hardly depend on context.
    """

    def __init__(self, num_rows: int, pass_share: float = PASS_SHARE) -> None:
        """pass_share: the most that a pass of the drafter is assumed to add to a step's time."""
        self._num_rows = num_rows
        self._pass_share = pass_share
        self._times = RecentTimes[int | DraftShape](_STALE_AFTER)
        self._seen: set[tuple[int, int] | None] = set()
        self._ratios: dict[DraftShape, float] | None = None

    def observe_undrafted(self, num_context: int, seconds: float) -> None:
        """Add the time of a step without drafts. num_context: tokens of all rows."""
        if not self._is_first(None):
            self._times.add(_context(num_context), seconds)

    def observe(self, num_context: int, num_drafts: int, num_passes: int, seconds: float) -> None:
        """Add the time of a step with drafts; with none if none were found, which takes longer than not to try."""
        undrafted_s = self.undrafted_s(num_context)
        if self._is_first((num_drafts, num_passes)) or undrafted_s is None:
            return
        if num_drafts and seconds < undrafted_s:  # which was disturbed: drafts don't make a step faster
            self._times.add(_context(num_context), seconds)
        self.observe_ratio(num_drafts, num_passes, max(seconds / undrafted_s, 1.0))

    def _is_first(self, shape: tuple[int, int] | None) -> bool:
        """Whether a step is the first of its kind, which may have waited for a compiler."""
        is_first = shape not in self._seen
        self._seen.add(shape)
        return is_first

    def observe_ratio(self, num_drafts: int, num_passes: int, ratio: float) -> None:
        self._times.add((bucket(num_drafts), num_passes), ratio)
        self._ratios = None

    def undrafted_s(self, num_context: int) -> float | None:
        """The time without drafts at a similar context; None if unknown."""
        context = _context(num_context)
        for distance in range(_SIMILAR_CONTEXT + 1):
            for near in (context - distance, context + distance):
                if (seconds := self._times.usual(near)) is not None:
                    return seconds
        return None

    def is_measured(self, num_drafts: int, num_passes: int) -> bool:
        return (bucket(num_drafts), num_passes) in self._known()

    def ratio(self, num_drafts: int, num_passes: int) -> float:
        """The expected time with these drafts, at least one, over that without.

        Of unmeasured drafts from the most similar measured ones, by the assumed difference or in proportion.
        """
        known, drafts = self._known(), (bucket(num_drafts), num_passes)
        if drafts in known:
            return known[drafts]
        least, share = known.get(_NONE, 1.0), _OPTIMISM * self._assumed_max(drafts)
        measured = [each for each in known if each != _NONE]
        near = min(measured, key=lambda each: 2 * abs(each[0] - drafts[0]) + abs(each[1] - num_passes), default=None)
        if near is None:
            return least + share
        near_share = _OPTIMISM * self._assumed_max(near)
        return max(min(known[near] + share - near_share, least + (known[near] - least) * share / near_share), least)

    def upper_bound(self, num_drafts: int, num_passes: int) -> float:
        """The most that the same ratio may be: of unmeasured drafts in proportion to fewer measured ones, if any."""
        known, drafts = self._known(), (bucket(num_drafts), num_passes)
        if drafts in known:
            return known[drafts]
        least, most = known.get(_NONE, 1.0), self._assumed_max(drafts)
        fewer = max((each for each in known if each[0] <= drafts[0] and each[1] <= num_passes), default=_NONE)
        added = most if fewer == _NONE else max(known[fewer] - least, 0.0) * most / self._assumed_max(fewer)
        return min(least + added, self._least_of_larger(drafts))

    def _known(self) -> dict[DraftShape, float]:
        if self._ratios is None:
            self._ratios = {drafts: usual for drafts, usual in self._times.known().items() if isinstance(drafts, tuple)}
        return self._ratios

    def _least_of_larger(self, drafts: DraftShape) -> float:
        more = [ratio for each, ratio in self._known().items() if each[0] >= drafts[0] and each[1] >= drafts[1]]
        return min(more, default=math.inf)

    def _assumed_max(self, drafts: DraftShape) -> float:
        """The most that drafts are assumed to add to the time without, as a share of it."""
        return _center(drafts[0]) / self._num_rows + self._pass_share * drafts[1]


def _context(num_tokens: int) -> int:
    """In half octaves."""
    return round(2 * math.log2(max(num_tokens, 256)))


@cache
def bucket(count: int) -> int:
    """A count as itself up to 8, then in steps of a quarter of an octave."""
    return count if count <= 8 else 8 + round(4 * math.log2(count / 8))


def _center(bucket: int) -> float:
    return bucket if bucket <= 8 else 8 * 2 ** ((bucket - 8) / 4)
