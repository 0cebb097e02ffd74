"""Rope on a CPU, where MLX has no kernel for it: some twenty operations for each call, most of them about angles.

All layers of a step turn by the same positions, so the cosines and sines are computed once for all of them. The bits
are those of `mx.fast.rope` (MLX 0.32.4).
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn


def takes_angles(rope: Any, x: mx.array) -> bool:
    is_plain = type(rope) is nn.RoPE and not rope.traditional
    return is_plain and x.dtype == mx.float32 and mx.default_device() == mx.Device(mx.cpu)


def rotated(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """x `[…, head_dim]`, its first channels rotated by angles of `[…, dims / 2]`: channel i with i + dims / 2."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    parts = [first * cos - second * sin, first * sin + second * cos]
    if 2 * half < x.shape[-1]:
        parts.append(x[..., 2 * half :])
    return mx.concatenate(parts, axis=-1)


class RopeAngles:
    """Cosines and sines of the positions that were asked for last, by what else they depend on."""

    def __init__(self) -> None:
        self._positions: mx.array | None = None
        self._found: dict[tuple[int, float, float], tuple[mx.array, mx.array]] = {}

    def rotate(self, rope: Any, x: mx.array, positions: mx.array) -> mx.array:
        """x `[1, num_heads, T, head_dim]`, each token rotated by its position in `[T]`."""
        return rotated(x, *self._of(rope, positions))

    def _of(self, rope: Any, positions: mx.array) -> tuple[mx.array, mx.array]:
        """Both `[T, dims / 2]`."""
        if self._positions is not positions:
            self._positions, self._found = positions, {}
        key = (rope.dims, rope.base, rope.scale)
        if key not in self._found:
            half = rope.dims // 2
            rates = mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * (math.log(rope.base) / half))
            angles = (positions.astype(mx.float32) * rope.scale)[:, None] * rates
            self._found[key] = mx.cos(angles), mx.sin(angles)
        return self._found[key]
