"""Writing parts of large arrays in place, and copying the same part of several."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
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
"""Along an axis of the grid."""
_MOST_PART_BLOCKS = 4096

_MOST_PARTS = 64
_MOST_TABLES = 256
"""Of one launch, whose parameters are limited to 4 KB."""


class Part(NamedTuple):
    """Values to write into `table[…, at : at + n, …]` along the axis, of one table after the other.

    tables: of one shape and type. values: `[…, n, *table.shape[axis + 1 :]]`.
    """

    tables: Sequence[mx.array]
    axis: int
    at: int
    values: mx.array


def _number(part: Part) -> int:
    """Its `n`. Raises ValueError if the values do not fit."""
    table, axis, values = part.tables[0], part.axis, part.values
    behind = table.ndim - axis
    if values.ndim >= behind:
        number = values.shape[-behind]
        before = len(part.tables) * prod(table.shape[:axis]), prod(values.shape[:-behind])
        rests = table.shape[axis + 1 :], values.shape[values.ndim - behind + 1 :]
        fits = before[0] == before[1] and rests[0] == rests[1] and table.dtype == values.dtype
        if fits and 0 <= part.at <= table.shape[axis] - number:
            return int(number)
    raise ValueError(
        f"{values.dtype} {values.shape} does not fit at {part.at} of axis {axis} into "
        f"{len(part.tables)} of {table.dtype} {table.shape}"
    )


@cache
def _put_kernel(num_tables: int, num_parts: int) -> CudaKernel:
    tables, parts = [f"table{number}" for number in range(num_tables)], [f"part{number}" for number in range(num_parts)]
    written = ", ".join(f"const_cast<T*>({name})" for name in tables)
    body = f"T* const tables[] = {{{written}}}; const T* const parts[] = {{{', '.join(parts)}}};"
    body += " put(plan, tables, parts, done);"
    name = f"put_{num_tables}_{num_parts}"
    return CudaKernel(name, ("runs.cuh", "put.cuh"), ("plan", *tables, *parts), ("done",), body)


@or_ops(ops.put)
def _put(parts: Sequence[Part], numbers: Sequence[int]) -> mx.array:
    """Their tables have one shape and type, and their axis is the same. numbers: each part's `n`."""
    table, axis = parts[0].tables[0], parts[0].axis
    outer, inner = prod(table.shape[:axis]), prod(table.shape[axis + 1 :])
    plan = [outer, table.shape[axis], inner]
    tables: list[mx.array] = []
    starts: dict[int, int] = {}
    for part, number in zip(parts, numbers, strict=True):
        start = starts.setdefault(id(part.tables), len(tables))
        if start == len(tables):
            tables += part.tables
        plan += [start, len(part.tables), part.at, number]
    values, most_tables = [part.values for part in parts], max(len(part.tables) for part in parts)
    # a kernel is built for a number of arrays: one for conversations of any number of spans
    values += values[-1:] * (0 if most_tables == 1 else _MOST_PARTS - len(parts))
    num_runs = min(_MOST_BLOCKS, most_tables * outer)
    num_bytes = max(numbers) * inner * table.itemsize
    (done,) = _put_kernel(len(tables), len(values))(
        [to_device(plan, mx.int32), *tables, *values],
        {"T": table.dtype},
        (min(-(-num_bytes // _BYTES), max(1, _MOST_PART_BLOCKS // num_runs)), num_runs, len(parts)),
        _THREADS,
        (((1,), mx.int32),),
    )
    return done


def put(parts: Sequence[Part]) -> list[mx.array]:
    """Write parts of tables in place; those of similar size into tables of one shape by one launch.

    The results, whose numbers mean nothing, have to be evaluated for the writing to happen, and before whatever reads
    the tables there. Raises ValueError for a part that does not fit.
    """
    groups: dict[Hashable, list[tuple[Part, int]]] = {}
    for part in parts:
        if number := _number(part):
            table = part.tables[0]
            # each part of a launch has as many blocks as the largest
            alike = table.shape, table.dtype, part.axis, number.bit_length() // 4
            groups.setdefault(alike, []).append((part, number))
    return [_put(*zip(*some, strict=True)) for group in groups.values() for some in _launches(group)]


def _launches(parts: Sequence[tuple[Part, int]]) -> Iterator[list[tuple[Part, int]]]:
    """The parts in groups that one launch can have."""
    some: list[tuple[Part, int]] = []
    seen: dict[int, int] = {}
    for part, number in parts:
        seen[id(part.tables)] = len(part.tables)
        if some and (len(some) == _MOST_PARTS or sum(seen.values()) > _MOST_TABLES):
            yield some
            some, seen = [], {id(part.tables): len(part.tables)}
        some.append((part, number))
    if some:
        yield some


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
