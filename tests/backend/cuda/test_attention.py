"""Kernels of attention layers against float64; without CUDA the operations that stand for them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from backend.cuda.references import TOLERANCE, error

from benchmarks import references as layer_references
from benchmarks.references import Float64, double
from headrace.backend import blas
from headrace.backend.cuda import attention
from headrace.backend.cuda.kernel import CudaKernel
from headrace.backend.cuda.shapes import MANY_TOKENS, HeadShape, ProjectedHeads, Projection

pytestmark = pytest.mark.gpu

SLABS = ((4, 256), (1, 1024), (1, 2048), (1, 512))
"""Slots and capacity of each."""
PLAN = (
    (0, 1, 0, 0, 1),
    (1, 4, 900, 1, 0),
    (5, 2, 1100, 2, 0),
    (7, 16, 77, 0, 3),
    (23, 1, 255, 0, 2),
    (24, 80, 300, 3, 0),
)
"""Per row: its first token, its tokens, its length before them, its slab and its slot there."""
NUM_TOKENS = 104

SORTS = {
    "four heads a key head": (HeadShape(8, 2, 128), mx.bfloat16, 0, False, False, 0),
    "gates": (HeadShape(4, 2, 256), mx.bfloat16, 0, False, True, 0),
    "three heads a key head": (HeadShape(6, 2, 64), mx.float16, 0, False, False, 0),
    "a window and sinks": (HeadShape(8, 1, 128), mx.float16, 100, True, False, 0),
    "a window of one": (HeadShape(2, 2, 64), mx.bfloat16, 1, False, False, 0),
    "sinks": (HeadShape(16, 2, 64), mx.bfloat16, 0, True, False, 0),
    "keys from the second token on": (HeadShape(4, 2, 64), mx.bfloat16, 0, False, True, 1),
    "single precision": (HeadShape(4, 2, 64), mx.float32, 50, True, True, 1),
}


def drawn(seed: int, dtype: mx.Dtype, *shape: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).astype(dtype)


def slabs_of(shape: HeadShape, dtype: mx.Dtype) -> list[tuple[mx.array, mx.array]]:
    def array(seed: int, slots: int, capacity: int) -> mx.array:
        return drawn(seed, dtype, slots, shape.num_kv_heads, capacity, shape.head_dim)

    return [(array(2 * at, *sizes), array(2 * at + 1, *sizes)) for at, sizes in enumerate(SLABS)]


def plan_of(window: int, first: int, rows: tuple[tuple[int, ...], ...] = PLAN) -> list[tuple[int, ...]]:
    return [(*row, SLABS[row[3]][1], window, first) for row in rows]


@pytest.mark.parametrize("many_tokens", [MANY_TOKENS, 1])
@pytest.mark.parametrize("sort", SORTS)
def test_rows_find_what_they_see_in_their_slots(sort: str, many_tokens: int) -> None:
    shape, dtype, window, has_sinks, is_gated, first = SORTS[sort]
    if mx.cuda.is_available() and attention.refusal(shape, dtype) is not None:
        pytest.skip("not a type that the kernels do")
    # the first row's only token stands at the first key
    rows = ((0, 1, first, 0, 1), *PLAN[1:])
    plan, slabs, scale = plan_of(window, first, rows), slabs_of(shape, dtype), shape.head_dim**-0.5
    queries = drawn(7, dtype, NUM_TOKENS, shape.num_heads, shape.head_dim)
    sinks = drawn(8, dtype, shape.num_heads) if has_sinks else None
    layout = Projection(shape.num_heads * 2 * shape.head_dim + 64, 2 * shape.head_dim, 0, 0, 0)
    projected = drawn(9, dtype, 1, NUM_TOKENS, layout.width)
    most = max(row[1] for row in rows)
    got = [
        attention.attend(
            shape,
            mx.array(plan, dtype=mx.int32),
            most,
            queries,
            slabs,
            mx.array([scale]),
            sinks,
            (projected, layout) if is_gated else None,
            many_tokens,
        )
        for _ in range(2)
    ]
    heads = double(projected)[0][:, : 2 * shape.num_heads * shape.head_dim].reshape(NUM_TOKENS, shape.num_heads, -1)
    wanted = layer_references.attend(
        shape,
        plan,
        double(queries),
        slabs,
        scale,
        None if sinks is None else double(sinks),
        heads[..., shape.head_dim :] if is_gated else None,
    )
    assert got[0].dtype == dtype
    # twice: blocks that put parts together leave their counters as they found them
    assert all(error(one, wanted) < TOLERANCE[dtype] for one in got)
    # rows of no tokens, and tokens of no row, behind them
    more = mx.concatenate([mx.array(plan, dtype=mx.int32), mx.zeros((3, 8), mx.int32)])
    queries, projected = (mx.concatenate([x, x[..., :2, :]], axis=-2) for x in (queries.swapaxes(0, 1), projected))
    gates = (projected, layout) if is_gated else None
    filled = attention.attend(
        shape, more, most, queries.swapaxes(0, 1), slabs, mx.array([scale]), sinks, gates, many_tokens
    )
    assert filled.shape[1] == NUM_TOKENS + 2 and error(filled[:, :NUM_TOKENS], wanted) < TOLERANCE[dtype]


CHUNKS = ((0, 700, 300, 1, 0), (700, 1, 77, 0, 3), (701, 90, 0, 2, 0))


@pytest.mark.parametrize("shape", [HeadShape(8, 2, 128), HeadShape(4, 2, 256)], ids=str)
def test_chunks_of_prompts_find_what_they_see(shape: HeadShape, rows: tuple[tuple[int, ...], ...] = CHUNKS) -> None:
    plan, slabs, scale = plan_of(0, 0, rows), slabs_of(shape, mx.bfloat16), shape.head_dim**-0.5
    queries = drawn(7, mx.bfloat16, sum(row[1] for row in rows), shape.num_heads, shape.head_dim)
    table = mx.array(plan, dtype=mx.int32)
    got = attention.attend(shape, table, 1024, queries, slabs, mx.array([scale]))
    wanted = layer_references.attend(shape, plan, double(queries), slabs, scale, None, None)
    assert error(got, wanted) < TOLERANCE[mx.bfloat16]


def test_a_key_that_nobody_may_see_has_no_part() -> None:
    shape, dtype = HeadShape(4, 2, 64), mx.bfloat16
    plan, slabs = plan_of(0, 0), slabs_of(shape, dtype)
    queries = drawn(7, dtype, NUM_TOKENS, 4, 64)

    def found() -> mx.array:
        table, scale = mx.array(plan, dtype=mx.int32), mx.array([0.125])
        return attention.attend(shape, table, 80, queries, slabs, scale)

    before = found()
    mx.eval(before)
    for lo, num_tokens, start, slab, slot, *_ in plan:
        for held in slabs[slab]:
            held[slot, :, start + num_tokens :] = mx.array(1e4, dtype)
        assert lo < NUM_TOKENS
    assert mx.array_equal(found(), before)


LAYOUTS = {
    "one axis": (HeadShape(8, 2, 128), mx.bfloat16, 128, False, 1, True),
    "three axes, a quarter of the channels, gates between the heads": (
        HeadShape(4, 2, 256),
        mx.bfloat16,
        64,
        True,
        3,
        True,
    ),
    "no norms": (HeadShape(6, 3, 64), mx.float16, 64, False, 1, False),
    "a part of a warp's channels": (HeadShape(4, 2, 64), mx.bfloat16, 32, True, 1, True),
    "single precision": (HeadShape(4, 2, 64), mx.float32, 32, True, 3, True),
}
ODD = "three axes, a quarter of the channels, gates between the heads"
"""The layout whose projection has an odd number of columns."""


class Drawn(NamedTuple):
    """A projection with what makes heads of it, and these in float64."""

    shape: HeadShape
    heads: ProjectedHeads
    queries: Float64
    keys: Float64
    values: Float64
    tolerance: float


def heads_of(name: str, num_tokens: int) -> Drawn:
    shape, dtype, rotary, is_gated, num_axes, is_normed = LAYOUTS[name]
    head_dim, q_stride = shape.head_dim, shape.head_dim * (2 if is_gated else 1)
    k_at, kv_dim = shape.num_heads * q_stride, shape.num_kv_heads * head_dim
    layout = Projection(k_at + 2 * kv_dim + (name == ODD), q_stride, k_at, k_at + kv_dim, rotary)
    random = np.random.default_rng(len(name))
    positions = random.integers(0, 3000, (num_axes, num_tokens)).astype(np.int32)
    turns = (1e6 ** (-np.arange(rotary // 2) / (rotary // 2))).astype(np.float32)
    axes = (np.arange(rotary // 2) % num_axes).astype(np.int32)
    projected = drawn(1, dtype, 1, num_tokens, layout.width)
    norms = (*(1 + drawn(seed, mx.float32, head_dim) / 8 for seed in (2, 3)), mx.array([1e-6]))
    frequencies = mx.array(turns), mx.array(axes)
    wanted = layer_references.rope_append(
        shape,
        layout,
        positions.astype(np.float64),
        double(projected)[0],
        turns.astype(np.float64),
        axes,
        (double(norms[0]), double(norms[1]), 1e-6) if is_normed else None,
    )
    heads = ProjectedHeads(layout, projected, mx.array(positions), frequencies, norms if is_normed else None)
    # an angle of thousands of radians is known to a float32's 24 bits
    return Drawn(shape, heads, *wanted, max(TOLERANCE[dtype], 1e-4))


def check_written(
    drawn: Drawn, plan: list[tuple[int, ...]], slabs: list[tuple[mx.array, mx.array]], before: list[tuple[Float64, ...]]
) -> None:
    """Whether the tokens' keys and values are in their places, and all else is as it was."""
    for lo, num_tokens, start, slab, slot, *_ in plan:
        tokens = slice(start, start + num_tokens)
        for held, new, allowed in zip(slabs[slab], (drawn.keys, drawn.values), (drawn.tolerance, 0.0), strict=True):
            wanted = new[lo : lo + num_tokens].swapaxes(0, 1)
            assert error(held[slot, :, tokens], wanted) <= allowed
        # so that the rest, compared below, must be unchanged
        for held, old in zip(slabs[slab], before[slab], strict=True):
            old[slot, :, tokens] = double(held)[slot, :, tokens]
    for pair, olds in zip(slabs, before, strict=True):
        assert all(np.array_equal(double(array), old) for array, old in zip(pair, olds, strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_keys_are_turned_and_written_in_place(name: str) -> None:
    # the last tokens are of no row
    drawn, plan = heads_of(name, NUM_TOKENS + 3), plan_of(0, 0)
    dtype = drawn.heads.projected.dtype
    slabs = slabs_of(drawn.shape, dtype)
    mx.eval(slabs)
    before = [tuple(double(array) for array in pair) for pair in slabs]
    table = mx.array([*plan, *[(0,) * 8] * 2], dtype=mx.int32)
    got = attention.rope_append(drawn.shape, table, drawn.heads, slabs)
    mx.eval(got)
    assert got.dtype == dtype and error(got, drawn.queries) < drawn.tolerance
    check_written(drawn, plan, slabs, before)


SHORT = (
    (0, 1, 0, 0, 1),
    (1, 4, 766, 1, 0),
    (5, 2, 1100, 2, 0),
    (7, 8, 77, 0, 3),
    (15, 1, 255, 0, 2),
    (16, 8, 500, 3, 0),
)
"""As PLAN; the second row's tokens stand where keys are split, on both sides."""


@pytest.mark.parametrize("window", [0, 3, 300])
@pytest.mark.parametrize("name", LAYOUTS)
def test_new_heads_see_what_they_write(name: str, window: int) -> None:
    drawn, plan, scale = heads_of(name, 26), plan_of(window, 0, SHORT), 0.1
    layout, projected = drawn.heads.layout, drawn.heads.projected
    if mx.cuda.is_available() and attention.refusal(drawn.shape, projected.dtype) is not None:
        pytest.skip("not a type that the kernels do")
    slabs = slabs_of(drawn.shape, projected.dtype)
    mx.eval(slabs)
    before = [tuple(double(array) for array in pair) for pair in slabs]
    # queries with gates between them
    is_gated = layout.q_stride > drawn.shape.head_dim
    table, gates = mx.array([*plan, *[(0,) * 8] * 2], dtype=mx.int32), (projected, layout) if is_gated else None
    got = attention.attend(drawn.shape, table, 8, drawn.heads, slabs, mx.array([scale]), None, gates)
    mx.eval(got)
    check_written(drawn, plan, slabs, before)
    heads = double(projected)[0][:24, : drawn.shape.num_heads * layout.q_stride].reshape(24, drawn.shape.num_heads, -1)
    wanted = layer_references.attend(
        drawn.shape,
        plan,
        drawn.queries[:24],
        slabs,
        scale,
        None,
        heads[..., drawn.shape.head_dim :] if is_gated else None,
    )
    assert got.shape[1] == 26 and error(got[:, :24], wanted) < drawn.tolerance


@pytest.fixture(autouse=True)
def stock_blas() -> None:
    """With OpenBLAS on an Intel Xeon the bits of the reference operations depend on company."""
    blas.install("exact")


COMPANY = ((0, 1, 40, 0, 0), (1, 3, 1180, 2, 0), (4, 1, 255, 0, 1), (5, 8, 255, 3, 0), (13, 1, 700, 1, 0))
"""As PLAN; rows of one split and of several, some of which end where another begins."""
COMPANY_FORMS = [
    (HeadShape(4, 2, 64), mx.float16, 0),
    (HeadShape(8, 1, 64), mx.bfloat16, 300),
    (HeadShape(8, 2, 128), mx.bfloat16, 0),
    (HeadShape(4, 1, 256), mx.bfloat16, 0),
]
WINDOW, CHUNK = 8, 64
"""Most tokens of a row."""


def attended(*args: Any, **kwargs: Any) -> mx.array:
    """Evaluated, as launches share memory: those that don't wait for each other must not run at once."""
    found = attention.attend(*args, **kwargs)[0]
    mx.eval(found)
    return found


@pytest.mark.parametrize("most", [WINDOW, CHUNK])
@pytest.mark.parametrize(("shape", "dtype", "window"), COMPANY_FORMS, ids=str)
def test_a_row_finds_the_same_bits_in_any_company(shape: HeadShape, dtype: mx.Dtype, window: int, most: int) -> None:
    slabs, scale, plan = slabs_of(shape, dtype), mx.array([0.125]), plan_of(window, 1, COMPANY)
    queries, sinks = drawn(7, dtype, 14, shape.num_heads, shape.head_dim), drawn(8, dtype, shape.num_heads)

    def found(rows: list[tuple[int, ...]], most: int, own: mx.array = queries, num_added: int = 1) -> mx.array:
        table = mx.array([*rows, *[(0,) * 8] * num_added], dtype=mx.int32)
        return attended(shape, table, most, own, slabs, scale, sinks, many_tokens=4)

    # so many that their number would change splits, if that counted
    together = found(plan, most, num_added=63)
    for row in plan:
        tokens = slice(row[0], row[0] + row[1])
        own_most = row[1] if most == WINDOW else most
        assert mx.array_equal(found([(0, *row[1:])], own_most, queries[tokens]), together[tokens])
    assert mx.array_equal(found(plan[::-1], most), together)
    if most == WINDOW:  # a token as the first of a window and on its own
        lo, _, *rest = plan[1]
        assert mx.array_equal(found([(0, 1, *rest)], 1, queries[lo : lo + 1]), together[lo : lo + 1])


@pytest.mark.parametrize("most", [WINDOW, CHUNK])
@pytest.mark.parametrize(("shape", "dtype", "window"), COMPANY_FORMS, ids=str)
def test_a_row_finds_the_same_bits_wherever_its_keys_are(
    shape: HeadShape, dtype: mx.Dtype, window: int, most: int
) -> None:
    """Keys of all slots behind each other in one array, at multiples of 256, and in a separate slot."""
    slabs, scale = slabs_of(shape, dtype), mx.array([0.125])
    queries, plan = drawn(7, dtype, 14, shape.num_heads, shape.head_dim), plan_of(window, 1, COMPANY)
    offsets = {(0, 0): 512, (2, 0): 1024, (0, 1): 0, (3, 0): 4096, (1, 0): 3072}
    one = [mx.zeros((1, shape.num_kv_heads, 1 << 13, shape.head_dim), dtype) for _ in range(2)]
    rows = []
    for lo, num_tokens, start, slab, slot, capacity, _, first in plan:
        at = offsets[slab, slot]
        for array, held in zip(one, slabs[slab], strict=True):
            array[0, :, at : at + capacity] = held[slot]
        rows.append((lo, num_tokens, at + start, 0, 0, 1 << 13, window, at + first))
    plans = mx.array(plan, dtype=mx.int32), mx.array(rows, dtype=mx.int32)
    wanted = attended(shape, plans[0], most, queries, slabs, scale, many_tokens=4)
    got = attended(shape, plans[1], most, queries, [(one[0], one[1])], scale, many_tokens=4)
    assert mx.array_equal(got, wanted)


@pytest.mark.parametrize(("shape", "dtype", "window"), COMPANY_FORMS, ids=str)
def test_a_chunk_finds_the_same_bits_however_it_is_cut(shape: HeadShape, dtype: mx.Dtype, window: int) -> None:
    """Of many tokens with their keys in one part; and of few, also where a window begins."""
    slabs, scale = slabs_of(shape, dtype), mx.array([0.125])
    queries = drawn(7, dtype, 90, shape.num_heads, shape.head_dim)

    def found(begin: int, end: int, many_tokens: int, most: int = MANY_TOKENS) -> mx.array:
        plan = mx.array(plan_of(window, 1, ((0, end - begin, 400 + begin, 2, 0),)), dtype=mx.int32)
        own = queries[begin:end]
        return attended(shape, plan, most, own, slabs, scale, many_tokens=many_tokens)

    for many_tokens in (1, MANY_TOKENS):
        whole = found(0, 90, many_tokens)
        cut = found(0, 37, many_tokens), found(37, 90, many_tokens)
        assert mx.array_equal(mx.concatenate(cut), whole)
    assert mx.array_equal(found(84, 90, MANY_TOKENS, WINDOW), whole[84:])


@pytest.mark.parametrize(("shape", "dtype", "window"), COMPANY_FORMS, ids=str)
def test_an_invariant_token_finds_the_same_bits_in_any_row(shape: HeadShape, dtype: mx.Dtype, window: int) -> None:
    """Whichever tokens of its prompt are computed with it, where its keys are in several parts."""
    slabs, scale, start = slabs_of(shape, dtype), mx.array([0.125]), 990
    queries, sinks = drawn(7, dtype, 90, shape.num_heads, shape.head_dim), drawn(8, dtype, shape.num_heads)

    def found(*rows: tuple[int, int]) -> mx.array:
        ends = np.cumsum([0, *(end - begin for begin, end in rows)]).tolist()
        places = [(lo, end - begin, start + begin, 2, 0) for lo, (begin, end) in zip(ends, rows, strict=False)]
        plan = mx.array(plan_of(window, 1, tuple(places)), dtype=mx.int32)
        own = mx.concatenate([queries[begin:end] for begin, end in rows])
        most = max(end - begin for begin, end in rows)
        return attended(shape, plan, most, own, slabs, scale, sinks, fixed_parts=True)

    whole = found((0, 90))
    for cut in ((37,), (84,), (1, 2, 33, 40)):
        parts = list(pairwise((0, *cut, 90)))
        assert mx.array_equal(mx.concatenate([found(part) for part in parts]), whole)
        assert mx.array_equal(found(*parts), whole)


SPLIT_ROWS = [
    # a row's tokens, its length before them, window, first key; then the splits' size, the first one and how many
    ((1, 0, 0, 0), (256, 0, 1)),
    ((1, 255, 0, 0), (256, 0, 1)),
    ((1, 256, 0, 0), (256, 0, 2)),
    ((3, 254, 0, 0), (256, 0, 2)),
    ((1, 4096, 0, 0), (256, 0, 17)),
    ((1, 4097, 0, 0), (512, 0, 9)),
    ((1, 16384, 0, 0), (512, 0, 33)),
    ((1, 16385, 0, 0), (1024, 0, 17)),
    ((1, 1 << 17, 0, 0), (4096, 0, 33)),
    ((80, 1 << 20, 0, 0), (32768, 0, 33)),
    # as much behind an offset
    ((1, 256 + 7 * 256, 0, 7 * 256), (256, 0, 2)),
    ((1, 4098 + 3 * 256, 0, 3 * 256 + 1), (512, 0, 9)),
    # windows: splits stand where they stood before it moved on
    ((1, 1000, 300, 0), (256, 2, 2)),
    ((1, 1100, 300, 0), (256, 3, 2)),
    ((8, 1 << 17, 4097, 0), (256, 496, 17)),
    ((0, 500, 0, 0), (256, 0, 0)),
]


def test_splits_follow_from_the_rows_own_length() -> None:
    kernel = CudaKernel(
        "splits",
        ("rows.cuh", "splits.cuh"),
        ("plan",),
        ("out",),
        "const Splits found(Row(plan, blockIdx.x), 256); int* to = out + blockIdx.x * 3; "
        "to[0] = found.size, to[1] = found.first, to[2] = found.number;",
    )
    if not mx.cuda.is_available():
        pytest.skip("no CUDA")
    plan = [(0, num, start, 0, 0, 1 << 21, window, first) for (num, start, window, first), _ in SPLIT_ROWS]
    (got,) = kernel([mx.array(plan, dtype=mx.int32)], {}, (len(plan), 1, 1), 1, (((len(plan), 3), mx.int32),))
    assert got.tolist() == [list(wanted) for _, wanted in SPLIT_ROWS]
    shape = HeadShape(8, 2, 128)
    assert all(number <= attention.most_splits(shape, row[0]) for row, (_, _, number) in SPLIT_ROWS)
