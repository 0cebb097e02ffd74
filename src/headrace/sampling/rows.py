"""Pick rows of a batch, and put rows that were computed in groups back in order."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


def pick(values: mx.array, rows: Sequence[int]) -> mx.array:
    """The given rows of an array, without a copy if these are all of them in order."""
    if list(rows) == list(range(values.shape[0])):
        return values
    return values[mx.array(list(rows), dtype=mx.int32)]


def in_order(groups: Sequence[tuple[Sequence[int], mx.array]]) -> mx.array:
    """One array in row order out of groups, each given as its row numbers and one value per row.

    Every row is in exactly one group; there is at least one group.
    """
    rows = [row for numbers, _ in groups for row in numbers]
    joined = groups[0][1] if len(groups) == 1 else mx.concatenate([values for _, values in groups])
    return pick(joined, sorted(range(len(rows)), key=rows.__getitem__))
