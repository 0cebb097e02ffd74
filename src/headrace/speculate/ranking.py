"""What to draft for a row, ranked by how likely it is to survive verification.

A draft counts only if all before it are right, so its survival is the product of the estimates up to it. Estimates are
learned from what became of earlier drafts: for all rows by source and evidence, and for each row by how its own text
compares with that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

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


@dataclass(frozen=True, slots=True)
class Place:
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
    """

    token_ids: tuple[int, ...]
    places: tuple[Place, ...]

    @property
    def survival(self) -> tuple[float, ...]:
        """For each place, how likely it and all before it are right."""
        return tuple(accumulate((place.estimate for place in self.places), mul))

    @property
    def uses_head(self) -> bool:
        """Whether the head has to guess."""
        return len(self.places) > len(self.token_ids)

    def first(self, num_drafts: int) -> Candidate:
        """At most the first drafts of it."""
        return Candidate(self.token_ids[:num_drafts], self.places[:num_drafts])


class RowRecord:
    """How often one row's drafts were right, beside what was expected; older outcomes fade."""

    __slots__ = ("_expected", "_right")

    def __init__(self) -> None:
        self._expected: dict[Source, float] = {}
        self._right: dict[Source, float] = {}

    def corrected(self, source: Source, estimate: float) -> float:
        """The estimate for all rows, made this row's own."""
        right, expected = self._right.get(source, 0.0), self._expected.get(source, 0.0)
        return min(estimate * (_ROW_PRIOR + right) / (_ROW_PRIOR + expected), _HIGHEST)

    def update(self, source: Source, estimate: float, is_right: bool) -> None:
        """Add an outcome. estimate: for all rows."""
        self._right[source] = _ROW_MEMORY * self._right.get(source, 0.0) + is_right
        self._expected[source] = _ROW_MEMORY * self._expected.get(source, 0.0) + estimate


class Ranking:
    """Knows how often drafts were right, over all rows of a model."""

    def __init__(self) -> None:
        self._means: dict[tuple[Source, int], tuple[float, float]] = {}

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
        certain = tuple(Place(Source.FORCED, 0, 1.0) for _ in forced)
        candidates = [Candidate(tuple(forced), certain).first(max_drafts)]
        if copied is not None and copied.token_ids[: len(forced)] == tuple(forced):
            rest = tuple(
                self._place(record, copied.source, _grade(confidence), confidence)
                for confidence in copied.confidences[len(forced) :]
            )
            candidates.append(Candidate(copied.token_ids, certain + rest).first(max_drafts))
        if num_head and not forced:
            places = tuple(self._place(record, Source.HEAD, place, _HEAD_GUESS) for place in range(num_head))
            candidates.append(Candidate((), places).first(max_drafts))
        return max(candidates, key=lambda candidate: sum(candidate.survival))

    def _place(self, record: RowRecord, source: Source, grade: int, guess: float) -> Place:
        return Place(source, grade, record.corrected(source, self._mean(source, grade, guess)))

    def _mean(self, source: Source, grade: int, guess: float) -> float:
        mean, _ = self._means.get((source, grade), (guess, 0.0))
        return mean

    def report(self, record: RowRecord, verified: Candidate, num_right: int) -> None:
        """Learn from a verified candidate of which the first `num_right` drafts were right.

        Drafts behind the first wrong one tell nothing.
        """
        for number, place in enumerate(verified.places[: num_right + 1]):
            if place.source is Source.FORCED:
                continue
            is_right = number < num_right
            mean, count = self._means.get((place.source, place.grade), (place.estimate, 1.0))
            record.update(place.source, mean, is_right)
            weight = min(max(1 / (count + 1), _SLOWEST), _FASTEST)
            self._means[place.source, place.grade] = mean + weight * (is_right - mean), count + 1


def _grade(confidence: float) -> int:
    return min(int(confidence * _NUM_GRADES), _NUM_GRADES - 1)
