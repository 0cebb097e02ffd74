"""Activations of fused projections on NVIDIA GPUs."""

from __future__ import annotations

import mlx.core as mx

from headrace.backend.cuda import ops
from headrace.backend.cuda.kernel import CudaKernel, or_ops

_THREADS = 256

_SWIGLU = CudaKernel(
    "swiglu",
    ("swiglu.cuh",),
    ("projected",),
    ("out",),
    "swiglu<T, WIDTH>(projected, out);",
)


@or_ops(ops.swiglu)
def swiglu(projected: mx.array) -> mx.array:
    """Gates and values side by side `[…, 2 · width]` give silu(gate) · value, `[…, width]`."""
    *rows, both = projected.shape
    num_rows, width = projected.size // both, both // 2
    (out,) = _SWIGLU(
        (projected,),
        {"T": projected.dtype, "WIDTH": width},
        (-(-width // ((1 if width % 2 else 2) * _THREADS)), num_rows, 1),
        _THREADS,
        (((*rows, width), projected.dtype),),
    )
    return out
