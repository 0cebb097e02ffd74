"""Parts of arrays written in place; without CUDA the operation that stands for it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from benchmarks.references import double
from headrace.backend.cuda.put import Part, collect, put

pytestmark = pytest.mark.gpu

CASES = {
    "a state": ((5, 4, 16, 64), 0, 3, 1, mx.float32),
    "keys of one slot": ((1, 2, 700, 64), 2, 300, 257, mx.bfloat16),
    "all of it": ((3, 8), 1, 0, 8, mx.float16),
    "odd widths": ((3, 5, 7), 1, 2, 2, mx.bfloat16),
    "odd places of even widths": ((4, 3, 10), 1, 1, 2, mx.float32),
    "ids": ((9,), 0, 4, 3, mx.int32),
    "more runs than blocks": ((1500, 3, 4), 1, 1, 1, mx.float32),
    "nothing": ((3, 4, 8), 1, 2, 0, mx.float32),
}


@pytest.mark.parametrize("case", CASES)
def test_a_part_is_written_in_place(case: str) -> None:
    shape, axis, at, number, dtype = CASES[case]
    random = np.random.default_rng(len(case))
    table = mx.array(random.integers(-99, 99, shape)).astype(dtype)
    part = mx.array(random.integers(-99, 99, [*shape[:axis], number, *shape[axis + 1 :]])).astype(dtype)
    wanted = double(table)
    wanted[(slice(None),) * axis + (slice(at, at + number),)] = double(part)
    mx.eval(table, part)
    mx.eval(put([Part([table], axis, at, part)]))
    assert np.array_equal(double(table), wanted)


def test_a_part_may_be_a_view_of_another_array() -> None:
    numbers = mx.arange(2 * 7 * 6, dtype=mx.float32).reshape(2, 7, 6)
    table = mx.zeros((6, 2, 4))
    wanted = np.zeros((6, 2, 4))
    wanted[1:5] = double(numbers)[:, 2:6, 1:5].transpose(1, 0, 2)
    mx.eval(numbers, table)
    mx.eval(put([Part([table], 0, 1, numbers[:, 2:6, 1:5].swapaxes(0, 1))]))
    assert np.array_equal(double(table), wanted)
    # one whose numbers begin at an odd place of its memory
    mx.eval(put([Part([table], 0, 1, numbers.reshape(-1)[1:9].reshape(1, 2, 4))]))
    wanted[1] = np.arange(1, 9).reshape(2, 4)
    assert np.array_equal(double(table), wanted)


def test_parts_of_several_tables_are_written() -> None:
    random = np.random.default_rng(7)
    shapes = [(1, 2, 40, 64)] * 67 + [(3, 8, 5)] * 2
    tables = [mx.array(random.integers(-99, 99, shape)).astype(mx.float16) for shape in shapes]
    # more tables than one launch takes, two places, two shapes
    places = [(2, 7, 9)] * 66 + [(2, 30, 10), (0, 1, 2), (0, 0, 1)]
    parts: list[Part] = []
    wanted = [double(table) for table in tables]
    for table, of_table, (axis, at, number) in zip(tables, wanted, places, strict=True):
        values = random.integers(-99, 99, (*table.shape[:axis], number, *table.shape[axis + 1 :]))
        of_table[(slice(None),) * axis + (slice(at, at + number),)] = values
        parts.append(Part([table], axis, at, mx.array(values).astype(mx.float16)))
    mx.eval(tables, [part.values for part in parts])
    mx.eval(put(parts))
    for table, of_table in zip(tables, wanted, strict=True):
        assert np.array_equal(double(table), of_table)


def test_spans_of_many_layers_are_written_together() -> None:
    """Llama 70B has 80, each with keys and values."""
    keys, values = ([mx.zeros((1, 1, 200, 8), mx.float16) for _ in range(80)] for _ in range(2))
    spans = mx.arange(60, dtype=mx.float16)
    parts = [
        Part(tables, 2, 3 * at, mx.full((80, 1, 3, 8), spans[at])) for at in range(60) for tables in (keys, values)
    ]
    mx.eval(keys, values, [part.values for part in parts])
    launches = put(parts)
    mx.eval(launches)
    assert len(launches) == 2
    wanted = np.zeros((200, 8))
    wanted[:180] = np.repeat(np.arange(60), 3)[:, None]
    for table in (*keys, *values):
        assert np.array_equal(double(table)[0, 0], wanted)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
@pytest.mark.parametrize("width", [64, 7])
def test_spans_of_many_lengths_are_written_into_all_tables(width: int, dtype: mx.Dtype) -> None:
    """As a conversation's keys and values are restored: what a span has of all layers is one array."""
    random = np.random.default_rng(width)
    keys, values = ([mx.zeros((1, 2, 9000, width), dtype) for _ in range(3)] for _ in range(2))
    wanted = np.zeros((6, 2, 9000, width))
    lengths = [5000, 1, 2, 3, *random.integers(1, 40, 90).tolist(), 700]
    parts, at = [], 11
    for length in lengths:
        for number, tables in enumerate((keys, values)):
            numbers = random.integers(-99, 99, (3, 2, length, width))
            wanted[3 * number : 3 * number + 3, :, at : at + length] = numbers
            parts.append(Part(tables, 2, at, mx.array(numbers).astype(dtype)))
        at += length
    mx.eval(keys, values, [part.values for part in parts])
    launches = put(parts)
    mx.eval(launches)
    found = np.stack([double(table)[0] for table in (*keys, *values)])
    assert np.array_equal(found, wanted)
    assert len(launches) < 10


@pytest.mark.parametrize(
    ("axis", "at", "part"),
    [
        (0, 2, mx.zeros((2, 4))),
        (0, -1, mx.zeros((1, 4))),
        (1, 0, mx.zeros((1, 4))),
        (0, 0, mx.zeros((1, 4), mx.float16)),
        (0, 0, mx.zeros((1, 4, 1))),
    ],
)
def test_a_part_that_does_not_fit_is_refused(axis: int, at: int, part: mx.array) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        put([Part([mx.zeros((3, 4))], axis, at, part)])


@pytest.mark.parametrize(
    ("shape", "outer", "inner", "at", "number", "dtype"),
    [
        ((5, 4, 16, 64), 1, 4096, 3, 1, mx.float32),
        ((1, 2, 700, 64), 2, 64, 256, 199, mx.bfloat16),
        ((6, 11, 24), 1, 24, 2 * 11 + 5, 3, mx.bfloat16),
        ((3, 5, 7), 3, 7, 1, 3, mx.bfloat16),
        ((4, 8), 1, 8, 0, 4, mx.float16),
    ],
)
def test_the_same_part_of_several_arrays_is_copied(
    shape: tuple[int, ...], outer: int, inner: int, at: int, number: int, dtype: mx.Dtype
) -> None:
    random = np.random.default_rng(at)
    arrays = [mx.array(random.integers(-99, 99, shape)).astype(dtype) for _ in range(3)]
    wanted = np.stack([double(array).reshape(outer, -1, inner)[:, at : at + number] for array in arrays])
    found = collect(arrays, outer, inner, at, number)
    mx.eval(found)
    # a copy: what is written into the arrays afterwards is not in it
    mx.eval(put([Part([array], 0, 0, array[:1] * 0) for array in arrays]))
    assert np.array_equal(double(found), wanted)
