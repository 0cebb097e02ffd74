"""What to draft for a row, ranked by how likely it is to survive verification.

A draft counts only if all before it are right, so its survival is the product of the estimates up to it. Estimates are
learned from what became of earlier drafts: for all rows by source and evidence, and for each row by how its own text
compares with that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from headrace.speculate.draft import Proposal, Source

_FASTEST, _SLOWEST = 0.2, 0.03
"""Weight of a new outcome in a running mean: 1 / n for the n-th, within these bounds."""

_ROW_PRIOR = 2.0
"""Drafts, as good as expected, that a row is credited with: the more, the slower it departs from the mean."""

_ROW_MEMORY = 0.95
"""What a row's earlier outcomes still count after another one."""

_HEAD_GUESS = 0.75
"""How likely a head's draft is thought to be right before any was verified."""

_HIGHEST = 0.98
"""No estimate is higher, but for what is certain."""

_NUM_GRADES = 8
"""Grades of confidence that are told apart."""


class Place(NamedTuple):
    """One draft: who guesses it, on what evidence, and how likely it is right if those before it are.

    grade: of a copy's confidence, from 0; for the head the number of its drafts before this one.
    """

    source: Source
    grade: int
    estimate: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """What may be drafted for a row.

    token_ids: the drafts that are known; the rest of `places`, if any, is for the head to guess.
    survival: for each place, how likely it and all before it are right.
    """

    token_ids: tuple[int, ...]
    places: tuple[Place, ...]
    survival: tuple[float, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        survival = tuple(accumulate([place.estimate for place in self.places], mul))
        object.__setattr__(self, "survival", survival)

    @property
    def uses_head(self) -> bool:
        """Whether the head has to guess."""
        return len(self.places) > len(self.token_ids)

    def first(self, num_drafts: int) -> Candidate:
        """At most the first drafts of it."""
        if num_drafts >= len(self.places):
            return self
        return Candidate(self.token_ids[:num_drafts], self.places[:num_drafts])


class RowRecord:
    """How often one row's drafts were right, beside what was expected; older outcomes fade."""

    __slots__ = ("_expected", "_right", "of_head")

    def __init__(self) -> None:
        self._expected: dict[Source, float] = {}
        self._right: dict[Source, float] = {}
        self.of_head: tuple[int, Candidate] | None = None
        """What the head could guess, and after how many lessons that was asked; see `Ranking`."""

    def factor(self, source: Source) -> float:
        """What makes an estimate for all rows this row's own."""
        return (_ROW_PRIOR + self._right.get(source, 0.0)) / (_ROW_PRIOR + self._expected.get(source, 0.0))

    def update(self, source: Source, estimate: float, is_right: bool) -> None:
        """Add an outcome. estimate: for all rows."""
        self._right[source] = _ROW_MEMORY * self._right.get(source, 0.0) + is_right
        self._expected[source] = _ROW_MEMORY * self._expected.get(source, 0.0) + estimate


class Ranking:
    """Knows how often drafts were right, over all rows of a model."""

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
        """The drafts that are expected to gain most, `max_drafts` at most; none if there is nothing to draft.

        forced: tokens without an alternative. They come first, and only a copy that agrees with them can go on behind
        them. copied: what follows in the row's own text. num_head: drafts that the head could guess, 0 without one.
        A copy is preferred to equal drafts of the head, because it costs none of the head's time.
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

    def _copied_places(self, record: RowRecord, confidences: Sequence[float]) -> tuple[Place, ...]:
        factor = record.factor(Source.COPY)
        by_confidence = {
            each: self._place(factor, Source.COPY, min(int(each * _NUM_GRADES), _NUM_GRADES - 1), each)
            for each in dict.fromkeys(confidences)
        }
        return tuple([by_confidence[each] for each in confidences])

    def _of_head(self, record: RowRecord, num_drafts: int) -> Candidate:
        """The same as long as nothing is learned: a row without drafts has it asked in every step."""
        known = record.of_head
        if known is None or known[0] != self._num_lessons or len(known[1].places) != num_drafts:
            factor = record.factor(Source.HEAD)
            places = [self._place(factor, Source.HEAD, place, _HEAD_GUESS) for place in range(num_drafts)]
            known = record.of_head = self._num_lessons, Candidate((), tuple(places))
        return known[1]

    def _place(self, factor: float, source: Source, grade: int, guess: float) -> Place:
        mean, _ = self._means.get((source, grade), (guess, 0.0))
        return Place(source, grade, min(mean * factor, _HIGHEST))

    def report(self, record: RowRecord, verified: Candidate, num_right: int) -> None:
        """Learn from a verified candidate of which the first `num_right` drafts were right.

        Drafts behind the first wrong one tell nothing.
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


_CERTAIN = Place(Source.FORCED, 0, 1.0)
_NOTHING = Candidate((), ())
