"""Chooses how many drafts each row gets in the next step, for the most tokens per second.

A step's time depends on how many drafts it verifies, not on whose, so the likeliest drafts go first, over all rows:
each number of drafts has one best choice, and the planner takes the number with the most tokens per second.

A token bucket limits the time that drafting may lose against never drafting: by wrong drafts, by attempts that find
none, and by drafts made to learn how likely they are. Its level, the budget, rises by a small share of the time and by
what accepted drafts gain, and falls by what others lose. Similar numbers of rows share a bucket: drafts that lost time
with 32 rows say nothing about one row. A new bucket begins at the highest level of the others, since drafts that gained
time there are worth trying here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from headrace.speculate.step_times import PASS_SHARE, RETIME_EVERY, StepTimes, bucket

_BUDGET_SHARE = 0.015
"""Share of the time without drafts that may be lost."""

_FIRST_BUDGET, _FULL_BUDGET = 1.2, 5.0
"""The budget at first and at most, in steps without drafts."""

_TRY_RESERVE = 2
"""Drafts that don't seem to pay off are only tried with a budget of this many times their cost, so that likely ones
stay affordable."""

_ATTEMPT_RESERVE = 4
"""The next attempt is due once the budget has grown by this many times the cost of a failed one."""

_TIMING_STEPS = 3
"""Steps without drafts that their timing takes at most: the first and last of an overlapped run don't count."""

_PREFILL_SHARE = 0.25
"""Of the steps that an answer may still take, what the draft model's prefill may cost at most."""

_MANY_ROWS = 4
"""With at least this many rows, only multiples of the row count are tried, to limit compiled variants."""


class DraftForecast(NamedTuple):
    """The drafts available for a row.

    survival: for each draft, the probability that it and all before it are accepted; never rising.
    uses_model: whether the head or draft model has to draft them, one pass each.
    num_context: tokens of the row.
    prefill_s: seconds of computing that the draft model has to do before; see `prefills`.
    num_left: tokens that the row's answer may still have.
    """

    survival: tuple[float, ...]
    uses_model: bool
    num_context: int
    prefill_s: float = 0.0
    num_left: int = 0


@dataclass(slots=True)
class _BatchStats:
    """What is known of steps of about the same number of rows.

    full: the largest budget. due_at: the budget with which an attempt to draft is due.
    useful_at, prefill_at: the least budgets with which the last attempt would have drafted, or would have prefilled a
    text for the draft model.
    """

    times: StepTimes
    budget: float = _FIRST_BUDGET
    full: float = _FULL_BUDGET
    due_at: float = 0.0
    useful_at: float = 0.0
    prefill_at: float = math.inf


