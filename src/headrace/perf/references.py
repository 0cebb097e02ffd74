"""Arrays in float64, and errors against them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

Float64 = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def double(array: mx.array) -> Float64:
    """The array's own values; every type here fits float32."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def largest_error(found: mx.array, right: Float64) -> float:
    """The largest difference, over the largest right value."""
    return float(np.abs(double(found) - right).max() / np.abs(right).max())
