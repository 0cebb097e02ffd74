"""How far off the kernels for NVIDIA GPUs may be of `benchmarks/references.py`."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from benchmarks.references import Float64, double

TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1e-2}
"""Largest error of a result, relative to its size: what the type's own roundings on the way make."""


def error(got: mx.array, wanted: Float64) -> float:
    """Distance relative to the wanted array's length."""
    assert got.shape == wanted.shape
    return float(np.linalg.norm(double(got) - wanted) / max(float(np.linalg.norm(wanted)), 1e-30))
