"""Ranks possible drafts of a row by their chance to survive verification.

A draft counts only if all before it are accepted, so its survival is the product of the estimates up to it. Estimates
are learned from verified drafts: over all rows by source and evidence, and for each row by its deviation from that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.speculate.drafts import NO_DRAFTS, Drafts, DraftSource, RankedDraft

_PRIOR = 3
"""Outcomes that an initial estimate counts as."""

_MEMORY = 32
"""Outcomes that an estimate counts as at most: with each new one, earlier ones fade by a 32nd."""

_MODEL_ACCEPTANCE = 0.75
"""Assumed acceptance of a model's draft before any was verified."""

_HIGHEST = 1 - 1 / (2 * _MEMORY)
"""Upper limit of all estimates but certain ones: half an outcome of those remembered may still be a failure."""

_NUM_GRADES = 8
"""Grades of confidence."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens copied from a row's own text.

    confidences: for each token, in (0, 1]: its estimated acceptance if those before it are accepted.
    """

    token_ids: tuple[int, ...]
    confidences: tuple[float, ...]


class RowAcceptance:
    """One row's accepted drafts against the expected ones; older outcomes fade."""

    __slots__ = ("_expected", "_accepted")

    def __init__(self) -> None:
        self._expected: dict[DraftSource, float] = {}
        self._accepted: dict[DraftSource, float] = {}

    def factor(self, source: DraftSource) -> float:
        """Turns an estimate over all rows into this row's."""
        return (_PRIOR + self._accepted.get(source, 0.0)) / (_PRIOR + self._expected.get(source, 0.0))

    def update(self, source: DraftSource, estimate: float, is_accepted: bool) -> None:
        """Add an outcome. estimate: over all rows."""
        fading = 1 - 1 / _MEMORY
        self._accepted[source] = fading * self._accepted.get(source, 0.0) + is_accepted
        self._expected[source] = fading * self._expected.get(source, 0.0) + estimate


class Ranking:
    """The acceptance of drafts over all rows of a model."""

    def __init__(self) -> None:
        self._means: dict[tuple[DraftSource, int], tuple[float, int]] = {}

    def best(
        self,
        acceptance: RowAcceptance,
        max_drafts: int,
        *,
        forced: Sequence[int] = (),
        copied: Proposal | None = None,
        num_model: int = 0,
    ) -> Drafts:
        """The drafts with the highest expected gain, at most `max_drafts`; none if there is nothing to draft.

        forced: tokens without an alternative. They come first, and only a copy that agrees with them can follow.
        copied: what follows in the row's own text.
        num_model: drafts available from the head or draft model, 0 without one. A copy is preferred to equal drafts of
        these, because it needs no pass.
        """
        best, certain = NO_DRAFTS, (_CERTAIN,) * len(forced)
        if forced:
            best = Drafts(tuple(forced), certain).first(max_drafts)
        elif num_model:
            best = self._of_model(acceptance, min(num_model, max_drafts))
        if copied is not None and copied.token_ids[: len(forced)] == tuple(forced):
            rest = self._copied(acceptance, copied.confidences[len(forced) :])
            copy = Drafts(copied.token_ids, certain + rest).first(max_drafts)
            best = copy if sum(copy.survival) >= sum(best.survival) else best
        return best

    def _copied(self, acceptance: RowAcceptance, confidences: Sequence[float]) -> tuple[RankedDraft, ...]:
        factor = acceptance.factor(DraftSource.COPY)
        by_confidence = {
            each: self._draft(factor, DraftSource.COPY, min(int(each * _NUM_GRADES), _NUM_GRADES - 1), each)
            for each in dict.fromkeys(confidences)
        }
        return tuple([by_confidence[each] for each in confidences])

    def _of_model(self, acceptance: RowAcceptance, num_drafts: int) -> Drafts:
        factor = acceptance.factor(DraftSource.MODEL)
        drafts = [self._draft(factor, DraftSource.MODEL, depth, _MODEL_ACCEPTANCE) for depth in range(num_drafts)]
        return Drafts((), tuple(drafts))

    def _draft(self, factor: float, source: DraftSource, grade: int, assumed: float) -> RankedDraft:
        mean, _ = self._means.get((source, grade), (assumed, _PRIOR))
        return RankedDraft(source, grade, min(mean * factor, _HIGHEST))

    def report(self, acceptance: RowAcceptance, verified: Drafts, num_accepted: int) -> None:
        """Learn from verified drafts, of which the first `num_accepted` were accepted.

        Drafts after the first rejected one are ignored.
        """
        for number, draft in enumerate(verified.ranked[: num_accepted + 1]):
            if draft.source is DraftSource.FORCED:
                continue
            is_accepted = number < num_accepted
            mean, count = self._means.get((draft.source, draft.grade), (draft.estimate, _PRIOR))
            acceptance.update(draft.source, mean, is_accepted)
            count = min(count + 1, _MEMORY)
            self._means[draft.source, draft.grade] = mean + (is_accepted - mean) / count, count


_CERTAIN = RankedDraft(DraftSource.FORCED, 0, 1.0)
