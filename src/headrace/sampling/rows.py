"""Pick rows of a batch, put rows that were computed in groups back in order, and cut or sum them in blocks."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from headrace.backend.transfer import to_device

BLOCK = 512
"""Tokens of a vocabulary that are looked at together."""


def pick(values: mx.array, rows: Sequence[int]) -> mx.array:
    """The given rows of an array, without a copy if these are all of them in order."""
    if list(rows) == list(range(values.shape[0])):
        return values
    return values[to_device(rows, mx.int32)]


def in_order(groups: Sequence[tuple[Sequence[int], mx.array]]) -> mx.array:
    """One array in row order out of groups, each given as its row numbers and one value per row.

    Every row is in exactly one group; there is at least one group.
    """
    rows = [row for numbers, _ in groups for row in numbers]
    joined = groups[0][1] if len(groups) == 1 else mx.concatenate([values for _, values in groups])
    return pick(joined, sorted(range(len(rows)), key=rows.__getitem__))


def in_blocks(values: mx.array, padding: float) -> mx.array:
    """[R, V] as [R, B, N]: blocks of N tokens, at most BLOCK; the last one is filled up with `padding`."""
    num_rows, num_tokens = values.shape
    block = min(BLOCK, num_tokens)
    num_blocks = -(-num_tokens // block)
    padded = mx.pad(values, [(0, 0), (0, num_blocks * block - num_tokens)], constant_values=padding)
    return padded.reshape(num_rows, num_blocks, block)


def row_sums(values: mx.array) -> mx.array:
    """Sum of each row, [R, 1] float32, of values [R, V] float32.

    Taken in two levels: one running sum over 150,000 tokens, as a CPU takes it, is wrong in the fourth digit.
    """
    return mx.sum(mx.sum(in_blocks(values, 0.0), axis=-1), axis=-1, keepdims=True)
