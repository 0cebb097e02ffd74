"""Splits long computations into slices, so that other work can run in between.

MLX builds a graph first and computes it when its arrays are evaluated. Modules record arrays on the way, in the order
of their dependencies, and a slice evaluates some of them. Building takes time as well, so it is done in stages. Where
the cuts lie depends on shapes alone, and the result does not depend on how many pieces are evaluated at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

import mlx.core as mx
import mlx.nn as nn

PIECE_WORK = {"cpu": 2**25, "cuda": 2**36, "metal": 2**35}
"""Multiply-adds of a piece at most, if there are enough rows: a millisecond or two on each kind of device."""

LEAST_ROWS = 32
"""Rows of a matrix product below which a piece is limited by loading weights; a multiple of 16."""

Result = TypeVar("Result")
Stages = Generator[None, None, Result]
"""Builds a part of a graph each time it is resumed, records its pieces, and returns the result."""


class Pieces:
    """Where modules record the arrays to compute. Work is counted in multiply-adds."""

    def __init__(self, piece_work: int) -> None:
        """piece_work: the most work of a piece."""
        self.piece_work = piece_work
        self._noted: list[tuple[mx.array, int]] = []

    def note(self, array: mx.array, work: int) -> mx.array:
        """Record an array that takes this much work once all previous ones are computed; returns it."""
        self._noted.append((array, work))
        return array

    def take(self) -> list[tuple[mx.array, int]]:
        """Everything recorded since the last time."""
        taken, self._noted = self._noted, []
        return taken


class Computation(Generic[Result]):
    """A computation in progress: call `compute` until `is_done`, then there is a `result`."""

    def __init__(self, stages: Stages[Result], pieces: Pieces) -> None:
        """pieces: where the stages record theirs; others may do so between them."""
        self._stages = stages
        self._pieces = pieces
        self._left: deque[tuple[mx.array, int]] = deque()
        self._results: list[Result] = []

    @property
    def is_done(self) -> bool:
        return bool(self._results) and not self._left

    @property
    def result(self) -> Result:
        """The result, evaluated."""
        assert self.is_done, "there is no result before all is computed"
        return self._results[0]

    def compute(self, max_work: float) -> int:
        """Compute pieces with at most `max_work` together, but at least one. Returns their work."""
        arrays: list[mx.array] = []
        done = 0
        while self._has_next() and (not arrays or done + self._left[0][1] <= max_work):
            array, work = self._left.popleft()
            arrays.append(array)
            done += work
        mx.eval(arrays)
        return done

    def _has_next(self) -> bool:
        """Build as far as the next piece, if there is one."""
        while not self._left and not self._results:
            self._pieces.take()  # of a failed computation
            try:
                next(self._stages)
            except StopIteration as end:
                self._results.append(end.value)
            self._left.extend(self._pieces.take())
        return bool(self._left)


class RowPieces(nn.Module):
    """A module that treats each row independently, in slices of rows.

    inner: such a module. row_work: multiply-adds per row.
    """

    def __init__(self, inner: nn.Module, row_work: int, pieces: Pieces) -> None:
        super().__init__()
        self.inner = inner
        self._row_work = row_work
        self._pieces = pieces

    def __call__(self, x: mx.array) -> mx.array:
        """x: `[…, rows, width]`."""
        return by_rows(self.inner, x, self._row_work, self._pieces)


def by_rows(compute: Callable[[mx.array], mx.array], x: mx.array, row_work: int, pieces: Pieces) -> mx.array:
    """`compute` of all rows of `x`, `[…, rows, width]`, which it treats independently or in fours, in recorded
    pieces."""
    num_rows = x.shape[-2]
    at_once = max(LEAST_ROWS, pieces.piece_work // row_work // LEAST_ROWS * LEAST_ROWS)
    parts = [
        pieces.note(compute(x[..., lo : lo + at_once, :]), min(at_once, num_rows - lo) * row_work)
        for lo in range(0, num_rows, at_once)
    ]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-2)