class DepthPlanner:
    """Plans the drafts of a step for all rows together. Affects only the speed, never the output."""

    def __init__(self, pass_share: float = PASS_SHARE) -> None:
        """pass_share: see StepTimes."""
        self._pass_share = pass_share
        self._stats_by_bucket: dict[int, _BatchStats] = {}
        self._has_prefilled = False
        self._since_timed = 0
        """Steps with drafts."""
        self._num_undrafted = 0
        """Consecutive steps without drafts."""

    def times(self, num_rows: int) -> StepTimes:
        return self._stats(num_rows).times

    def _stats(self, num_rows: int) -> _BatchStats:
        if (found := self._stats_by_bucket.get(bucket(num_rows))) is None:
            # what drafts have gained with other numbers of rows says that they are worth trying
            budget = max([stats.budget for stats in self._stats_by_bucket.values()], default=_FIRST_BUDGET)
            found = _BatchStats(StepTimes(num_rows, self._pass_share), max(budget, _FIRST_BUDGET))
            self._stats_by_bucket[bucket(num_rows)] = found
        return found

    def is_due(self, rows: Sequence[DraftForecast]) -> bool:
        stats = self._stats(len(rows))
        return stats.budget >= stats.due_at and not self._is_timing(rows)

    def prefills(self, rows: Sequence[DraftForecast]) -> list[int]:
        """The rows whose texts the draft model should process now, the cheapest first.

        rows: forecasts of what could be drafted after it. Either enough texts are processed that their drafts should
        pay off together, or none. The budget pays in advance of what the drafts gain; it is raised for the very first
        text, before which nothing is known.
        """
        stats, num_context = self._stats(len(rows)), _num_context(rows)
        stats.prefill_at, undrafted_s = math.inf, stats.times.undrafted_s(num_context)
        if undrafted_s is None or self._is_timing(rows):
            return []
        costs = {number: row.prefill_s / undrafted_s for number, row in enumerate(rows) if row.prefill_s}
        waiting = [number for number in costs if costs[number] <= _PREFILL_SHARE * rows[number].num_left]
        if not waiting:
            return []
        waiting.sort(key=costs.__getitem__)
        if not self._has_prefilled:
            self._has_prefilled = True
            stats.budget += costs[waiting[0]]
        chosen, needed = self._cheapest_useful(rows, waiting, costs)
        stats.full = max(stats.full, needed)
        if needed > stats.budget:
            stats.prefill_at = needed
            return []
        for number in waiting[len(chosen) :]:
            needed += costs[number]
            if needed > stats.budget:
                break
            chosen.append(number)
        return chosen

    def _cheapest_useful(
        self, rows: Sequence[DraftForecast], waiting: Sequence[int], costs: Mapping[int, float]
    ) -> tuple[list[int], float]:
        """The first 1, 2, 4, … waiting rows whose drafts should pay off, and the budget that they need.

        If none should, the first one, to be tried.
        """
        ready, num_ready = [row._replace(survival=()) if row.prefill_s else row for row in rows], 0
        draft_cost = self._cost(rows, 1, 1)
        while num_ready < len(waiting):
            num_ready = min(max(1, 2 * num_ready), len(waiting))
            chosen = list(waiting[:num_ready])
            for number in chosen:
                ready[number] = rows[number]
            fastest, _ = self._fastest(ready, math.inf)
            if any(fastest[number] for number in chosen):
                return chosen, draft_cost + sum(costs[number] for number in chosen)
        return [waiting[0]], _TRY_RESERVE * (draft_cost + costs[waiting[0]])

    def plan(self, rows: Sequence[DraftForecast]) -> tuple[int, ...]:
        """Number of drafts for each of the step's decoding rows, at most as many as its survival has entries."""
        stats = self._stats(len(rows))
        stats.useful_at = math.inf
        if not any(row.survival for row in rows) or self._is_timing(rows):
            return (0,) * len(rows)
        fastest, stats.useful_at = self._fastest(rows, stats.budget)
        if any(fastest):
            return fastest
        tried = _likeliest(rows)
        needed = min(_TRY_RESERVE * self._cost(rows, sum(tried), _num_passes(rows, tried)), stats.full)
        stats.useful_at = min(stats.useful_at, needed)
        return tried if stats.budget >= needed else fastest

    def _is_timing(self, rows: Sequence[DraftForecast]) -> bool:
        """Whether the next step has no drafts because the time without them is unknown, or was measured long ago."""
        is_late = self._since_timed >= RETIME_EVERY and self._num_undrafted < _TIMING_STEPS
        return is_late or self.times(len(rows)).undrafted_s(_num_context(rows)) is None

    def _cost(self, rows: Sequence[DraftForecast], num_drafts: int, num_passes: int) -> float:
        """What these drafts cost at most if all are wrong, in steps without drafts."""
        return self.times(len(rows)).upper_bound(num_drafts, num_passes) - 1

    def _fastest(self, rows: Sequence[DraftForecast], budget: float) -> tuple[tuple[int, ...], float]:
        """The affordable choice with the most tokens per second, and the least cost of one that should pay off."""
        times, ranked, least_cost = self.times(len(rows)), _ranked(rows), math.inf
        fastest, chosen = float(len(rows)), list[_Draft]()
        for num_passes in sorted({0, *[draft.num_passes for draft in ranked]}):
            choice = [draft for draft in ranked if draft.num_passes <= num_passes]
            gained = list(accumulate([draft.survival for draft in choice], initial=float(len(rows))))
            for number in _cut_numbers(len(choice), len(rows)):
                speed = gained[number] / times.ratio(number, num_passes)
                if speed <= fastest:
                    continue
                cost = self._cost(rows, number, num_passes)
                least_cost = min(least_cost, cost)
                if cost <= budget:
                    fastest, chosen = speed, choice[:number]
        counts = Counter(draft.row for draft in chosen)
        return tuple(counts[row] for row in range(len(rows))), least_cost

    def observe(
        self,
        rows: Sequence[DraftForecast],
        depths: Sequence[int],
        num_gained: int,
        seconds: float,
        *,
        is_timed: bool,
        is_baseline: bool,
        has_attempted: bool,
        may_draft: bool = True,
        prefill_s: float = 0.0,
    ) -> None:
        """Record a step's result.

        rows, depths: as planned and executed. num_gained: tokens of these rows, accepted drafts included. seconds: of
        the whole step, the drafter's passes included. is_timed: whether that is the time of these rows alone, without
        prompts or compilation. is_baseline: whether the step took as long as if nothing were ever drafted.
        has_attempted: whether drafts were looked for. may_draft: whether any row may have some; if not, no budget flows
        in. prefill_s: of the draft model before the step, not in `seconds`.
        """
        num_drafts, num_passes = sum(depths), _num_passes(rows, depths)
        self._since_timed += num_drafts > 0
        self._num_undrafted = 0 if num_drafts else self._num_undrafted + 1
        if self._num_undrafted >= _TIMING_STEPS or (is_timed and is_baseline):
            self._since_timed = 0
        if not rows:
            return
        stats, num_context = self._stats(len(rows)), _num_context(rows)
        times = stats.times
        if is_timed and is_baseline:
            times.observe_undrafted(num_context, seconds)
        elif is_timed and has_attempted:
            times.observe(num_context, num_drafts, num_passes, seconds)
        undrafted_s = times.undrafted_s(num_context)
        if undrafted_s is None or not may_draft:
            return
        # in steps without drafts, that would have gained as many tokens
        gained, taken = num_gained / len(rows), times.ratio(num_drafts, num_passes) if has_attempted else 1.0
        if num_drafts and not times.is_measured(num_drafts, num_passes):
            # measured ones are charged what they usually take: this step may have been disturbed, as others are
            bound = times.upper_bound(num_drafts, num_passes)
            taken = min(seconds / undrafted_s, 2 * taken) if is_timed else bound
        # losses beyond what the budget was to cover were disturbances, but those of a prefill are paid back
        budget = max(stats.budget + (1 + _BUDGET_SHARE) * gained - taken, min(stats.budget, 0.0))
        stats.budget = min(max(budget - prefill_s / undrafted_s, -stats.full), stats.full)
        if has_attempted:
            again_at = stats.budget + _ATTEMPT_RESERVE * self._cost(rows, 0, 0)
            next_at = min(stats.useful_at, stats.prefill_at, again_at, stats.full)
            stats.due_at = 0.0 if num_gained > len(rows) else next_at


