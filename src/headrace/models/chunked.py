"""Chunked encoding: splits a long computation into chunks, so that other work can run in between.

MLX builds a graph first and computes it when its arrays are evaluated. Modules record arrays on the way, in the order
of their dependencies, and a slice evaluates some of them. Building takes time as well, so it is done in stages. Where
the cuts lie depends on shapes alone, and the result does not depend on how many chunks are evaluated at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

import mlx.core as mx
import mlx.nn as nn

CHUNK_WORK = {"cpu": 2**25, "cuda": 2**36, "metal": 2**35}
"""The most multiply-adds of a chunk, if there are enough rows: a millisecond or two on each kind of device."""

LEAST_ROWS = 32
"""Rows of a matrix product below which a chunk is limited by loading weights; a multiple of 16."""

Result = TypeVar("Result")
Stages = Generator[None, None, Result]
"""Builds a part of a graph each time it is resumed, records its chunks, and returns the result."""


class ChunkRecorder:
    """Where modules record the arrays to compute. Work is counted in multiply-adds."""

    def __init__(self, chunk_work: int) -> None:
        """chunk_work: the most work of a chunk."""
        self.chunk_work = chunk_work
        self._recorded: list[tuple[mx.array, int]] = []

    def record(self, array: mx.array, work: int) -> mx.array:
        """Record an array that takes this much work once all previous ones are computed; returns it."""
        self._recorded.append((array, work))
        return array

    def take(self) -> list[tuple[mx.array, int]]:
        taken, self._recorded = self._recorded, []
        return taken


class ChunkedEncoding(Generic[Result]):
    """An encoding in progress: call `compute` until `is_done`, then there is a `result`."""

    def __init__(self, stages: Stages[Result], recorder: ChunkRecorder) -> None:
        """recorder: where the stages record theirs; others may do so between them."""
        self._stages = stages
        self._recorder = recorder
        self._left: deque[tuple[mx.array, int]] = deque()
        self._results: list[Result] = []

    @property
    def is_done(self) -> bool:
        return bool(self._results) and not self._left

    @property
    def result(self) -> Result:
        assert self.is_done, "there is no result before all is computed"
        return self._results[0]

    def compute(self, max_work: float) -> int:
        """Compute chunks with at most `max_work` together, but at least one. Returns their work."""
        arrays: list[mx.array] = []
        done = 0
        while self._has_next() and (not arrays or done + self._left[0][1] <= max_work):
            array, work = self._left.popleft()
            arrays.append(array)
            done += work
        mx.eval(arrays)
        return done

    def _has_next(self) -> bool:
        while not self._left and not self._results:
            self._recorder.take()  # of a failed computation
            try:
                next(self._stages)
            except StopIteration as end:
                self._results.append(end.value)
            self._left.extend(self._recorder.take())
        return bool(self._left)


class ChunkedRows(nn.Module):
    """A module that treats each row independently, in slices of rows.

    inner: such a module. row_work: multiply-adds per row.
    """

    def __init__(self, inner: nn.Module, row_work: int, recorder: ChunkRecorder) -> None:
        super().__init__()
        self.inner = inner
        self._row_work = row_work
        self._recorder = recorder

    def __call__(self, x: mx.array) -> mx.array:
        """x: `[…, rows, width]`."""
        return by_rows(self.inner, x, self._row_work, self._recorder)


def by_rows(compute: Callable[[mx.array], mx.array], x: mx.array, row_work: int, recorder: ChunkRecorder) -> mx.array:
    """`compute` of all rows of `x`, `[…, rows, width]`, which it treats independently or in fours, in recorded
    chunks."""
    num_rows = x.shape[-2]
    at_once = max(LEAST_ROWS, recorder.chunk_work // row_work // LEAST_ROWS * LEAST_ROWS)
    parts = [
        recorder.record(compute(x[..., lo : lo + at_once, :]), min(at_once, num_rows - lo) * row_work)
        for lo in range(0, num_rows, at_once)
    ]
    return mx.concatenate(parts, axis=-2)
