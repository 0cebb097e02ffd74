"""Corrections to mlx-lm for packed steps, one function per case.

Each names its versions; a test fails once mlx-lm no longer needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx


def query_scale_by_position(size: int, offset: Any, beta: float, max_position_embeddings: int) -> mx.array:
    """Ministral 3's query scale for packed tokens (mlx-lm 0.32: one offset per batch row, counted up from there).

    offset: positions `[T]` of the packed tokens, or the first position of a run of `size` tokens. Gives `[T, 1]`.
    """
    is_packed = isinstance(offset, mx.array) and offset.ndim == 1
    positions = offset if is_packed else offset + mx.arange(size)
    return (1 + beta * mx.log(1 + mx.floor(positions / max_position_embeddings)))[:, None]


def largest_rope_batch(rope: Any, num_heads: int) -> int:
    """Rows of a batch, each of so many heads and one token, that one call of a rope can rotate on the current device.

    The CUDA kernel of mlx 0.32.4 puts four heads of the batch into a place of a block's third axis, whose limit is 64,
    once the rotated dimensions leave room in its 1,024 threads: with fewer than 32 of them more can't be launched.
    """
    dims = getattr(rope, "dims", None)
    is_small = isinstance(dims, int) and dims < 32
    return max(1, 256 // num_heads) if is_small and mx.cuda.is_available() else 2**31 - 1


REPLACEMENTS: dict[str, Callable[..., Any]] = {"_get_llama_4_attn_scale": query_scale_by_position}
"""Global names in mlx-lm's forwards, and their replacements in packed steps."""
