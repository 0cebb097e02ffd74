"""Attention of encoders: every token sees its whole text, or a window around itself."""

from __future__ import annotations

import mlx.core as mx

SCORE_ELEMENTS = 1 << 26
"""Most scores of a block of queries: 256 MB in float32 where no kernel avoids them."""


def attend(queries: mx.array, keys: mx.array, values: mx.array, lengths: mx.array, window: int | None) -> mx.array:
    """queries, keys, values: `[B, heads, L, width]` of texts padded at their ends. lengths: int32 `[B]`.

    window: distance up to which tokens see each other; None for any. Gives `[B, L, heads * width]`.
    """
    num_rows, num_heads, length, width = queries.shape
    positions = mx.arange(length)
    is_real = positions[None, None, None] < lengths[:, None, None, None]
    block = max(1, SCORE_ELEMENTS // (num_rows * num_heads * length))
    parts = []
    for lo in range(0, length, block):
        mask = is_real
        if window is not None:
            near = mx.abs(positions[lo : lo + block, None] - positions[None]) <= window
            # a padding token near no real one sees itself: without any its row would be NaN
            mask = (near & is_real) | (near & ~is_real.swapaxes(2, 3)[:, :, lo : lo + block])
        parts.append(
            mx.fast.scaled_dot_product_attention(
                queries[:, :, lo : lo + block], keys, values, scale=width**-0.5, mask=mask
            )
        )
    attended = mx.concatenate(parts, axis=2)
    return attended.swapaxes(1, 2).reshape(num_rows, length, num_heads * width)


def split_heads(x: mx.array, num_heads: int) -> mx.array:
    """`[B, L, heads * width]` to `[B, heads, L, width]`."""
    num_rows, length, width = x.shape
    return x.reshape(num_rows, length, num_heads, width // num_heads).swapaxes(1, 2)
