"""Hidden states of the trunk that are pending for a multi-token prediction head, and a few that it may process again.

The head's entry for token i is made from the trunk's hidden state of token i - 1 and token i itself, and is cached at
i. So entries before a length only depend on the tokens before it; the next entry needs the last hidden state, which is
what a record contains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx

from headrace.backend.transfer import pick
from headrace.state.layer import LayerCost, LayerRecord, copy_of

NUM_AGAIN = 7
"""Rows kept although the head has processed them: it may process this many tokens again."""

_LARGEST_SHARE = 64
"""Rows of a step per own row; with more, as in a step with other prompts, the own ones are copied."""

_LARGEST_REST = 8
"""Rows written together that may stay together when only some of them are needed."""

HiddenRows = tuple[mx.array, int, int]
"""The rows from one to another of an array `[1, n, hidden]`."""


@dataclass(frozen=True, slots=True)
class HiddenRecord(LayerRecord):
    """Hidden states `[1, n, hidden]` of the last n tokens before a length; None at length 0.

    The head has entries for all tokens before the one after the first of these rows.
    """

    rows: mx.array | None

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return () if self.rows is None else (self.rows,)


@dataclass(slots=True)
class _Piece:
    """The rows `lo` to `hi` of an array `[1, n, hidden]`, possibly a whole step's.

    num_written: how many of them were the sequence's when it was added.
    """

    array: mx.array
    lo: int
    hi: int
    num_written: int

    def copied(self) -> _Piece:
        """In separate memory, so that the rest of the array is freed."""
        num_rows = self.hi - self.lo
        return _Piece(copy_of(self.array[:, self.lo : self.hi]), 0, num_rows, num_rows)


def gathered_rows(parts: Sequence[HiddenRows]) -> mx.array:
    """The rows concatenated, `[1, T, hidden]`: one launch per array and one more, whatever their number."""
    spans: dict[int, HiddenRows] = {}
    for array, lo, hi in parts:
        _, first, last = spans.get(id(array), (array, lo, hi))
        spans[id(array)] = array, min(first, lo), max(last, hi)
    # rows of one step are contiguous, so little is copied needlessly
    arrays = [array if (lo, hi) == (0, array.shape[1]) else array[:, lo:hi] for array, lo, hi in spans.values()]
    ends = accumulate([hi - lo for _, lo, hi in spans.values()], initial=0)
    starts = {key: end - lo for (key, (_, lo, _)), end in zip(spans.items(), ends, strict=False)}
    joined = mx.concatenate(arrays, axis=1)
    wanted = [row for array, lo, hi in parts for row in range(starts[id(array)] + lo, starts[id(array)] + hi)]
    return pick(joined, wanted, axis=1)


class HiddenState:
    """The rows of the tokens `first` to `end`, the end of the last window: all pending ones, and a few before.

    They stay where the steps computed them, a piece each, so that a step has nothing to do here.

    num_processed: the head has the entries of all tokens before this one; token 0 needs none.
    """

    is_sliceable = False

    def __init__(self) -> None:
        self._snapshots: dict[int, HiddenRecord] = {}
        self.first = 0
        self.end = 0
        self.num_processed = 1
        self._pieces: list[_Piece] = []

    def write(
        self, start: int, rows: mx.array, snapshot_points: tuple[int, ...], lo: int = 0, hi: int | None = None
    ) -> None:
        """Add the rows `lo` to `hi` of `[1, n, hidden]`, of a window that begins at token `start`; take snapshots."""
        hi = rows.shape[1] if hi is None else hi
        if not self._pieces:
            self.first = self.end = start
        piece = _Piece(rows, lo, hi, hi - lo)
        self._pieces.append(piece.copied() if rows.shape[1] > _LARGEST_SHARE * (hi - lo) else piece)
        self.end += hi - lo
        for length in snapshot_points:
            # the head has processed the tokens before it by the time that the record is used
            self._snapshots[length] = HiddenRecord(copy_of(self.part(length - 1, length)))

    def places(self, start: int, end: int) -> list[HiddenRows]:
        """Where the tokens' rows are held; at least one, possibly empty, place."""
        assert self._pieces and self.first <= start <= end <= self.end
        found: list[HiddenRows] = []
        at = self.first
        for piece in self._pieces:
            lo, hi = max(start, at), min(end, at + piece.hi - piece.lo)
            if lo < hi:
                found.append((piece.array, piece.lo + lo - at, piece.lo + hi - at))
            at += piece.hi - piece.lo
        return found or [(self._pieces[0].array, 0, 0)]

    def part(self, start: int, end: int) -> mx.array:
        """The same rows, `[1, end - start, hidden]`."""
        return gathered_rows(self.places(start, end))

    def mark_processed(self, num_processed: int) -> None:
        """The head now has the entries before `num_processed`: keep what later ones need, and NUM_AGAIN rows more."""
        self.num_processed = num_processed
        kept = min(num_processed, self.end) - 1 - NUM_AGAIN
        while self.first < kept:
            piece = self._pieces[0]
            num_dropped = min(kept - self.first, piece.hi - piece.lo)
            piece.lo += num_dropped
            self.first += num_dropped
            if piece.lo == piece.hi:
                del self._pieces[0]
            elif piece.num_written > _LARGEST_REST:
                self._pieces[0] = piece.copied()

    def commit(self, num_kept: int, num_window: int) -> None:
        if self._pieces and num_kept < num_window:
            self._pieces[-1].hi -= num_window - num_kept
            self.end -= num_window - num_kept

    def take_snapshot(self, length: int) -> HiddenRecord | None:
        return self._snapshots.pop(length, None)

    def checkpoint(self, length: int) -> HiddenRecord:
        """The rows from the one that the first missing entry needs, or the last one."""
        if not self._pieces:
            return HiddenRecord(None)
        return HiddenRecord(copy_of(self.part(min(self.num_processed, length) - 1, length)))

    def restore(self, record: HiddenRecord, length: int) -> None:
        num_rows = 0 if record.rows is None else record.rows.shape[1]
        self._pieces = [] if record.rows is None else [_Piece(record.rows, 0, num_rows, num_rows)]
        self.first, self.end = length - num_rows, length
        self.num_processed = self.first + 1

    def arrays(self) -> tuple[mx.array, ...]:
        snapshots = [array for record in self._snapshots.values() for array in record.arrays]
        return (*[piece.array for piece in self._pieces], *snapshots)

    def cost(self) -> LayerCost:
        """Of the few rows that usually stay between steps."""
        num_rows = 1 + NUM_AGAIN
        return LayerCost(fixed=sum(num_rows * piece.array.nbytes // piece.array.shape[1] for piece in self._pieces[:1]))
