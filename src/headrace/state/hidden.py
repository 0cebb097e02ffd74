"""Hidden rows of the trunk that a multi-token prediction head has not read yet.

The head's entry for token i is made of the trunk's hidden row of token i - 1 and of token i itself, and lies in the
cache of keys and values at i. So entries before a length belong to the tokens before that length, whatever comes
after; what the next entry needs is the last hidden row, and that is what a record carries.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from headrace.state.layer import LayerCost, LayerRecord, copy_of

_MOST_PIECES = 8
"""Pieces that are held before they are joined: each is one more array to be looked after in every step."""

_LARGEST_SHARE = 64
"""Rows of a step for each of a sequence's own; beside more, as in a step with others' prompts, its own are copied."""

_LARGEST_REST = 8
"""Rows that were written together and may stay together when only some of them are needed."""


@dataclass(frozen=True, slots=True)
class HiddenRecord:
    """Hidden rows `[1, n, hidden]` of the last n tokens before a length; None at length 0.

    The head has entries for all tokens before the one behind the first of these rows.
    """

    rows: mx.array | None

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The rows, or nothing."""
        return () if self.rows is None else (self.rows,)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows."""
        return sum(array.nbytes for array in self.arrays)


@dataclass(slots=True)
class _Piece:
    """The rows `lo` to `hi` of an array `[1, n, hidden]`, which may hold those of a whole step.

    num_written: how many of them were the sequence's own when it was added.
    """

    array: mx.array
    lo: int
    hi: int
    num_written: int

    @property
    def rows(self) -> mx.array:
        """`[1, hi - lo, hidden]`."""
        return self.array if self.hi - self.lo == self.array.shape[1] else self.array[:, self.lo : self.hi]


class HiddenState:
    """Opaque. Holds the rows of the tokens `first` to `end`, which is the end of the last window.

    They stay where the steps computed them, a piece for each of the latest, so that most steps have nothing to do here.

    num_folded: the head has the entries of all tokens before this one; token 0 has none and counts as had.
    """

    is_sliceable = False

    def __init__(self) -> None:
        self.noted: dict[int, LayerRecord] = {}
        self.first = 0
        self.end = 0
        self.num_folded = 1
        self._pieces: list[_Piece] = []

    def write(self, start: int, rows: mx.array, marks: tuple[int, ...], lo: int = 0, hi: int | None = None) -> None:
        """Add the rows `lo` to `hi` of `[1, n, hidden]`, a window's that begins at token `start`; note each mark."""
        hi = rows.shape[1] if hi is None else hi
        if not self._pieces:
            self.first = self.end = start
        if len(self._pieces) == _MOST_PIECES:
            joined = mx.concatenate([piece.rows for piece in self._pieces], axis=1)
            self._pieces = [_Piece(joined, 0, self.end - self.first, self.end - self.first)]
        piece = _Piece(rows, lo, hi, hi - lo)
        if rows.shape[1] > _LARGEST_SHARE * piece.num_written:
            piece = _Piece(copy_of(piece.rows), 0, hi - lo, hi - lo)
        self._pieces.append(piece)
        self.end += hi - lo
        for mark in marks:
            # by the time that the record is put to use the tokens before it are folded: see `fold`
            self.noted[mark] = HiddenRecord(copy_of(self.part(mark - 1, mark)))

    def part(self, start: int, end: int) -> mx.array:
        """The rows `[1, end - start, hidden]` of tokens that are held; there may be none of them."""
        assert self._pieces and self.first <= start <= end <= self.end
        found: list[mx.array] = []
        at = self.first
        for piece in self._pieces:
            lo, hi = max(start, at), min(end, at + piece.hi - piece.lo)
            if lo < hi:
                found.append(_Piece(piece.array, piece.lo + lo - at, piece.lo + hi - at, 0).rows)
            at += piece.hi - piece.lo
        if not found:
            return self._pieces[0].array[:, :0]
        return found[0] if len(found) == 1 else mx.concatenate(found, axis=1)

    def fold(self, num_folded: int) -> None:
        """The head has the entries before `num_folded` now: only rows that later ones need stay."""
        self.num_folded = num_folded
        kept = min(num_folded, self.end) - 1
        while self.first < kept:
            piece = self._pieces[0]
            num_dropped = min(kept - self.first, piece.hi - piece.lo)
            piece.lo += num_dropped
            self.first += num_dropped
            if piece.lo == piece.hi:
                del self._pieces[0]
            elif piece.num_written > _LARGEST_REST:
                self._pieces[0] = _Piece(copy_of(piece.rows), 0, piece.hi - piece.lo, piece.hi - piece.lo)

    def commit(self, num_kept: int, num_window: int) -> None:
        """Drop the rows of dropped tokens."""
        if self._pieces and num_kept < num_window:
            self._pieces[-1].hi -= num_window - num_kept
            self.end -= num_window - num_kept

    def checkpoint(self, length: int) -> HiddenRecord:
        """The rows from the one that the first missing entry needs, or the last one."""
        if not self._pieces:
            return HiddenRecord(None)
        return HiddenRecord(copy_of(self.part(min(self.num_folded, length) - 1, length)))

    def restore(self, record: HiddenRecord, length: int) -> None:
        """Start from the record's rows."""
        num_rows = 0 if record.rows is None else record.rows.shape[1]
        self._pieces = [] if record.rows is None else [_Piece(record.rows, 0, num_rows, num_rows)]
        self.first, self.end = length - num_rows, length
        self.num_folded = self.first + 1

    def arrays(self) -> tuple[mx.array, ...]:
        """What the rows lie in."""
        return tuple(piece.array for piece in self._pieces)

    def cost(self) -> LayerCost:
        """One row: no more stay between steps for long."""
        return LayerCost(fixed=sum(piece.array.nbytes // piece.array.shape[1] for piece in self._pieces[:1]))
