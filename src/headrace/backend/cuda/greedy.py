"""The most likely token of each row on NVIDIA GPUs: one launch, whatever the rows and their type."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from headrace.backend.cuda import ops
from headrace.backend.cuda.kernel import CudaKernel, or_ops

_THREADS = 256
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
        (logits, _found(1 << (num_rows - 1).bit_length())),
        {"T": logits.dtype, "OTHERWISE": otherwise},
        (min(-(-num_tokens // at_a_time), max(1, _BLOCKS_AT_ONCE // num_rows)), num_rows, 1),
        _THREADS,
        (((num_rows,), mx.int32),),
    )
    return out


@cache
def _found(num_rows: int) -> mx.array:
    """What blocks have found so far, see greedy.cuh."""
    zeros = mx.zeros((num_rows, 4), mx.uint32)
    mx.eval(zeros)
    return zeros