class _Draft(NamedTuple):
    """A possible draft. num_passes: passes of the drafter that it takes, 0 for a copy."""

    survival: float
    row: int
    num_passes: int


@cache
def _cut_numbers(num_drafts: int, num_rows: int) -> tuple[int, ...]:
    """The numbers of drafts to try, up to `num_drafts`: few for many rows, because each is a compiled variant."""
    stride = 1 if num_rows < _MANY_ROWS else num_rows
    return (*range(stride, num_drafts, stride), num_drafts) if num_drafts else ()


def _ranked(rows: Sequence[DraftForecast]) -> list[_Draft]:
    drafts = [
        _Draft(survival, number, depth if row.uses_model else 0)
        for number, row in enumerate(rows)
        for depth, survival in enumerate(row.survival, start=1)
    ]
    return sorted(drafts, key=itemgetter(0), reverse=True)


def _likeliest(rows: Sequence[DraftForecast]) -> tuple[int, ...]:
    """The likeliest draft; with many rows one each, because most of the cost is that of any draft."""
    firsts = [row.survival[:1] for row in rows]
    if len(rows) >= _MANY_ROWS:
        return tuple(map(len, firsts))
    likeliest = max(range(len(rows)), key=firsts.__getitem__)
    return tuple(int(number == likeliest) for number in range(len(rows)))


def _num_context(rows: Sequence[DraftForecast]) -> int:
    return sum([row.num_context for row in rows])


def _num_passes(rows: Sequence[DraftForecast], depths: Sequence[int]) -> int:
    return max([depth for row, depth in zip(rows, depths, strict=True) if row.uses_model], default=0)
