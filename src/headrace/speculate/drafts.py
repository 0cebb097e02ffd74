"""Drafts of sequences, from the estimates that choose them to the window that verifies them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import mlx.core as mx

from headrace.backend.transfer import Fetched, pick, to_device


class DraftSource(StrEnum):
    """Where a draft comes from."""

    FORCED = "forced"
    """A grammar that allows one token only."""
    COPY = "copy"
    """Earlier text of the same sequence."""
    MODEL = "model"
    """The model's own prediction head, or a draft model."""


class RankedDraft(NamedTuple):
    """One draft: its source, its evidence, and its expected acceptance if those before it are accepted.

    grade: of a copy's confidence, from 0; for a model the number of its drafts before this one.
    """

    source: DraftSource
    grade: int
    estimate: float


class DraftBatch:
    """A model's drafts for several sequences, one token for all after the other; launched, not waited for.

    ids: `[n]` int32.
    """

    def __init__(self, by_depth: Sequence[mx.array]) -> None:
        """by_depth: drafts `[R]` int32 at each depth, of ever fewer sequences: the first ones."""
        self.ids = mx.concatenate(list(by_depth))
        self._starts = list(accumulate([ids.shape[0] for ids in by_depth], initial=0))
        self._fetched = Fetched(self.ids)
        self._read: list[int] | None = None
        # kernels write in place: nothing may be launched between them and this
        mx.async_eval(self.ids, self._fetched.arrays)

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


@dataclass(slots=True, eq=False)  # not frozen: that takes several times as long to make, for each row of each step
class Drafts:
    """Drafts for a sequence's next window; not to be changed.

    token_ids: of all drafts, or none if the head or draft model gives them: then those of sequence `row` in `batch`,
    which is None before they are drafted.
    survival: for each draft, the probability that it and all before it are accepted.
    """

    token_ids: tuple[int, ...]
    ranked: tuple[RankedDraft, ...]
    batch: DraftBatch | None = None
    row: int = 0
    survival: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.survival = tuple(accumulate([draft.estimate for draft in self.ranked], mul))

    @property
    def num_drafts(self) -> int:
        return len(self.ranked)

    @property
    def uses_model(self) -> bool:
        return len(self.ranked) > len(self.token_ids)

    def first(self, num_drafts: int) -> Drafts:
        if num_drafts >= self.num_drafts:
            return self
        return Drafts(self.token_ids[:num_drafts], self.ranked[:num_drafts], self.batch, self.row)

    def read(self) -> tuple[int, ...]:
        """The ids; waits for the device if they are there."""
        if not self.uses_model:
            return self.token_ids
        assert self.batch is not None
        return self.batch.read(self.row, self.num_drafts)


NO_DRAFTS = Drafts((), ())


def packed_ids(windows: Sequence[tuple[Sequence[int], Drafts]]) -> mx.array | None:
    """The tokens `[T]` of a step's windows, each its known ones and its drafts; None if the host knows them all.

    Built on the device, so that the host need not wait for the drafts.
    """
    batches = {id(each.batch): each.batch for _, each in windows if each.batch is not None and each.uses_model}
    if not batches:
        return None
    known = [token_id for token_ids, drafts in windows for token_id in (*token_ids, *drafts.token_ids)]
    sizes = [batch.ids.shape[0] for batch in batches.values()]
    starts = dict(zip(batches, accumulate(sizes, initial=len(known)), strict=False))
    order: list[int] = []
    num_known = 0
    for token_ids, drafts in windows:
        num_here = len(token_ids) + len(drafts.token_ids)
        order += range(num_known, num_known + num_here)
        num_known += num_here
        if drafts.batch is not None and drafts.uses_model:
            start = starts[id(drafts.batch)]
            order += [start + index for index in drafts.batch.indices(drafts.row, drafts.num_drafts)]
    return pick(mx.concatenate([to_device(known, mx.int32), *[batch.ids for batch in batches.values()]]), order)
