"""Draws one token per row: inverts its cumulative distribution at a random number keyed by seed and output index."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from headrace.backend.transfer import to_device
from headrace.sampling.rows import in_blocks

NO_TOKEN = -1
"""Returned for a row without a distribution."""

_COARSE = 2.0**24
"""Multiples of 1/this in [0, 1) are exact in float32."""


def draw(weights: mx.array, numbers: npt.NDArray[np.float64]) -> mx.array:
    """Token ids, [R] int32, drawn in proportion to `weights`.

    weights: [R, V] float32, not negative; they need not sum to 1. A row that sums to 0 or has a NaN gives NO_TOKEN.
    numbers: [R] in [0, 1).

    Tokens are laid out by id, not by rank: that needs no sort and is the same for every setting. The search has two
    levels, blocks and then tokens, because one float32 running sum over a large vocabulary loses the tail.
    """
    blocks = in_blocks(weights, 0.0)
    _, num_blocks, block_size = blocks.shape
    cumulative = mx.cumsum(mx.sum(blocks, axis=-1), axis=-1)
    total = cumulative[:, -1:]

    # A float32 is too coarse for the draw: its first 24 bits choose the block, the rest refines the position inside it.
    coarse = np.floor(numbers * _COARSE) / _COARSE
    parts = to_device([*coarse.tolist(), *(numbers - coarse).tolist()], mx.float32).reshape(2, -1, 1) * total
    target, rest = (part.squeeze(0) for part in mx.split(parts, 2))

    block_index = mx.minimum(mx.sum(cumulative <= target, axis=-1, keepdims=True), num_blocks - 1)
    start = mx.take_along_axis(mx.pad(cumulative, [(0, 0), (1, 0)]), block_index, axis=-1)
    inside = mx.take_along_axis(blocks, block_index[:, :, None], axis=1).squeeze(1)
    num_passed = mx.sum(mx.cumsum(inside, axis=-1) <= (target - start) + rest, axis=-1, keepdims=True)
    # Both sums are rounded; a position past the block's end means its last possible token.
    last = mx.max(mx.where(inside > 0, mx.arange(block_size), 0), axis=-1, keepdims=True)
    ids = block_index * block_size + mx.minimum(num_passed, last)
    return mx.where(total > 0, ids, NO_TOKEN).squeeze(-1).astype(mx.int32)


def uniform(seed: int, output_index: int) -> float:
    """The number in [0, 1), a multiple of 2**-53, at this position of this stream.

    Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) is a block cipher: the seed is its key,
    the position its counter, and there is no state between draws.

    seed: any integer, taken modulo 2**128, so a negative seed is a separate stream.
    output_index: from 0, under 2**64.
    """
    counter = np.array([output_index, 0, 0, 0], dtype=np.uint64)
    bits = np.random.Philox(key=seed % 2**128, counter=counter).random_raw()
    return float((int(bits) >> 11) * 2.0**-53)


def uniforms(seeds: Sequence[int], output_indices: Sequence[int]) -> npt.NDArray[np.float64]:
    """`uniform` for each row, [R]. Raises ValueError if the two lengths differ."""
    draws = (uniform(seed, index) for seed, index in zip(seeds, output_indices, strict=True))
    return np.fromiter(draws, dtype=np.float64, count=len(seeds))
