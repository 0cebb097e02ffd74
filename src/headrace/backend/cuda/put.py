"""Writing a part of a large array in place."""

from __future__ import annotations

from math import prod

import mlx.core as mx

from headrace.backend.cuda import ops
from headrace.backend.cuda.kernel import CudaKernel, or_ops

_THREADS = 256
_BYTES = _THREADS * 64
"""That a block copies, if there are not too many for one launch."""
_MOST_BLOCKS = 1024

_PUT = CudaKernel(
    "put",
    ("put.cuh",),
    ("table", "at", "part"),
    ("done",),
    "put<AXIS>(const_cast<T*>(table), table_shape, table_ndim, at[0], part, part_shape, done);",
)


@or_ops(ops.put)
def _put(table: mx.array, axis: int, at: int, part: mx.array) -> mx.array:
    outer, run = prod(table.shape[:axis]), prod(part.shape[axis:])
    (done,) = _PUT(
        (table, mx.array([at], mx.int32), part),
        {"T": table.dtype, "AXIS": axis},
        (min(_MOST_BLOCKS, -(-run * table.itemsize // _BYTES)), min(_MOST_BLOCKS, outer), 1),
        _THREADS,
        (((1,), mx.int32),),
    )
    return done


def put(table: mx.array, axis: int, at: int, part: mx.array) -> mx.array:
    """Write `part` into `table[…, at : at + n, …]` along the axis, in place; the rest of their shapes is the same.

    The result, of one number that means nothing, has to be evaluated for the writing to happen, and before whatever
    reads the table there. Raises ValueError for a part that does not fit.
    """
    rests = [shape[:axis] + shape[axis + 1 :] for shape in (table.shape, part.shape)]
    if not 0 <= at <= table.shape[axis] - part.shape[axis] or rests[0] != rests[1] or table.dtype != part.dtype:
        raise ValueError(
            f"{part.dtype} {part.shape} does not fit at {at} of axis {axis} into {table.dtype} {table.shape}"
        )
    return _put(table, axis, at, part) if part.size else mx.zeros((1,), mx.int32)
