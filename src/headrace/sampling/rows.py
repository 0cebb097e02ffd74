"""Picks and reorders rows of a batch, and cuts or sums them in blocks."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from headrace.backend.transfer import to_device

BLOCK = 512
"""Vocabulary tokens per block."""


def pick(values: mx.array, rows: Sequence[int]) -> mx.array:
    """The given rows of an array, without a copy if these are all of them in order."""
    if list(rows) == list(range(values.shape[0])):
        return values
    return values[to_device(rows, mx.int32)]


def in_order(groups: Sequence[tuple[Sequence[int], mx.array]]) -> mx.array:
    """One array in row order from groups of row numbers and values.

    Every row is in exactly one group; there is at least one group.
    """
    rows = [row for numbers, _ in groups for row in numbers]
    joined = groups[0][1] if len(groups) == 1 else mx.concatenate([values for _, values in groups])
    return pick(joined, sorted(range(len(rows)), key=rows.__getitem__))


def in_blocks(values: mx.array, padding: float) -> mx.array:
    """[R, V] as [R, B, N]: B blocks of N tokens, N at most BLOCK; the last one is filled with `padding`."""
    num_rows, num_tokens = values.shape
    block = min(BLOCK, num_tokens)
    num_blocks = -(-num_tokens // block)
    padded = mx.pad(values, [(0, 0), (0, num_blocks * block - num_tokens)], constant_values=padding)
    return padded.reshape(num_rows, num_blocks, block)


def row_sums(values: mx.array) -> mx.array:
    """The sum of each row, [R, 1] float32, of values [R, V] float32.

    In two levels: a CPU's single running sum over 150,000 tokens is wrong in the fourth digit.
    """
    return mx.sum(mx.sum(in_blocks(values, 0.0), axis=-1), axis=-1, keepdims=True)
