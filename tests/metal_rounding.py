"""How Metal rounds quantised products, instead of MLX's own on a CPU. Nothing here runs on Metal.

By MLX's `metal/kernels/quantized.h`: for few tokens (`qmv`) weights are dequantised in float32, for more (`qmm`) they
are rounded to the activations' type first. Both sum in float32. So a token's result depends on how many come with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

QMM_FROM = {"M1": 6, "M3": 12}
"""Tokens from which on the second kernel computes, at least, by MLX's `metal/quantized.cpp`."""


def round_like_metal(patch: pytest.MonkeyPatch, qmm_from: int) -> None:
    patch.setattr(mx, "quantized_matmul", _matmul(qmm_from))
    patch.setattr(mx, "gather_qmm", _gathered)


def _matmul(qmm_from: int) -> Callable[..., mx.array]:
    def quantized_matmul(
        x: mx.array,
        w: mx.array,
        scales: mx.array,
        biases: mx.array | None = None,
        *,
        transpose: bool = True,
        **stored: Any,
    ) -> mx.array:
        weights = _dequantized(w, scales, biases, x.dtype if x.size // x.shape[-1] >= qmm_from else mx.float32, stored)
        product = x.astype(mx.float32) @ (weights.swapaxes(-1, -2) if transpose else weights)
        return product.astype(x.dtype)

    return quantized_matmul


def _gathered(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    *,
    transpose: bool = True,
    sorted_indices: bool = False,
    lhs_indices: mx.array | None = None,
    rhs_indices: mx.array | None = None,
    **stored: Any,
) -> mx.array:
    """Experts' matrices: tokens sorted by expert go through the second kernel."""
    weights = _dequantized(w, scales, biases, x.dtype if sorted_indices else mx.float32, stored)
    product = mx.gather_mm(
        x.astype(mx.float32),
        weights.swapaxes(-1, -2) if transpose else weights,
        lhs_indices=lhs_indices,
        rhs_indices=rhs_indices,
        sorted_indices=sorted_indices,
    )
    return product.astype(x.dtype)


def _dequantized(
    w: mx.array, scales: mx.array, biases: mx.array | None, dtype: mx.Dtype, stored: dict[str, Any]
) -> mx.array:
    """In float32, rounded to `dtype`."""
    biases = None if biases is None else biases.astype(dtype)
    return mx.dequantize(w, scales.astype(dtype), biases, **stored).astype(mx.float32)
