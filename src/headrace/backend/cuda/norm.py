"""A residual sum and the norm behind it on NVIDIA GPUs."""

from __future__ import annotations

from math import gcd

import mlx.core as mx

from headrace.backend.cuda import ops
from headrace.backend.cuda.kernel import CudaKernel, or_ops

_MOST_THREADS = 1024
_VECTOR_BYTES = 16
"""The most that a thread reads at once."""

_SUM_NORM = CudaKernel(
    "sum_norm",
    ("sum_norm.cuh",),
    ("x", "y", "weight", "eps"),
    ("sum", "normed"),
    "sum_norm<T, WIDTH, THREADS, VECTOR>(x, y, weight, eps[0], sum, normed);",
    # of the widest sums more registers would be taken than a block's threads have
    bounds=(_MOST_THREADS, 1),
)


@or_ops(ops.sum_norm)
def sum_norm(x: mx.array, y: mx.array, weight: mx.array, eps: mx.array) -> tuple[mx.array, mx.array]:
    """`x + y` of `[…, width]`, and its RMS norm times the weight `[width]`; all of one type.

    eps: float32 `[1]`. A token's results are the same in any company.
    """
    width = x.shape[-1]
    vector = gcd(width, _VECTOR_BYTES // x.itemsize)
    threads = min(_MOST_THREADS, -(-width // (32 * vector)) * 32)
    total, normed = _SUM_NORM(
        (x, y, weight, eps),
        {"T": x.dtype, "WIDTH": width, "THREADS": threads, "VECTOR": vector},
        (x.size // width, 1, 1),
        threads,
        ((x.shape, x.dtype), (x.shape, x.dtype)),
    )
    return total, normed
