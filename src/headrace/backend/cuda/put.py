"""Writing parts of large arrays in place, and copying the same part of several."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
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

_MOST_ARRAYS = 64
"""Written by one launch, whose parameters are limited to 4 KB."""


class Part(NamedTuple):
    """Values to write into `table[…, at : at + n, …]` along the axis; the rest of their shapes is the same."""

    table: mx.array
    axis: int
    at: int
    values: mx.array


@cache
def _put_kernel(num_arrays: int) -> CudaKernel:
    tables, parts = ([f"{kind}{number}" for number in range(num_arrays)] for kind in ("table", "part"))
    written = ", ".join(f"const_cast<T*>({name})" for name in tables)
    body = f"T* const tables[] = {{{written}}}; const T* const parts[] = {{{', '.join(parts)}}};"
    body += " put(plan, tables, parts, done);"
    return CudaKernel(f"put_{num_arrays}", ("runs.cuh", "put.cuh"), ("plan", *tables, *parts), ("done",), body)


@or_ops(ops.put)
def _put(tables: Sequence[mx.array], axis: int, at: int, parts: Sequence[mx.array]) -> mx.array:
    """Tables have one shape and type, and parts have one shape."""
    table, number = tables[0], parts[0].shape[axis]
    outer, inner = prod(table.shape[:axis]), prod(table.shape[axis + 1 :])
    (done,) = _put_kernel(len(tables))(
        [mx.array([outer, table.shape[axis], inner, at, number], mx.int32), *tables, *parts],
        {"T": table.dtype},
        (min(_MOST_BLOCKS, -(-number * inner * table.itemsize // _BYTES)), min(_MOST_BLOCKS, outer), len(tables)),
        _THREADS,
        (((1,), mx.int32),),
    )
    return done


def put(parts: Sequence[Part]) -> list[mx.array]:
    """Write parts of tables in place; those of one shape at one place by one launch.

    The results, whose numbers mean nothing, have to be evaluated for the writing to happen, and before whatever reads
    the tables there. Raises ValueError for a part that does not fit.
    """
    groups: dict[Hashable, list[Part]] = {}
    for part in parts:
        table, axis, at, values = part
        rests = [shape[:axis] + shape[axis + 1 :] for shape in (table.shape, values.shape)]
        if not 0 <= at <= table.shape[axis] - values.shape[axis] or rests[0] != rests[1] or table.dtype != values.dtype:
            raise ValueError(
                f"{values.dtype} {values.shape} does not fit at {at} of axis {axis} into {table.dtype} {table.shape}"
            )
        if values.size:
            groups.setdefault((table.shape, table.dtype, axis, at, values.shape), []).append(part)
    written: list[mx.array] = []
    for group in groups.values():
        for first in range(0, len(group), _MOST_ARRAYS):
            some = group[first : first + _MOST_ARRAYS]
            written.append(_put([one.table for one in some], some[0].axis, some[0].at, [one.values for one in some]))
    return written


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
