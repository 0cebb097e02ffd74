"""Drafts of one sequence on their way from whoever guessed them into the window that verifies them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from headrace.backend.transfer import to_device
from headrace.speculate.ranking import Candidate


@dataclass(frozen=True, slots=True)
class Guesses:
    """Drafts for a sequence's next window. Their ids are `known`, or a row of what the head guessed for several.

    candidate: where they come from, one place for each. batch: `[R, n]` int32 with at least so many columns; still on
    the device until somebody reads it.
    """

    candidate: Candidate
    known: tuple[int, ...] | None = None
    batch: mx.array | None = None
    row: int = 0

    @property
    def num_drafts(self) -> int:
        """How many there are."""
        return len(self.candidate.places)

    def read(self) -> tuple[int, ...]:
        """The ids; waits for the device if they are there."""
        if self.batch is None or not self.num_drafts:
            return self.known or ()
        ids: list[int] = self.batch[self.row, : self.num_drafts].tolist()  # type: ignore[assignment]
        return tuple(ids)

    def first(self, num_drafts: int) -> Guesses:
        """At most the first `num_drafts` of them."""
        if num_drafts >= self.num_drafts:
            return self
        known = None if self.known is None else self.known[:num_drafts]
        return replace(self, candidate=self.candidate.first(num_drafts), known=known)


NOTHING = Guesses(Candidate((), ()), ())
"""No drafts."""


def packed_ids(windows: Sequence[tuple[Sequence[int], Guesses]]) -> mx.array | None:
    """The tokens `[T]` of a step's windows, each its certain ones and its guesses; None if the host knows them all.

    Built on the device, so that nobody waits for the guesses to be known.
    """
    ids: list[int] = []
    places: dict[int, list[tuple[int, int]]] = {}
    batches: dict[int, mx.array] = {}
    for token_ids, guesses in windows:
        ids += token_ids
        if guesses.batch is None or not guesses.num_drafts:  # a constraint may have left none
            ids += guesses.read()
            continue
        batches[id(guesses.batch)] = guesses.batch
        start = guesses.row * guesses.batch.shape[1]
        of_batch = places.setdefault(id(guesses.batch), [])
        of_batch += [(len(ids) + column, start + column) for column in range(guesses.num_drafts)]
        ids += [0] * guesses.num_drafts
    if not batches:
        return None
    packed = to_device(ids, mx.int32)
    for key, of_batch in places.items():
        to, at = (to_device(numbers, mx.int32) for numbers in zip(*of_batch, strict=True))
        packed[to] = batches[key].reshape(-1)[at]
    return packed
