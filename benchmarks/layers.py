"""The kernels of delta and attention layers; where there is no CUDA, the operations that stand for them.

Slabs and states are so many, and taken in turn, that a GPU's cache serves none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from benchmarks import references as right
from benchmarks.cases import (
    Case,
    Chain,
    LayerSizes,
    case_of,
    error_of_all,
    error_of_first,
    normal,
    num_bytes,
    num_copies,
    rows_name,
    sizes_of,
)
from benchmarks.references import Float64, double, largest_error
from headrace.backend.cuda import attention, delta
from headrace.backend.cuda.shapes import (
    LONGEST_WINDOW,
    DeltaTable,
    DeltaWeights,
    Prepared,
    ProjectedHeads,
    Projection,
    Stash,
)
from headrace.backend.device import DeviceKind

# Gated delta layers


def delta_layers(kind: DeviceKind) -> Iterator[Case]:
    """A step's rows from projection to norm, a chunk's inputs and its scan, and the gated norm."""
    sizes = sizes_of(kind)
    shape, heads = sizes.delta, sizes.delta.num_v_heads
    weights = DeltaWeights(
        normal(sizes, shape.num_channels, shape.kernel_size, scale=0.3),
        mx.random.uniform(shape=(heads,)),
        normal(sizes, heads),
        1 + normal(sizes, shape.head_v_dim, scale=0.1),
        mx.array([1e-6]),
    )
    mx.eval(weights)
    for num_rows, num_tokens in sizes.rows:
        yield _step(sizes, weights, num_rows, num_tokens)
    for num_tokens in sizes.chunks:
        yield _prepare(sizes, weights, num_tokens)
        for num_rows, form in product((1, 7), ("tokens", "blocks") if mx.cuda.is_available() else ("operations",)):
            yield _scan(sizes, num_rows, num_tokens, form)
    for num_tokens in sizes.num_tokens:
        yield _gated_norm(sizes, weights, num_tokens)


def _table(sizes: LayerSizes, num_slots: int) -> DeltaTable:
    shape = sizes.delta
    keys, values = (shape.num_k_heads, shape.head_k_dim), (shape.num_v_heads, shape.head_v_dim)
    stashed = (2 * num_slots, LONGEST_WINDOW - 1)
    return DeltaTable(
        mx.random.normal((num_slots, *values, shape.head_k_dim)),
        normal(sizes, 2 * num_slots, shape.kernel_size - 1 + LONGEST_WINDOW, shape.num_channels),
        normal(sizes, *stashed, *keys, scale=shape.head_k_dim**-0.5),
        normal(sizes, *stashed, *values),
        *(mx.random.uniform(0.5, 1.0, (*stashed, shape.num_v_heads)) for _ in range(2)),
    )


def _step(sizes: LayerSizes, weights: DeltaWeights, num_rows: int, num_tokens: int) -> Case:
    """One token of a row is certain; all those of the window before were accepted."""
    shape, context, replayed = sizes.delta, sizes.delta.kernel_size - 1, num_tokens - 1
    state_bytes = 4 * shape.num_v_heads * shape.head_v_dim * shape.head_k_dim
    turns = num_copies(sizes, num_rows * state_bytes)
    table, x = _table(sizes, turns * num_rows), normal(sizes, 1, num_rows * num_tokens, shape.width)
    row = (num_tokens, 1, replayed, context + num_tokens)
    plans = [
        mx.array([(r * num_tokens, *row, slot, 2 * slot, 2 * slot + 1) for r, slot in enumerate(slots)], mx.int32)
        for slots in (range(t * num_rows, (t + 1) * num_rows) for t in range(turns))
    ]
    mx.eval(table, x, plans)
    own = double(x)[0]
    before: list[mx.array] = []

    def step(given: mx.array, i: int) -> list[mx.array]:
        if i == 0:  # the first row continues from where the last call left it
            before[:] = [table.state[:1] + 0]
            mx.eval(before)
        return [delta.step(shape, weights, plans[i % turns], given, table)]

    def error(found: Sequence[mx.array]) -> float:
        first, of_row = Stash(*(array[:1] for array in table.stash)), (0, *row, 0)
        y, *_ = right.window(shape, weights, of_row, own, double(table.raw[:1]), first, double(before[0]))
        return largest_error(found[0][:, :num_tokens], right.gated_norm(shape, weights, y, own[:num_tokens]))

    # the state and the context are written as they are read, a window's raw inputs and uncertain tokens once more
    stashed = num_bytes([array[:1, :replayed] for array in table.stash])
    moved = 2 * (state_bytes + table.raw[:1, :context].nbytes + stashed) + table.raw[:1, :num_tokens].nbytes
    return case_of(
        "delta.step",
        rows_name(num_rows, num_tokens),
        x.nbytes + num_rows * (moved + num_tokens * shape.num_v_heads * shape.head_v_dim * x.itemsize),
        Chain(x, step),
        error,
    )


def _prepare(sizes: LayerSizes, weights: DeltaWeights, num_tokens: int) -> Case:
    """A row without tokens so far."""
    shape, table = sizes.delta, _table(sizes, 1)
    x = normal(sizes, 1, num_tokens, shape.width)
    plan = mx.array([(0, num_tokens, num_tokens, 0, 0, -1, 0, 0, 0)], mx.int32)
    stops = mx.array([0], mx.int32)
    mx.eval(x, table, plan, stops)

    def step(given: mx.array, _: int) -> list[mx.array]:
        return list(delta.prepare_chunks(shape, weights, plan, stops, num_tokens, given, table)[0])

    context = np.zeros((shape.kernel_size - 1, shape.num_channels))
    *wanted, _ = right.prepare(shape, weights, double(x)[0], context)
    # gates of the output's norm are not read
    read = x.nbytes * (shape.num_channels + 2 * shape.num_v_heads) // shape.width
    return case_of(
        "delta.prepare_chunks",
        rows_name(1, num_tokens),
        read + num_bytes(step(x, 0)),
        Chain(x, step),
        error_of_all(wanted),
    )


def _scan(sizes: LayerSizes, num_rows: int, num_tokens: int, form: str) -> Case:
    """Rows of equal lengths that continue from states; form: what a kernel computes at once."""
    shape, table, packed = sizes.delta, _table(sizes, num_rows), num_rows * num_tokens
    keys = mx.random.normal((2, packed, shape.num_k_heads, shape.head_k_dim), dtype=mx.float32)
    queries, keys = keys / mx.linalg.norm(keys, axis=-1, keepdims=True)
    gates = mx.random.uniform(0.8, 1.0, (2, packed, shape.num_v_heads))
    tokens = Prepared(
        (queries * shape.head_k_dim**-0.5).astype(sizes.dtype),
        keys.astype(sizes.dtype),
        normal(sizes, packed, shape.num_v_heads, shape.head_v_dim),
        *gates,
    )
    rows = [(row * num_tokens, num_tokens, num_tokens, 0, row, 2 * row, -1, 0, 0) for row in range(num_rows)]
    plan, stops = mx.array(rows, mx.int32), mx.array([0], mx.int32)
    mx.eval(tokens, table, plan, stops)
    q, k, v, g, beta = (double(array)[:num_tokens] for array in tokens)
    wanted, _, _ = right.scan(q, k, v, g, beta, double(table.state)[0], None)

    def step(v: mx.array, _: int) -> list[mx.array]:
        # the state continues from call to call; the first one's result is compared
        given = tokens._replace(v=v)
        return list(delta.scan_chunks(plan, stops, given, table.state, in_blocks=form == "blocks", least=1))[:1]

    return case_of(
        "delta.scan_chunks",
        rows_name(num_rows, num_tokens),
        num_bytes(tokens) + tokens.v.nbytes + 2 * table.state.nbytes,
        Chain(tokens.v, step),
        error_of_first(wanted, lambda y: y[:num_tokens]),
        form,
    )


def _gated_norm(sizes: LayerSizes, weights: DeltaWeights, num_tokens: int) -> Case:
    shape = sizes.delta
    x = normal(sizes, num_tokens, shape.num_v_heads, shape.head_v_dim)
    projected = normal(sizes, 1, num_tokens, shape.width)
    mx.eval(x, projected)
    wanted = right.gated_norm(shape, weights, double(x), double(projected)[0])
    chain = Chain(x, lambda given, _: [delta.gated_norm(shape, weights, given, projected)])
    return case_of("delta.gated_norm", rows_name(num_tokens, 1), 3 * x.nbytes, chain, error_of_first(wanted))


# Attention layers


@dataclass(frozen=True, slots=True)
class _Cached:
    """Rows behind a context: keys and values `[slots, Hkv, capacity, D]`, and where the rows of each turn are."""

    slabs: tuple[mx.array, mx.array]
    rows: tuple[tuple[tuple[int, ...], ...], ...]
    plans: tuple[mx.array, ...]


def attention_layers(kind: DeviceKind) -> Iterator[Case]:
    """Queries turned and keys written, and attention with its gates."""
    sizes = sizes_of(kind)
    for num_rows, num_tokens in sizes.rows:
        cached = _cached(sizes, num_rows, num_tokens, sizes.contexts[0])
        yield _rope_append(sizes, cached, num_rows, num_tokens, sizes.contexts[0])
    for context in sizes.contexts:
        for num_rows, num_tokens in sizes.rows:
            yield _attend(sizes, _cached(sizes, num_rows, num_tokens, context), num_rows, num_tokens, context)
    for num_tokens, context in product(sizes.chunks, (0, *sizes.contexts)):
        yield _attend_chunk(sizes, _cached(sizes, 1, num_tokens, context), num_tokens, context)


def _cached(sizes: LayerSizes, num_rows: int, num_tokens: int, context: int) -> _Cached:
    heads, capacity = sizes.heads, -(-(context + num_tokens) // 256) * 256
    one = [normal(sizes, 1, heads.num_kv_heads, capacity, heads.head_dim) for _ in range(2)]
    turns = num_copies(sizes, num_rows * num_bytes(one))
    keys, values = (mx.contiguous(mx.broadcast_to(x, (turns * num_rows, *x.shape[1:]))) for x in one)
    rows = tuple(
        tuple((r * num_tokens, num_tokens, context, 0, turn * num_rows + r, capacity, 0, 0) for r in range(num_rows))
        for turn in range(turns)
    )
    plans = tuple(mx.array(row, mx.int32) for row in rows)
    mx.eval(keys, values, plans)
    return _Cached((keys, values), rows, plans)


def _layout(sizes: LayerSizes) -> Projection:
    """Of a gated layer: each query is followed by its gate."""
    heads, stride = sizes.heads, 2 * sizes.heads.head_dim
    k_at, kv_width = heads.num_heads * stride, heads.num_kv_heads * heads.head_dim
    return Projection(k_at + 2 * kv_width, stride, k_at, k_at + kv_width, sizes.rotary)


class _Heads(NamedTuple):
    """Projections of rows behind a context. make: heads of them; wanted: queries, keys and values of the first row."""

    projected: mx.array
    make: Callable[[mx.array], ProjectedHeads]
    wanted: tuple[Float64, Float64, Float64]


def _heads(sizes: LayerSizes, num_rows: int, num_tokens: int, context: int) -> _Heads:
    heads, layout = sizes.heads, _layout(sizes)
    x = normal(sizes, 1, num_rows * num_tokens, layout.width)
    positions = mx.array([[context + at % num_tokens for at in range(num_rows * num_tokens)]], mx.int32)
    pairs = np.arange(sizes.rotary // 2)
    turns, axes = (1e7 ** (-pairs / len(pairs))).astype(np.float32), np.zeros(len(pairs), np.int32)
    frequencies = mx.array(turns), mx.array(axes)
    of_queries, of_keys = (1 + normal(sizes, heads.head_dim, scale=0.1).astype(mx.float32) for _ in range(2))
    norms = of_queries, of_keys, mx.array([1e-6])
    mx.eval(x, positions, frequencies, norms)
    first = double(positions[:, :num_tokens]), double(x)[0, :num_tokens], turns.astype(np.float64), axes
    wanted = right.rope_append(heads, layout, *first, (double(of_queries), double(of_keys), 1e-6))
    return _Heads(x, lambda given: ProjectedHeads(layout, given, positions, frequencies, norms), wanted)


def _rope_append(sizes: LayerSizes, cached: _Cached, num_rows: int, num_tokens: int, context: int) -> Case:
    heads, (x, make, wanted) = sizes.heads, _heads(sizes, num_rows, num_tokens, context)

    def step(given: mx.array, i: int) -> list[mx.array]:
        plan = cached.plans[i % len(cached.plans)]
        return [attention.rope_append(heads, plan, make(given), [cached.slabs]), *cached.slabs]

    def error(found: Sequence[mx.array]) -> float:
        written = (array[0, :, context : context + num_tokens].swapaxes(0, 1) for array in found[1:])
        pairs = zip((found[0][:num_tokens], *written), wanted, strict=True)
        return max(largest_error(*pair) for pair in pairs)

    moved = 2 * x.nbytes * (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim // _layout(sizes).width
    return case_of("attention.rope_append", rows_name(num_rows, num_tokens), moved, Chain(x, step), error)


def _attend(sizes: LayerSizes, cached: _Cached, num_rows: int, num_tokens: int, context: int) -> Case:
    """Keys and values that it writes included."""
    heads, layout, scale = sizes.heads, _layout(sizes), sizes.heads.head_dim**-0.5
    x, make, (queries, *new) = _heads(sizes, num_rows, num_tokens, context)
    scales = mx.array([scale])

    def step(given: mx.array, i: int) -> list[mx.array]:
        plan = cached.plans[i % len(cached.plans)]
        return [attention.attend(heads, plan, num_tokens, make(given), [cached.slabs], scales, None, (given, layout))]

    of_row = double(x)[0, :num_tokens, : layout.k_at].reshape(num_tokens, heads.num_heads, 2, -1)
    held = [mx.array(array[:1]) for array in cached.slabs]
    for array, tokens in zip(held, new, strict=True):
        array[0, :, context : context + num_tokens] = mx.array(tokens.swapaxes(0, 1)).astype(array.dtype)
    wanted = right.attend(heads, cached.rows[0][:1], queries, [(held[0], held[1])], scale, None, of_row[:, :, 1])
    # keys and values of the context; what is made of a projection, and as many outputs as queries
    row = held[0][0, :, : context + num_tokens].nbytes
    moved = num_rows * 2 * row + x.nbytes + x.nbytes * heads.num_heads * heads.head_dim // layout.width
    shape = f"{rows_name(num_rows, num_tokens)} behind {context}"
    error = error_of_first(wanted, lambda y: y[:, :num_tokens])
    return case_of("attention.attend", shape, moved, Chain(x, step), error)


def _attend_chunk(sizes: LayerSizes, cached: _Cached, num_tokens: int, context: int) -> Case:
    """Its own keys and values are there already."""
    heads, scale, num_checked = sizes.heads, sizes.heads.head_dim**-0.5, min(8, num_tokens)
    queries = normal(sizes, num_tokens, heads.num_heads, heads.head_dim)
    scales = mx.array([scale])
    mx.eval(queries)

    def step(given: mx.array, i: int) -> list[mx.array]:
        plan = cached.plans[i % len(cached.plans)]
        return [attention.attend(heads, plan, max(64, num_tokens), given, [cached.slabs], scales)]

    last = num_tokens - num_checked
    row = (0, num_checked, context + last, *cached.rows[0][0][3:])
    held = [array[:1] for array in cached.slabs]
    wanted = right.attend(heads, [row], double(queries[last:]), [(held[0], held[1])], scale, None, None)
    moved = 2 * queries.nbytes + sum(array[0, :, : context + num_tokens].nbytes for array in held)
    error = error_of_first(wanted, lambda y: y[:, last:])
    return case_of("attention.attend", f"chunk of {num_tokens} behind {context}", moved, Chain(queries, step), error)
