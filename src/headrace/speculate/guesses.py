"""Drafts of one sequence on their way from whoever guessed them into the window that verifies them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import mlx.core as mx

from headrace.backend.transfer import Fetched, to_device
from headrace.sampling.rows import pick
from headrace.speculate.ranking import Candidate


class GuessBatch:
    """What the head guessed for several sequences, one token for all of them after the other; launched, not waited for.

    ids: `[n]` int32. counts: sequences that each place was guessed for, never rising: the first ones.
    """

    def __init__(self, ids: mx.array, counts: Sequence[int]) -> None:
        self.ids = ids
        self._starts = list(accumulate(counts, initial=0))
        self._fetched = Fetched(ids)
        self._read: list[int] | None = None
        # kernels of the head write in place: nothing may be launched between them and this
        mx.async_eval(ids, self._fetched.arrays)

    @property
    def arrays(self) -> list[mx.array]:
        """What is to be evaluated before it is read."""
        return self._fetched.arrays

    def places(self, row: int, num_drafts: int) -> list[int]:
        """Where a sequence's first guesses are."""
        return [start + row for start in self._starts[:num_drafts]]

    def read(self, row: int, num_drafts: int) -> tuple[int, ...]:
        """A sequence's first guesses; waits for the device once for all."""
        if self._read is None:
            self._read = self._fetched.read()
        return tuple([self._read[place] for place in self.places(row, num_drafts)])


@dataclass(frozen=True, slots=True)
class Guesses:
    """Drafts for a sequence's next window. Their ids are `known`, or those of sequence `row` in a batch.

    candidate: where they come from, one place for each.
    """

    candidate: Candidate
    known: tuple[int, ...] | None = None
    batch: GuessBatch | None = None
    row: int = 0

    @property
    def num_drafts(self) -> int:
        """How many there are."""
        return len(self.candidate.places)

    def read(self) -> tuple[int, ...]:
        """The ids; waits for the device if they are there."""
        if self.batch is None or not self.num_drafts:
            return self.known or ()
        return self.batch.read(self.row, self.num_drafts)

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
    batches = {id(each.batch): each.batch for _, each in windows if each.batch is not None and each.num_drafts}
    if not batches:
        return None
    known: list[int] = []
    for token_ids, guesses in windows:
        known += token_ids
        if guesses.batch is None or not guesses.num_drafts:  # a constraint may have left none
            known += guesses.read()
    sizes = [batch.ids.shape[0] for batch in batches.values()]
    starts = dict(zip(batches, accumulate(sizes, initial=len(known)), strict=False))
    order: list[int] = []
    num_known = 0
    for token_ids, guesses in windows:
        is_on_device = guesses.batch is not None and guesses.num_drafts > 0
        num_here = len(token_ids) + (0 if is_on_device else guesses.num_drafts)
        order += range(num_known, num_known + num_here)
        num_known += num_here
        if guesses.batch is not None and is_on_device:
            start = starts[id(guesses.batch)]
            order += [start + place for place in guesses.batch.places(guesses.row, guesses.num_drafts)]
    return pick(mx.concatenate([to_device(known, mx.int32), *[batch.ids for batch in batches.values()]]), order)
