"""Ranks possible drafts of a row by their chance to survive verification.

A draft counts only if all before it are accepted, so its survival is the product of the estimates up to it. Estimates
are learned from verified drafts: over all rows by source and evidence, and for each row by its deviation from that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from headrace.speculate.proposal import Proposal, Source

_FASTEST, _SLOWEST = 0.2, 0.03
"""Weight of a new outcome in a running mean: 1 / n for the n-th, within these bounds."""

_ROW_PRIOR = 2.0
"""Average drafts that a row starts with: the more, the slower it departs from the mean."""

_ROW_MEMORY = 0.95
"""Factor by which a row's earlier outcomes fade with each new one."""

_HEAD_GUESS = 0.75
"""Assumed acceptance of a head's draft before any was verified."""

_HIGHEST = 0.98
"""Upper limit of all estimates but certain ones."""

_NUM_GRADES = 8
"""Grades of confidence."""


class RankedDraft(NamedTuple):
    """One draft: its drafter, its evidence, and its acceptance if those before it are accepted.

    grade: of a copy's confidence, from 0; for the head the number of its drafts before this one.
    """

    source: Source
    grade: int
    estimate: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """What may be drafted for a row.

    token_ids: the known drafts; the head drafts the rest of `places`.
    survival: for each place, the probability that it and all before it are accepted.
    """

    token_ids: tuple[int, ...]
    places: tuple[RankedDraft, ...]
    survival: tuple[float, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        survival = tuple(accumulate([place.estimate for place in self.places], mul))
        object.__setattr__(self, "survival", survival)

    @property
    def uses_head(self) -> bool:
        """Whether the head has to draft."""
        return len(self.places) > len(self.token_ids)

    def first(self, num_drafts: int) -> Candidate:
        """At most the first drafts of it."""
        if num_drafts >= len(self.places):
            return self
        return Candidate(self.token_ids[:num_drafts], self.places[:num_drafts])


class RowRecord:
    """One row's accepted drafts against the expected ones; older outcomes fade."""

    __slots__ = ("_expected", "_right", "of_head")

    def __init__(self) -> None:
        self._expected: dict[Source, float] = {}
        self._right: dict[Source, float] = {}
        self.of_head: tuple[int, Candidate] | None = None
        """The head's draft, and after how many observations it was asked for; see `Ranking`."""

    def factor(self, source: Source) -> float:
        """Turns an estimate over all rows into this row's."""
        return (_ROW_PRIOR + self._right.get(source, 0.0)) / (_ROW_PRIOR + self._expected.get(source, 0.0))

    def update(self, source: Source, estimate: float, is_right: bool) -> None:
        """Add an outcome. estimate: over all rows."""
        self._right[source] = _ROW_MEMORY * self._right.get(source, 0.0) + is_right
        self._expected[source] = _ROW_MEMORY * self._expected.get(source, 0.0) + estimate


class Ranking:
    """The acceptance of drafts over all rows of a model."""

    def __init__(self) -> None:
        self._means: dict[tuple[Source, int], tuple[float, float]] = {}
        self._num_lessons = 0

    def best(
        self,
        record: RowRecord,
        max_drafts: int,
        *,
        forced: Sequence[int] = (),
        copied: Proposal | None = None,
        num_head: int = 0,
    ) -> Candidate:
        """The drafts with the highest expected gain, at most `max_drafts`; none if there is nothing to draft.

        forced: tokens without an alternative. They come first, and only a copy that agrees with them can follow.
        copied: what follows in the row's own text.
        num_head: drafts available from the head, 0 without one. A copy is preferred to equal drafts of the head,
        because it needs no pass of the head.
        """
        best, certain = _NOTHING, (_CERTAIN,) * len(forced)
        if forced:
            best = Candidate(tuple(forced), certain).first(max_drafts)
        elif num_head:
            best = self._of_head(record, min(num_head, max_drafts))
        if copied is not None and copied.token_ids[: len(forced)] == tuple(forced):
            rest = self._copied_places(record, copied.confidences[len(forced) :])
            copy = Candidate(copied.token_ids, certain + rest).first(max_drafts)
            best = copy if sum(copy.survival) >= sum(best.survival) else best
        return best

    def _copied_places(self, record: RowRecord, confidences: Sequence[float]) -> tuple[RankedDraft, ...]:
        factor = record.factor(Source.COPY)
        by_confidence = {
            each: self._place(factor, Source.COPY, min(int(each * _NUM_GRADES), _NUM_GRADES - 1), each)
            for each in dict.fromkeys(confidences)
        }
        return tuple([by_confidence[each] for each in confidences])

    def _of_head(self, record: RowRecord, num_drafts: int) -> Candidate:
        """Cached until something is learned: a row without drafts asks for it in every step."""
        known = record.of_head
        if known is None or known[0] != self._num_lessons or len(known[1].places) != num_drafts:
            factor = record.factor(Source.HEAD)
            places = [self._place(factor, Source.HEAD, place, _HEAD_GUESS) for place in range(num_drafts)]
            known = record.of_head = self._num_lessons, Candidate((), tuple(places))
        return known[1]

    def _place(self, factor: float, source: Source, grade: int, guess: float) -> RankedDraft:
        mean, _ = self._means.get((source, grade), (guess, 0.0))
        return RankedDraft(source, grade, min(mean * factor, _HIGHEST))

    def report(self, record: RowRecord, verified: Candidate, num_right: int) -> None:
        """Learn from a verified candidate whose first `num_right` drafts were accepted.

        Drafts after the first rejected one are ignored.
        """
        self._num_lessons += 1
        for number, place in enumerate(verified.places[: num_right + 1]):
            if place.source is Source.FORCED:
                continue
            is_right = number < num_right
            mean, count = self._means.get((place.source, place.grade), (place.estimate, 1.0))
            record.update(place.source, mean, is_right)
            weight = min(max(1 / (count + 1), _SLOWEST), _FASTEST)
            self._means[place.source, place.grade] = mean + weight * (is_right - mean), count + 1


_CERTAIN = RankedDraft(Source.FORCED, 0, 1.0)
_NOTHING = Candidate((), ())
