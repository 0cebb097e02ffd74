"""Writing parts of large arrays in place, and copying the same part of several."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import NamedTuple

import mlx.core as mx

from headrace.backend.cuda import ops
from headrace.backend.cuda.kernel import CudaKernel, or_ops
from headrace.backend.transfer import to_device

_THREADS = 256
_BYTES = _THREADS * 64
"""That a block copies, if there are not too many for one launch."""
_MOST_BLOCKS = 1024


class Part(NamedTuple):
    """Values to write into `table[…, at : at + n, …]` along the axis; the rest of their shapes is the same."""

    table: mx.array
    axis: int
    at: int
    values: mx.array


_PUT = CudaKernel(
    "put",
    ("runs.cuh", "put.cuh"),
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


def put(parts: Sequence[Part]) -> list[mx.array]:
    """Write parts of tables in place.

    The results, whose numbers mean nothing, have to be evaluated for the writing to happen, and before whatever reads
    the tables there. Raises ValueError for a part that does not fit.
    """
    for table, axis, at, values in parts:
        rests = [shape[:axis] + shape[axis + 1 :] for shape in (table.shape, values.shape)]
        if not 0 <= at <= table.shape[axis] - values.shape[axis] or rests[0] != rests[1] or table.dtype != values.dtype:
            raise ValueError(
                f"{values.dtype} {values.shape} does not fit at {at} of axis {axis} into {table.dtype} {table.shape}"
            )
    return [_put(*part) for part in parts if part.values.size]


@cache
def _collect(num_arrays: int) -> CudaKernel:
    names = [f"a{number}" for number in range(num_arrays)]
    body = f"const T* const arrays[] = {{{', '.join(names)}}}; collect(plan, arrays, out);"
    return CudaKernel(f"collect_{num_arrays}", ("runs.cuh", "collect.cuh"), ("plan", *names), ("out",), body)


@or_ops(ops.collect)
def collect(arrays: Sequence[mx.array], outer: int, inner: int, at: int, number: int) -> mx.array:
    """`[len(arrays), outer, number, inner]`: of each array, seen as `[outer, n, inner]`, the part from `at` on.

    A copy by one launch; the arrays have one shape and type.
    """
    size = arrays[0].size // (outer * inner)
    (found,) = _collect(len(arrays))(
        [to_device([outer, size, inner, at, number], mx.int32), *arrays],
        {"T": arrays[0].dtype},
        (min(_MOST_BLOCKS, -(-number * inner * arrays[0].itemsize // _BYTES)), min(_MOST_BLOCKS, outer), len(arrays)),
        _THREADS,
        (((len(arrays), outer, number, inner), arrays[0].dtype),),
    )
    return found
