"""Hidden rows of the trunk that a multi-token prediction head has not read yet.

The head's entry for token i is made of the trunk's hidden row of token i - 1 and of token i itself, and lies in the
cache of keys and values at i. So entries before a length belong to the tokens before that length, whatever comes
after; what the next entry needs is the last hidden row, and that is what a record carries.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from headrace.state.layer import LayerCost, LayerRecord


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


class HiddenState:
    """Opaque. Holds the rows of the tokens `first` to the end of the last window.

    num_folded: the head has the entries of all tokens before this one; token 0 has none and counts as had.
    """

    is_sliceable = False

    def __init__(self) -> None:
        self.noted: dict[int, LayerRecord] = {}
        self.rows: mx.array | None = None
        self.first = 0
        self.num_folded = 1

    @property
    def end(self) -> int:
        """The token behind the last row."""
        return self.first + (0 if self.rows is None else self.rows.shape[1])

    def write(self, start: int, rows: mx.array, marks: tuple[int, ...]) -> None:
        """Add the rows `[1, n, hidden]` of a window that begins at token `start`; note a record at each mark."""
        if self.rows is None:
            self.first = start
            self.rows = rows
        else:
            self.rows = mx.concatenate([self.rows, rows], axis=1)
        for mark in marks:
            # by the time that the record is put to use the tokens before it are folded: see `fold`
            self.noted[mark] = HiddenRecord(_copy(self.part(mark - 1, mark)))

    def part(self, start: int, end: int) -> mx.array:
        """The rows `[1, end - start, hidden]` of tokens that are held."""
        assert self.rows is not None and self.first <= start
        return self.rows[:, start - self.first : end - self.first]

    def fold(self, num_folded: int) -> None:
        """The head has the entries before `num_folded` now: only rows that later ones need stay."""
        self.num_folded = num_folded
        kept = min(num_folded, self.end) - 1
        if kept > self.first:
            self.rows, self.first = _copy(self.part(kept, self.end)), kept

    def commit(self, num_kept: int, num_window: int) -> None:
        """Drop the rows of dropped tokens."""
        if self.rows is not None and num_kept < num_window:
            self.rows = self.rows[:, : self.rows.shape[1] - (num_window - num_kept)]

    def checkpoint(self, length: int) -> HiddenRecord:
        """The rows from the one that the first missing entry needs, or the last one."""
        if self.rows is None:
            return HiddenRecord(None)
        return HiddenRecord(_copy(self.part(min(self.num_folded, length) - 1, length)))

    def restore(self, record: HiddenRecord, length: int) -> None:
        """Start from the record's rows."""
        self.rows = record.rows
        self.first = length - (0 if record.rows is None else record.rows.shape[1])
        self.num_folded = self.first + 1

    def arrays(self) -> tuple[mx.array, ...]:
        """The rows."""
        return () if self.rows is None else (self.rows,)

    def cost(self) -> LayerCost:
        """One row: no more stay between steps for long."""
        return LayerCost(fixed=0 if self.rows is None else self.rows.nbytes // self.rows.shape[1])


def _copy(rows: mx.array) -> mx.array:
    """An array of its own: a slice would keep a whole chunk's rows alive."""
    return rows * mx.array(1, rows.dtype)
