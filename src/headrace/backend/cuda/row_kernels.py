"""Kernels over rows on NVIDIA GPUs: activations, residual sums with the following norm, greedy tokens."""

from __future__ import annotations

from math import gcd

import mlx.core as mx

from headrace.backend.cuda import ops
from headrace.backend.cuda.kernel import CudaKernel, or_ops, scratch

_THREADS = 256
_VECTOR_BYTES = 16
"""The most that a thread reads at once."""

_SWIGLU_THREADS = 128
"""Few, for the last block of a row is seldom full."""
_SWIGLU = CudaKernel("swiglu", ("swiglu.cuh",), ("projected",), ("out",), "swiglu<T, WIDTH, EACH>(projected, out);")


@or_ops(ops.swiglu)
def swiglu(projected: mx.array) -> mx.array:
    """Gates and values side by side `[…, 2 · width]` give silu(gate) · value, `[…, width]`."""
    *rows, both = projected.shape
    num_rows, width = projected.size // both, both // 2
    each = gcd(width, _VECTOR_BYTES // projected.itemsize)
    (out,) = _SWIGLU(
        (projected,),
        {"T": projected.dtype, "WIDTH": width, "EACH": each},
        (-(-width // (each * _SWIGLU_THREADS)), num_rows, 1),
        _SWIGLU_THREADS,
        (((*rows, width), projected.dtype),),
    )
    return out


_MOST_THREADS = 1024

_SUM_NORM = CudaKernel(
    "sum_norm",
    ("sum_norm.cuh",),
    ("x", "y", "weight", "eps"),
    ("sum", "normed"),
    "sum_norm<T, WIDTH, THREADS, VECTOR>(x, y, weight, eps[0], sum, normed);",
    # else the widest rows would take more registers than a block of so many threads has
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


_BLOCKS_AT_ONCE = 1056
"""That the 132 multiprocessors of an H100 or H200 hold: fewer read a row of 250,000 logits more slowly."""

_MOST_LIKELY = CudaKernel(
    "most_likely",
    ("greedy.cuh",),
    ("logits", "found"),
    ("out",),
    "most_likely<T>(logits, logits_shape[1], OTHERWISE, reinterpret_cast<Found*>(const_cast<unsigned*>(found)), out);",
)


@or_ops(ops.most_likely)
def most_likely(logits: mx.array, otherwise: int) -> mx.array:
    """Ids of the first highest of logits `[R, V]`, int32 `[R]`; `otherwise` for a row with a NaN or +inf, or nothing
    but -inf.

    What is evaluated together must not hold two of these unless one waits for the other: all leave parts in one place.
    """
    num_rows, num_tokens = logits.shape
    at_a_time = _THREADS * 16 // logits.itemsize
    (out,) = _MOST_LIKELY(
        (logits, scratch("most_likely", (1 << (num_rows - 1).bit_length(), 4), mx.uint32)),
        {"T": logits.dtype, "OTHERWISE": otherwise},
        (min(-(-num_tokens // at_a_time), max(1, _BLOCKS_AT_ONCE // num_rows)), num_rows, 1),
        _THREADS,
        (((num_rows,), mx.int32),),
    )
    return out
