"""Drafts of one sequence on their way to the window that verifies them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import mlx.core as mx

from headrace.backend.transfer import Fetched, to_device
from headrace.sampling.rows import pick
from headrace.speculate.ranking import Candidate


class DraftBatch:
    """A model's drafts for several sequences, one token for all after the other; launched, not waited for.

    ids: `[n]` int32. counts: sequences drafted for at each depth, never rising: the first ones.
    """

    def __init__(self, ids: mx.array, counts: Sequence[int]) -> None:
        self.ids = ids
        self._starts = list(accumulate(counts, initial=0))
        self._fetched = Fetched(ids)
        self._read: list[int] | None = None
        # kernels write in place: nothing may be launched between them and this
        mx.async_eval(ids, self._fetched.arrays)

    @property
    def arrays(self) -> list[mx.array]:
        """To be evaluated before reading."""
        return self._fetched.arrays

    def indices(self, row: int, num_drafts: int) -> list[int]:
        return [start + row for start in self._starts[:num_drafts]]

    def read(self, row: int, num_drafts: int) -> tuple[int, ...]:
        if self._read is None:
            self._read = self._fetched.read()
        return tuple([self._read[index] for index in self.indices(row, num_drafts)])


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts for a sequence's next window. Their ids are `known`, or those of sequence `row` in a batch.

    candidate: where each comes from.
    """

    candidate: Candidate
    known: tuple[int, ...] | None = None
    batch: DraftBatch | None = None
    row: int = 0

    @property
    def num_drafts(self) -> int:
        return len(self.candidate.drafts)

    def read(self) -> tuple[int, ...]:
        """The ids; waits for the device if they are there."""
        if self.batch is None or not self.num_drafts:
            return self.known or ()
        return self.batch.read(self.row, self.num_drafts)

    def first(self, num_drafts: int) -> Drafts:
        if num_drafts >= self.num_drafts:
            return self
        known = None if self.known is None else self.known[:num_drafts]
        return replace(self, candidate=self.candidate.first(num_drafts), known=known)


NOTHING = Drafts(Candidate((), ()), ())


def packed_ids(windows: Sequence[tuple[Sequence[int], Drafts]]) -> mx.array | None:
    """The tokens `[T]` of a step's windows, each its known ones and its drafts; None if the host knows them all.

    Built on the device, so that the host need not wait for the drafts.
    """
    batches = {id(each.batch): each.batch for _, each in windows if each.batch is not None and each.num_drafts}
    if not batches:
        return None
    known: list[int] = []
    for token_ids, drafts in windows:
        known += token_ids
        if drafts.batch is None or not drafts.num_drafts:  # a constraint may have left none
            known += drafts.read()
    sizes = [batch.ids.shape[0] for batch in batches.values()]
    starts = dict(zip(batches, accumulate(sizes, initial=len(known)), strict=False))
    order: list[int] = []
    num_known = 0
    for token_ids, drafts in windows:
        is_on_device = drafts.batch is not None and drafts.num_drafts > 0
        num_here = len(token_ids) + (0 if is_on_device else drafts.num_drafts)
        order += range(num_known, num_known + num_here)
        num_known += num_here
        if drafts.batch is not None and is_on_device:
            start = starts[id(drafts.batch)]
            order += [start + index for index in drafts.batch.indices(drafts.row, drafts.num_drafts)]
    return pick(mx.concatenate([to_device(known, mx.int32), *[batch.ids for batch in batches.values()]]), order)
